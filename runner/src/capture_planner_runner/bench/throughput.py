"""Generated tokens per second, end to end, against transformers' continuous batching on the same weights."""

from __future__ import annotations

import copy
import inspect
import statistics
from collections.abc import Callable, Sequence
from importlib import metadata
from time import perf_counter
from typing import TYPE_CHECKING, Any

import attrs
import torch

from capture_planner.errors import RunError, class_and_message
from capture_planner.records.text import counted
from capture_planner_runner.bench.record import Throughput
from capture_planner_runner.bench.rig import Absence, Rig
from capture_planner_runner.models.fp8 import FP8

if TYPE_CHECKING:
    from capture_planner_runner.models.huggingface import HuggingFaceModel

ATTENTION = "sdpa"
"""The attention that needs no other package; transformers makes it paged."""

Prompts = Sequence[Sequence[int]]


@attrs.frozen(kw_only=True)
class Load:
    """A load of requests that all arrive at once."""

    requests: int = 64
    prompt: int = 128
    """Tokens per prompt."""
    output: int = 128
    """Generated tokens per request."""
    stated: frozenset[str] = frozenset()
    """Which of ``prompt`` and ``output`` the user stated: those are never shortened."""

    def within(self, longest: int) -> Load:
        """Return the load with lengths that fit a model of ``longest`` tokens.

        Raises ``RunError`` if the stated lengths do not fit.
        """
        prompt, output = self.prompt, self.output
        if not self.stated:
            # Both are halved, so that their ratio stays the same.
            while prompt + output > longest and max(prompt, output) > 1:
                prompt, output = max(1, prompt // 2), max(1, output // 2)
            return attrs.evolve(self, prompt=prompt, output=output)
        if "output" not in self.stated:
            output = max(1, min(output, longest - prompt))
        if "prompt" not in self.stated:
            prompt = max(1, min(prompt, longest - output))
        if prompt + output > longest:
            lengths = {"prompt": prompt, "output": output}
            stated = [f"--{name}-tokens {lengths[name]}" for name in lengths if name in self.stated]
            raise RunError(
                f"{' and '.join(stated)}: too long for a model of {counted(longest, 'token')}, prompt and "
                "output together; name fewer"
            )
        return attrs.evolve(self, prompt=prompt, output=output)


def throughput(rig: Rig, load: Load, advance: Callable[[str], None], *, compare: bool) -> Throughput:
    """Serve the load with the whole plan and, if ``compare``, with transformers."""
    rates = []
    with rig.runner(rig.plan) as runner:
        runner.capture(memory=rig.plan.budget.memory)
        for run in range(rig.effort.runs + 1):
            requests = rig.requests(load.requests, load.prompt, load.output, seed=run)
            started = perf_counter()
            answers = runner.serve(requests)
            seconds = perf_counter() - started
            rates.append(sum(answer.output_tokens for answer in answers) / seconds)
            advance("ours")
    other, reason = None, "skipped by --no-compare"
    if compare:
        try:
            other, reason = _transformers(rig, load, advance), description()
        except Absence as absence:
            reason = str(absence)
        # The second model must be gone before the next figure reserves its cache.
        rig.settle()
    return Throughput(
        num_requests=load.requests,
        prompt_tokens=load.prompt,
        output_tokens=load.output,
        # The first run warms up.
        tokens_per_second=statistics.median(rates[1:]),
        other=other,
        other_says=reason,
    )


def _transformers(rig: Rig, load: Load, advance: Callable[[str], None]) -> float:
    if rig.device.type != "cuda":
        raise Absence("transformers' CUDA graphs need a GPU, and this is a CPU")
    batches = [
        [request.prompt for request in rig.requests(load.requests, load.prompt, load.output, seed=run)]
        for run in range(rig.effort.runs + 1)
    ]
    try:
        model = copied(rig.model)
        rates = transformers_rates(model, batches[0], batches[1:], load.output)
    except Absence:
        raise
    except Exception as error:
        # Any error of the other library is the reason why there is no comparison.
        message = class_and_message(error)[:300]
        raise Absence(f"{description()} failed: {message}") from error
    advance(f"transformers, {counted(load.requests, 'request')}")
    return statistics.median(rates)


def description() -> str:
    """Return version and attention, for the report."""
    return f"transformers {metadata.version('transformers')}, continuous batching, {ATTENTION}"


def copied(target: HuggingFaceModel) -> Any:
    """Return a second model with transformers' own attention and a copy of the weights.

    Raises ``Absence`` if transformers cannot make one, or it has other weights.
    """
    from transformers import AutoModelForCausalLM

    decoder: Any = target._decoder
    config = copy.deepcopy(decoder.config)
    weights = {name: getattr(module, attribute) for name, module, attribute in target.weights()}
    if any(weight.dtype is FP8 for weight in weights.values()):
        raise Absence(f"{target.name} has FP8 weights, for which transformers downloads kernels")
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


def config_of() -> Any:
    """Return its configuration, without the options that the installed version does not know."""
    from transformers import ContinuousBatchingConfig

    options: dict[str, Any] = {
        "use_cuda_graph": True,
        # A batch must not reuse the cached prompts of an earlier one.
        "allow_block_sharing": False,
        # It might download the attention that it switches to.
        "auto_switch_to_flash": False,
    }
    known = inspect.signature(ContinuousBatchingConfig).parameters
    return ContinuousBatchingConfig(**{name: value for name, value in options.items() if name in known})


def transformers_rates(model: Any, first: Prompts, timed: Sequence[Prompts], output_tokens: int) -> list[float]:
    """Return generated tokens per second of each batch in ``timed``; ``first`` makes and warms up the manager.

    CUDA graphs are as in versions 5.17 to 5.23; the times include neither capture nor compilation.
    Decoding is greedy, with exactly ``output_tokens`` per prompt; raises ``Absence`` for other results.
    """
    from transformers import GenerationConfig

    generation = GenerationConfig(  # type: ignore[no-untyped-call, unused-ignore]
        max_new_tokens=output_tokens,
        do_sample=False,
        # No token has the id -1: every answer is of the length that was asked for.
        eos_token_id=-1,
        pad_token_id=0,
    )
    options = config_of()
    rates = []
    try:
        for number, prompts in enumerate((first, *timed)):
            started = perf_counter()
            answers = model.generate_batch(
                inputs=[list(prompt) for prompt in prompts],
                generation_config=generation,
                continuous_batching_config=options,
                progress_bar=False,
                persistent_manager=True,
            )
            seconds = perf_counter() - started
            _refuse_incomplete(answers, len(prompts), output_tokens)
            if number:
                rates.append(len(prompts) * output_tokens / seconds)
    finally:
        model.destroy_cached_continuous_batching_manager()
    return rates


def _refuse_incomplete(answers: dict[str, Any], requests: int, output_tokens: int) -> None:
    """Raise ``Absence`` if a result has an error or is missing: the library logs errors and returns the rest."""
    errors = sorted({str(result.error) for result in answers.values() if result.error is not None})
    if errors:
        raise Absence(f"transformers' continuous batching failed: {errors[0][:300]}")
    lengths = sorted({len(result.generated_tokens) for result in answers.values()})
    if len(answers) != requests or lengths != [output_tokens]:
        raise Absence(
            f"transformers' continuous batching answered {len(answers)} of {counted(requests, 'request')} with "
            f"{lengths} tokens each, instead of {output_tokens}"
        )
