"""Small differences on a noisy host: many neighbouring pairs, their trimmed mean, and its bootstrap interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

BLOCK = 8
"""Steps that an engine runs before the other has its turn."""
TRIM = 0.2
"""Share of the pairs that is left out at each end: bursts of other work on the host."""


class Stepper(Protocol):
    """An engine of benchmarks/_vllm_worker.py."""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""


Blocks = tuple[dict[str, Any], dict[str, Any]]
"""Neighbouring blocks of decode steps of two engines, each with its ``seconds`` and ``tokens``."""


def paired_steps(one: Stepper, other: Stepper, load: Mapping[str, Any], runs: int) -> list[Blocks]:
    """Return neighbouring blocks of decode steps of two engines that serve the same load at once.

    They take turns to be first, and only one works at a time. Steps with prompts, and with fewer requests than the
    load has, are left out.
    """
    pairs: list[Blocks] = []
    for _ in range(runs):
        for engine in (one, other):
            engine.answer({**load, "begin": True})
        ended = False
        while not ended:
            order = (one, other) if len(pairs) % 2 else (other, one)
            blocks = {id(engine): engine.answer({"steps": BLOCK}) for engine in order}
            ended = any(block["ended"] for block in blocks.values())
            if not ended:
                pairs.append((blocks[id(one)], blocks[id(other)]))
        for engine in (one, other):
            engine.answer({"drain": True})
    return pairs


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the least and the largest fifth."""
    cut = int(TRIM * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def paired_cost(pairs: Sequence[Sequence[float]], resamples: int = 1000) -> dict[str, Any]:
    """Return by which share the first of a pair takes longer than the second, with a 95 % interval.

    :param pairs: seconds of two neighbouring runs, each at least 0; at least one pair.
    """
    return {"seconds": statistics.median(second for _, second in pairs)} | _bootstrap(pairs, _cost, resamples)


def paired_token_cost(blocks: Sequence[Blocks], resamples: int = 1000) -> dict[str, Any]:
    """Return by which share the first engine takes longer for a token than the second, with a 95 % interval.

    Steps are compared pair by pair, and tokens in all blocks together: how many drafts a step accepts varies.

    :param blocks: at least one pair.
    """

    def cost(sample: Sequence[Blocks]) -> float:
        steps = _cost([(first["seconds"], second["seconds"]) for first, second in sample])
        firsts, seconds = (sum(float(block["tokens"]) for block in each) for each in zip(*sample, strict=True))
        return (1 + steps) * seconds / firsts - 1

    return _bootstrap(blocks, cost, resamples)


def _cost(pairs: Sequence[Sequence[float]]) -> float:
    return trimmed_mean([first / second - 1 for first, second in pairs])


def _bootstrap(pairs: Sequence[T], cost: Callable[[Sequence[T]], float], resamples: int) -> dict[str, Any]:
    draw = random.Random(1)
    costs = sorted(cost(draw.choices(pairs, k=len(pairs))) for _ in range(resamples))
    interval = [costs[int(share * (resamples - 1))] for share in (0.025, 0.975)]
    return {"pairs": len(pairs), "cost": cost(pairs), "interval": interval}
