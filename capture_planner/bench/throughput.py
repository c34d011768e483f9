"""Generated tokens per second, end to end, against transformers' continuous batching."""

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
            served = runner.serve(requests)
            seconds = perf_counter() - started
            rates.append(sum(done.output_tokens for done in served) / seconds)
            advance("ours")
    other, reason = None, "skipped by --no-compare"
    if compare:
        try:
            other, reason = _transformers(rig, load, advance), batching.description()
        except Absence as absence:
            reason = str(absence)
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
        model = batching.copied(rig.model)
        rates = batching.tokens_per_second(model, batches[0], batches[1:], load.output)
    except Absence:
        raise
    except Exception as error:
        # Any error of the other library is the reason why there is no comparison.
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise Absence(f"{batching.description()} failed: {message}") from error
    advance(f"transformers, {counted(load.requests, 'request')}")
    return statistics.median(rates)
