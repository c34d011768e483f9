"""The ladder whose worst padding is least.

Padding is judged as padded/real, where real is first rounded up to the step that sizes must be
multiples of: what alignment forces is nobody's choice. For a bound on that ratio the fewest sizes
come from one greedy walk, and the least bound for a number of sizes from bisection. Two ratios of
counts up to n differ by at least 1/n^2, so a grid that fine makes the bisection exact; no floats
decide anything.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction

from capture_planner.admissible import Domain


def fewest(
    domain: Domain,
    ratio: Fraction,
    *,
    candidates: Sequence[int] | None = None,
    anchors: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the shortest ladder that covers ``domain`` with no count padded beyond ``ratio``.

    ``candidates`` (ascending) are the sizes to choose from, by default all; where the next one is
    further than ``ratio`` away it is taken all the same. ``anchors`` (ascending) are sizes that must
    be in it.
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
    previous = 0
    for size in sizes:
        count = domain.after(previous)
        if count is not None and count <= size and size * real > worst * domain.round_up(count):
            worst, real = size, domain.round_up(count)
        previous = size
    return Fraction(worst, real)


def minimax(domain: Domain, graphs: int, anchors: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the ladder of at most ``graphs`` sizes whose worst padded/real ratio is least.

    Of those it is the one with the fewest sizes. It covers the whole domain, its ceiling included;
    where ``anchors`` need more sizes than ``graphs``, it is those.
    """
    if not domain:
        return ()
    grid = domain.ceiling**2
    low, high = grid, grid * domain.ceiling
    while low < high:
        middle = (low + high) // 2
        if len(fewest(domain, Fraction(middle, grid), anchors=anchors)) <= graphs:
            high = middle
        else:
            low = middle + 1
    return fewest(domain, Fraction(high, grid), anchors=anchors)
