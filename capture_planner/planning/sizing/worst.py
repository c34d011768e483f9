"""The objective ``regret``: the least worst ratio of a batch's time to the time of its own size, over all ladders."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from capture_planner.planning.sizing.allocation import SizeGroup

FREE_RATIO = Fraction(9, 8)
"""The worst ratio of a ladder that nothing bounds; the default policy has the same for padding."""


def least_worst(groups: Sequence[SizeGroup], bounds: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return the indices of each group's sizes with the least worst ratio within the bounds, or None where none fits.

    Of equal ratios, the fewest sizes, then the smallest. Exact: the ratios of two times below n differ by 1/n^2.
    """
    bound_groups = [group for group in groups if any(group.takes) or group.pool is not None]

    def chosen(ratio: Fraction) -> list[tuple[int, ...]]:
        return [group.problem.within(ratio) for group in bound_groups]

    def fits(found: Sequence[tuple[int, ...]]) -> bool:
        taken = [group.taken(len(each), each[-1]) for group, each in zip(bound_groups, found, strict=True)]
        return all(sum(each[i] for each in taken) <= bound for i, bound in enumerate(bounds))

    def worst(found: Sequence[tuple[int, ...]]) -> Fraction:
        return max([Fraction(1), *(g.problem.worst(each) for g, each in zip(bound_groups, found, strict=True))])

    longest = max((time for group in bound_groups for time in (*group.problem.times, *group.problem.eager)), default=1)
    fewest = chosen(Fraction(longest + 1))
    if groups and not fits(fewest):
        return None
    low, high, grain = Fraction(1), worst(fewest), Fraction(1, longest**2 + 1)
    if fits(chosen(low)):
        high = low
    while high - low >= grain:
        middle = (low + high) / 2
        found = chosen(middle)
        if fits(found):
            high = worst(found)
        else:
            low = middle
    ready = iter(chosen(high))
    return [
        next(ready) if any(group.takes) or group.pool is not None else group.problem.within(FREE_RATIO)
        for group in groups
    ]
