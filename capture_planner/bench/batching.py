"""Transformers' continuous batching on the same weights, with which a throughput is compared.

Its CUDA graphs are on, as used in versions 5.17 to 5.23: a first batch makes and warms up the manager,
and later ones are timed, so that the time includes neither capture nor compilation.
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
"""The attention that needs no other package; transformers makes it paged."""

Prompts = Sequence[Sequence[int]]


def description() -> str:
    """Return version and attention, for the report."""
    return f"transformers {transformers.__version__}, continuous batching, {ATTENTION}"


def copied(target: HuggingFaceModel) -> Any:
    """Return a second model with transformers' own attention and a copy of the weights.

    Raises ``Absence`` if transformers cannot make one, or it has other weights.
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
        raise Absence(f"transformers cannot make a second copy of {target.name}: {error}") from error
    state = model.state_dict()
    if missing := sorted(set(state) - set(weights)):
        raise Absence(f"a second copy of {target.name} has other weights: {', '.join(missing[:3])}")
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(weights[name])
    return model.eval().requires_grad_(False)


def config_of(*, cuda_graphs: bool) -> Any:
    """Return its configuration, without the options that the installed version does not know."""
    from transformers import ContinuousBatchingConfig

    options: dict[str, Any] = {
        "use_cuda_graph": cuda_graphs,
        # A batch must not reuse the cached prompts of an earlier one.
        "allow_block_sharing": False,
        # It might download the attention that it switches to.
        "auto_switch_to_flash": False,
    }
    known = inspect.signature(ContinuousBatchingConfig).parameters
    return ContinuousBatchingConfig(**{name: value for name, value in options.items() if name in known})


def tokens_per_second(
    model: Any, first: Prompts, timed: Sequence[Prompts], output_tokens: int, *, cuda_graphs: bool = True
) -> list[float]:
    """Return generated tokens per second of each batch in ``timed``; ``first`` warms up.

    Decoding is greedy, with exactly ``output_tokens`` per prompt; raises ``Absence`` for other results.
    """
    generation = GenerationConfig(  # type: ignore[no-untyped-call, unused-ignore]
        max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options = config_of(cuda_graphs=cuda_graphs)
    rates = []
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
                rates.append(len(prompts) * output_tokens / seconds)
    finally:
        model.destroy_cached_continuous_batching_manager()
    return rates


def _refuse_incomplete(done: dict[str, Any], requests: int, output_tokens: int) -> None:
    """Raise ``Absence`` if a result has an error or is missing: the library logs errors and returns the rest."""
    errors = sorted({str(result.error) for result in done.values() if result.error is not None})
    if errors:
        raise Absence(f"transformers' continuous batching failed: {errors[0][:300]}")
    lengths = sorted({len(result.generated_tokens) for result in done.values()})
    if len(done) != requests or lengths != [output_tokens]:
        raise Absence(
            f"transformers' continuous batching answered {len(done)} of {counted(requests, 'request')} with "
            f"{lengths} tokens each, instead of {output_tokens}"
        )
