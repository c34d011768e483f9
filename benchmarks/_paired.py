"""Small differences on a noisy host: many neighbouring pairs, their trimmed mean, and its bootstrap interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

TRIM = 0.2
"""Share of the pairs that is left out at each end: bursts of other work on the host."""


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
