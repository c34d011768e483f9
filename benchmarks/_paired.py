"""Small differences on a noisy host: many neighbouring pairs, their trimmed mean, and its bootstrap interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

BLOCK = 8
"""Steps that an engine runs before the other has its turn."""
TRIM = 0.2
"""Share of the pairs that is left out at each end: bursts of other work on the host."""


class Stepper(Protocol):
    """An engine of benchmarks/_vllm_worker.py."""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""


def paired_steps(one: Stepper, other: Stepper, load: Mapping[str, Any], runs: int) -> list[tuple[float, float]]:
    """Return the seconds of neighbouring blocks of decode steps of two engines that serve the same load at once.

    They take turns to be first, and only one works at a time. Steps with prompts, and with fewer requests than the
    load has, are left out.
    """
    pairs: list[tuple[float, float]] = []
    for _ in range(runs):
        for engine in (one, other):
            engine.answer({**load, "begin": True})
        ended = False
        while not ended:
            order = (one, other) if len(pairs) % 2 else (other, one)
            blocks = {id(engine): engine.answer({"steps": BLOCK}) for engine in order}
            ended = any(block["ended"] for block in blocks.values())
            if not ended:
                pairs.append((blocks[id(one)]["seconds"], blocks[id(other)]["seconds"]))
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
    ratios = [first / second - 1 for first, second in pairs]
    draw = random.Random(1)
    means = sorted(trimmed_mean(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return {
        "pairs": len(ratios),
        "cost": trimmed_mean(ratios),
        "interval": [means[int(share * (resamples - 1))] for share in (0.025, 0.975)],
        "seconds": statistics.median(second for _, second in pairs),
    }
