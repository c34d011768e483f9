"""Generated tokens per second, end to end, against transformers' own continuous batching."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import attrs

from capture_planner.bench import batching
from capture_planner.bench.record import Throughput
from capture_planner.bench.rig import Absence, Rig
from capture_planner.errors import RunError
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class Load:
    """What is served: requests that are all there at once."""

    requests: int = 64
    prompt: int = 128
    output: int = 128
    stated: frozenset[str] = frozenset()
    """Which of ``prompt`` and ``output`` somebody named: those are never cut."""

    def within(self, longest: int) -> Load:
        """Return the load with what nobody named cut until it fits a model of ``longest`` tokens.

        Raises ``RunError`` where what was named does not fit.
        """
        prompt, output = self.prompt, self.output
        if "prompt" in self.stated or "output" in self.stated:
            if "output" not in self.stated:
                output = max(1, min(output, longest - prompt))
            if "prompt" not in self.stated:
                prompt = max(1, min(prompt, longest - output))
            if prompt + output > longest:
                lengths = {"prompt": prompt, "output": output}
                named = [f"--{name}-tokens {lengths[name]}" for name in lengths if name in self.stated]
                raise RunError(
                    f"{' and '.join(named)}: too long for a model of {counted(longest, 'token')}, prompt and "
                    "output together; name fewer"
                )
        while prompt + output > longest and max(prompt, output) > 1:
            prompt, output = max(1, prompt // 2), max(1, output // 2)
        return attrs.evolve(self, prompt=prompt, output=output)


def throughput(rig: Rig, load: Load, advance: Callable[[str], None], *, compare: bool) -> Throughput:
    """Serve the load by the whole plan; then, unless ``compare`` is False, by transformers."""
    found = []
    with rig.runner(rig.plan) as runner:
        runner.capture(memory=rig.plan.budget.memory)
        for run in range(rig.effort.runs + 1):
            requests = rig.requests(load.requests, load.prompt, load.output, seed=run)
            started = perf_counter()
            served = runner.serve(requests)
            seconds = perf_counter() - started
            found.append(sum(done.output_tokens for done in served) / seconds)
            advance("ours")
    other, says = None, "left out by --no-compare"
    if compare:
        try:
            other, says = _other(rig, load, advance), batching.says()
        except Absence as absence:
            says = str(absence)
        rig.settle()
    return Throughput(
        num_requests=load.requests,
        prompt_tokens=load.prompt,
        output_tokens=load.output,
        tokens_per_second=statistics.median(found[1:]),
        other=other,
        other_says=says,
    )


def _other(rig: Rig, load: Load, advance: Callable[[str], None]) -> float:
    if rig.device.type != "cuda":
        raise Absence("transformers' CUDA graphs need a GPU, and this is a CPU")
    batches = [
        [request.prompt for request in rig.requests(load.requests, load.prompt, load.output, seed=run)]
        for run in range(rig.effort.runs + 1)
    ]
    try:
        model = batching.copied(rig.model)
        found = batching.tokens_per_second(model, batches[0], batches[1:], load.output)
    except Absence:
        raise
    except Exception as error:
        # Another library's code: whatever it raises is the reason why there is nothing to compare with.
        says = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise Absence(f"{batching.says()} broke: {says}") from error
    advance(f"transformers, {counted(load.requests, 'request')}")
    return statistics.median(found)
