"""The ladder whose worst padding is least.

Padding is judged as padded/real, where real is first rounded up to the step that sizes must be
multiples of: padding that alignment forces does not count. For a bound on that ratio one greedy walk
gives the fewest sizes; bisection gives the least bound for a number of sizes. Two ratios of counts up
to n differ by at least 1/n^2, so a grid that fine makes the bisection exact, without floats.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction

from capture_planner.records.batch_space import Domain

_ROUNDS = 4
"""Times that the rest of a ladder is recomputed; it hardly changes after the second."""


def fewest(
    domain: Domain, ratio: Fraction, *, candidates: Sequence[int] | None = None, anchors: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the shortest ladder that covers ``domain`` with no count padded beyond ``ratio``.

    :param candidates: the sizes to choose from, ascending; None: all. Where the next one is further
        away than ``ratio``, it is used all the same.
    :param anchors: sizes that the ladder must have, ascending.
    """
    sizes: list[int] = []
    count = domain.after(0)
    while count is not None:
        base = domain.round_up(count)
        limit = base * ratio.numerator // ratio.denominator
        if candidates is None:
            size = max(base, domain.tight(limit) or base)
        else:
            nearest = bisect_left(candidates, base)
            # No candidate is large enough for the rest of the domain.
            if nearest == len(candidates):
                break
            size = candidates[max(nearest, bisect_right(candidates, limit) - 1)]
        anchor = bisect_left(anchors, base)
        if anchor < len(anchors):
            size = min(size, anchors[anchor])
        sizes.append(size)
        count = domain.after(size)
    return tuple(sizes)


def worst_ratio(domain: Domain, sizes: Sequence[int]) -> Fraction:
    """Return the largest padded/real ratio over the counts that ``sizes`` (ascending) cover."""
    worst, real = 1, 1
    for size, least in domain.served(sizes):
        if size * real > worst * domain.round_up(least):
            worst, real = size, domain.round_up(least)
    return Fraction(worst, real)


def minimax(domain: Domain, graphs: int, anchors: Sequence[int] = ()) -> tuple[int, ...]:
    """Return a ladder of at most ``graphs`` sizes whose worst padded/real ratio is least.

    Above the count where that ratio is reached, the remaining sizes form the best ladder again, so that
    none is wasted. The ladder covers the whole domain, its ceiling included; where ``anchors`` need more
    sizes than ``graphs``, it has more.
    """
    chosen: list[int] = []
    rest, rounds = domain, _ROUNDS
    while rest:
        rounds -= 1
        sizes = _least(rest, max(graphs - len(chosen), 1), anchors)
        worst = worst_ratio(rest, sizes)
        last = sizes[-1]
        # At a ratio of 1 nothing is padded; after the last round the ladder is taken as it is.
        if worst > 1 and rounds:
            # The first size that pads its least count by the worst ratio.
            ratios = ((size, Fraction(size, rest.round_up(least))) for size, least in rest.served(sizes))
            last = next(size for size, ratio in ratios if ratio == worst)
        chosen += [size for size in sizes if size <= last]
        rest = rest.above(last)
    return tuple(chosen)


def _least(domain: Domain, graphs: int, anchors: Sequence[int]) -> tuple[int, ...]:
    """Return the shortest ladder of the least worst ratio that ``graphs`` sizes can have."""
    grid = domain.ceiling**2

    def ladder(bound: int) -> tuple[int, ...]:
        return fewest(domain, Fraction(bound, grid), anchors=anchors)

    bounds = range(grid, grid * domain.ceiling)
    return ladder(grid + bisect_left(bounds, True, key=lambda bound: len(ladder(bound)) <= graphs))
