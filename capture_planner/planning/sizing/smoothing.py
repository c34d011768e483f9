"""Weights of counts: what was observed, smoothed, with a flat prior.

Raw histograms overfit: sizes that are best at one load waste up to several times the time at another. So part of the
weight goes to a kernel over half to one and a half times each count, and a tenth of that part to all counts alike.
The part falls with the number of steps, and never to nothing: loads change.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate

PRIOR_STEPS = 1000
"""Steps that weigh as much as the prior."""

LEAST_PRIOR = Fraction(1, 10)
"""The prior's part however many steps there are."""

FLAT = Fraction(1, 10)
"""Part of the prior that is flat; the rest is the kernel."""

SCALE = 1 << 30
"""The weight of a pass in every step."""


def prior_share(steps: int) -> Fraction:
    """Return the part of the weight that the prior has, with so many steps observed."""
    return max(LEAST_PRIOR, Fraction(PRIOR_STEPS, PRIOR_STEPS + steps))


def smoothed(observed: Mapping[int, int], last: int, steps: int) -> list[int]:
    """Return the weight of each count from 0 to ``last``; those of a pass that each step runs sum to about ``SCALE``.

    A ladder of which nothing was observed weighs like one step.

    :param observed: passes by count, each from 1 to ``last``.
    :param steps: steps in all, of which these passes are a part.
    """
    passes = sum(observed.values())
    total = max(steps, 1)
    if not passes:
        return [0, *([max(SCALE // (total * last), 1)] * last)]
    share = float(prior_share(passes))
    flat, kernel = share * float(FLAT), share * float(1 - FLAT)
    steps_up = [0.0] * (last + 2)
    for count, number in observed.items():
        low, high = -(-count // 2), min(count * 3 // 2, last)
        steps_up[low] += number / (high - low + 1)
        steps_up[high + 1] -= number / (high - low + 1)
    kernels = list(accumulate(steps_up))
    unit = SCALE / total
    weights = [round(unit * (flat * passes / last + kernel * max(spread, 0.0))) for spread in kernels[: last + 1]]
    for count, number in observed.items():
        weights[count] += round(unit * (1 - share) * number)
    weights[0] = 0
    return weights
