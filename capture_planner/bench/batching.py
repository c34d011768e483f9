"""Transformers' own continuous batching, on the same weights: what a throughput is compared with.

Its CUDA graphs are on, as they are used in its versions 5.17 to 5.23: the manager is made and warmed up
by a first batch, and a second one is timed, so that neither capture nor compilation is in the time.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from capture_planner.bench.rig import Absence
from capture_planner.records.text import counted
from capture_planner.runtime.models.huggingface import HuggingFaceModel

ATTENTION = "sdpa"
"""The attention that is always there; transformers makes it paged."""

Prompts = Sequence[Sequence[int]]


def says() -> str:
    """Return what it is, for the record."""
    return f"transformers {transformers.__version__}, continuous batching, {ATTENTION}"


def copied(target: HuggingFaceModel) -> Any:
    """Return the model anew, with transformers' own attention and a copy of the same weights.

    Raises ``Absence`` where the weights do not make a model of that configuration.
    """
    decoder: Any = target._decoder
    config = copy.deepcopy(decoder.config)
    weights = {name: getattr(module, attribute) for name, module, attribute in target.weights()}
    device = next(iter(weights.values())).device
    try:
        with torch.device(device):
            factory: Any = AutoModelForCausalLM
            model: Any = factory.from_config(config, dtype=target.dtype, attn_implementation=ATTENTION)
    except (ValueError, KeyError, RuntimeError) as error:
        raise Absence(f"transformers makes no second copy of {target.name}: {error}") from error
    mine = model.state_dict()
    if missing := sorted(set(mine) - set(weights)):
        raise Absence(f"a second copy of {target.name} has other weights: {', '.join(missing[:3])}")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(weights[name])
    return model.eval().requires_grad_(False)


def config_of(*, cuda_graphs: bool) -> Any:
    """Return its configuration; options that a version does not have are left out."""
    from transformers import ContinuousBatchingConfig

    wanted: dict[str, Any] = {
        "use_cuda_graph": cuda_graphs,
        # The second batch must not find the first one's prompts in the cache.
        "allow_block_sharing": False,
        # What it would switch to, it may want to download.
        "auto_switch_to_flash": False,
    }
    known = inspect.signature(ContinuousBatchingConfig).parameters
    return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})


def tokens_per_second(
    model: Any, first: Prompts, timed: Sequence[Prompts], output_tokens: int, *, cuda_graphs: bool = True
) -> list[float]:
    """Return generated tokens per second of each batch in ``timed``; ``first`` warms up.

    Greedy, and each prompt gets exactly ``output_tokens``. Raises ``Absence`` where it does not.
    """
    generation = GenerationConfig(  # type: ignore[no-untyped-call, unused-ignore]
        max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options = config_of(cuda_graphs=cuda_graphs)
    found = []
    try:
        for number, prompts in enumerate((first, *timed)):
            started = perf_counter()
            done = model.generate_batch(
                inputs=[list(prompt) for prompt in prompts],
                generation_config=generation,
                continuous_batching_config=options,
                progress_bar=False,
                persistent_manager=True,
            )
            seconds = perf_counter() - started
            _refuse_incomplete(done, len(prompts), output_tokens)
            if number:
                found.append(len(prompts) * output_tokens / seconds)
    finally:
        model.destroy_cached_continuous_batching_manager()
    return found


def _refuse_incomplete(done: dict[str, Any], requests: int, output_tokens: int) -> None:
    """It logs what breaks and returns what it has, so that is looked at."""
    errors = sorted({str(result.error) for result in done.values() if result.error is not None})
    if errors:
        raise Absence(f"transformers' continuous batching broke: {errors[0][:300]}")
    lengths = sorted({len(result.generated_tokens) for result in done.values()})
    if len(done) != requests or lengths != [output_tokens]:
        raise Absence(
            f"transformers' continuous batching answered {len(done)} of {counted(requests, 'request')}, with "
            f"{lengths} tokens each, and {output_tokens} were asked for"
        )
