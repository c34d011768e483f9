"""An exact choice of the number of sizes in each ladder, under bounds on all of them together.

Ladders are taken one by one. Of the choices so far, one is dropped only where another costs no more and takes no more
of any bound. The last ladder takes what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import attrs

from capture_planner.planning.sizing.program import LadderProblem, LadderProgram, Value

TOLERANCE = Fraction(1, 100)
"""Where nothing bounds a ladder, it has the fewest sizes whose cost is this near to that of all sizes."""


@attrs.frozen(kw_only=True)
class SizeGroup:
    """Ladders that share one choice of sizes, and what each size takes of every bound."""

    program: LadderProgram
    takes: tuple[int, ...]
    """What a size takes of each bound."""
    pool: tuple[int, ...] | None = None
    """What the largest size takes of the last bound, by its index: memory of the pool; None: nothing."""

    @property
    def problem(self) -> LadderProblem:
        return self.program.problem

    def least(self) -> tuple[int, ...]:
        """Return what a single size takes of each bound."""
        return self.taken(1, self.problem.least_top)

    def taken(self, number: int, top: int) -> tuple[int, ...]:
        """Return what ``number`` sizes take of each bound, the largest at index ``top``."""
        taken = [each * number for each in self.takes]
        if self.pool is not None:
            taken[-1] += self.pool[top]
        return tuple(taken)


@attrs.frozen(order=True)
class _Allocation:
    """A choice for the first groups: least first."""

    value: Value
    sizes: int
    numbers: tuple[int, ...]
    tops: tuple[int | None, ...] = attrs.field(order=False)
    left: tuple[int, ...] = attrs.field(order=False)


def allocate(groups: Sequence[SizeGroup], bounds: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return the indices of each group's sizes that together cost least, or None where one size each is too many.

    Of equal costs, the fewest sizes in all, then in the first groups. A group that takes of no bound that could bind
    has the fewest sizes within ``TOLERANCE``.
    """
    if groups and any(sum(group.least()[i] for group in groups) > bound for i, bound in enumerate(bounds)):
        return None
    free = [not any(group.takes) and group.pool is None for group in groups]
    chosen: dict[int, tuple[int, ...]] = {
        index: group.program.sizes(group.program.fewest(TOLERANCE)) for index, group in enumerate(groups) if free[index]
    }
    # The group whose pool varies comes last, where only the best of its choices is needed.
    order = sorted((i for i in range(len(groups)) if not free[i]), key=lambda i: (groups[i].pool is not None, i))
    rest = [groups[index] for index in order]
    least = [group.least() for group in rest]
    states = [_Allocation(0, 0, (), (), tuple(bounds))]
    for position, group in enumerate(rest):
        needed = [sum(each[i] for each in least[position + 1 :]) for i in range(len(bounds))]
        last = position == len(rest) - 1
        found = [new for state in states for new in _choices(state, group, needed, last=last)]
        states = [min(found)] if last else _undominated(found)
    if rest:
        (best,) = states
        for index, group, number, top in zip(order, rest, best.numbers, best.tops, strict=True):
            chosen[index] = group.program.sizes(number, top)
    return [chosen[index] for index in range(len(groups))]


def _choices(state: _Allocation, group: SizeGroup, needed: Sequence[int], *, last: bool) -> Iterator[_Allocation]:
    """Yield the choice with each number of sizes of a group, what the later groups need at least being left."""
    free = [left - need for left, need in zip(state.left, needed, strict=True)]
    lowest: Value | None = None
    for number in range(1, group.program.most + 1):
        if any(each * number > left for each, left in zip(group.takes, free, strict=True)):
            return
        for top in _tops(group, free[-1] - group.takes[-1] * number if free else 0, last=last):
            value = group.program.value(number, top)
            # More sizes that cost no less are no choice, unless they leave more of the pool.
            if value is None or (lowest is not None and value >= lowest and (top is None or last)):
                continue
            lowest = value if lowest is None else min(lowest, value)
            index = group.program.sizes(number, top)[-1] if group.pool is not None else 0
            left = tuple(map(int.__sub__, state.left, group.taken(number, index)))
            yield _Allocation(
                state.value + value, state.sizes + number, (*state.numbers, number), (*state.tops, top), left
            )
        if lowest == group.problem.every_size:
            return


def _tops(group: SizeGroup, left: int, *, last: bool) -> Iterator[int | None]:
    """Yield the largest sizes to consider: any, or by what they take of the pool."""
    if group.pool is None:
        yield None
        return
    fitting = [index for index, taken in enumerate(group.pool) if taken <= left and index >= group.problem.least_top]
    yield from fitting[-1:] if last else fitting


def _undominated(states: Sequence[_Allocation]) -> list[_Allocation]:
    """Return the states that no other one makes useless, least first."""
    kept: list[_Allocation] = []
    for state in sorted(states):
        left = state.left
        if not any(all(map(int.__ge__, other.left, left)) for other in reversed(kept)):
            kept.append(state)
    return kept
