"""An exact choice of the sizes of all ladders under bounds on all of them together: of least cost, or of least ratio.

Ladders are taken one by one. Of the choices so far, one is dropped only where another costs no more and takes no more
of any bound, or where it cannot be completed at the cost of a table that is known. The last ladder takes what is left.

What completing a choice costs at least is known by prices on the bounds: with a price on what sizes take, each ladder
has its least cost by itself (Lagrange).

The objective ``regret`` asks for the least worst ratio of a batch's time to the time of its own size instead: a
bisection over ratios.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from heapq import heappop, heappush, nsmallest
from itertools import combinations
from math import prod
from operator import mul

import attrs

from capture_planner.planning.sizing.program import LadderProblem, LadderProgram, Value

Subset = frozenset[int]

TOLERANCE = Fraction(1, 100)
"""Where nothing bounds a ladder, it has the fewest sizes whose cost is this near to that of all sizes."""

FREE_RATIO = Fraction(9, 8)
"""The worst ratio of a ladder that nothing bounds; the default policy has the same for padding."""


@attrs.frozen(kw_only=True)
class SizeGroup:
    """Ladders that share one choice of sizes, and what each size takes of every bound."""

    program: LadderProgram
    takes: tuple[int, ...]
    """Amount of each bound that a size takes."""
    pool: tuple[int, ...] | None = None
    """Bytes of the pool, of the last bound, by the index of the largest size: ascending; None: nothing."""

    @property
    def problem(self) -> LadderProblem:
        return self.program.problem

    @property
    def is_bound(self) -> bool:
        """True if its sizes take of any bound."""
        return any(self.takes) or self.pool is not None

    def least(self) -> tuple[int, ...]:
        """Return what the fewest sizes take of each bound; there must be some."""
        return self.taken(len(self.program.least), self.program.least[-1])

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
    """Return the indices of each group's sizes that together cost least, or None where the fewest are too many.

    Of equal costs, the fewest sizes in all, then in the first groups. A group that takes of no bound that could bind
    has the fewest sizes within ``TOLERANCE``.
    """
    if not all(group.program.least for group in groups):
        return None
    if groups and any(sum(group.least()[i] for group in groups) > bound for i, bound in enumerate(bounds)):
        return None
    chosen: dict[int, tuple[int, ...]] = {
        index: group.program.sizes(group.program.fewest(TOLERANCE))
        for index, group in enumerate(groups)
        if not group.is_bound
    }
    # The group whose pool varies comes last, where only the best of its choices is needed.
    order = sorted(
        (i for i, group in enumerate(groups) if group.is_bound), key=lambda i: (groups[i].pool is not None, i)
    )
    rest = [groups[index] for index in order]
    if rest:
        # Prices take a while to find, and few choices are followed faster without.
        if _choices_of(rest[:-1], bounds) > FEW:
            prices = _prices(rest, bounds)
            known = _walk(rest, bounds, prices, most=None, width=_WIDTH)
            best = _walk(rest, bounds, prices, most=known.value)
        else:
            best = _walk(rest, bounds, _Prices((0,) * len(bounds), (0,) * len(rest)))
        for index, group, number, top in zip(order, rest, best.numbers, best.tops, strict=True):
            chosen[index] = group.program.sizes(number, top)
    return [chosen[index] for index in range(len(groups))]


def _walk(
    groups: Sequence[SizeGroup],
    bounds: Sequence[int],
    prices: _Prices,
    *,
    most: Value | None = None,
    width: int | None = None,
) -> _Allocation:
    """Return the best choice for all groups; there must be one.

    :param most: what a known choice costs; None: none is known.
    :param width: how many choices of the first groups are followed, those that may cost least; None: all.
    """
    least = [group.least() for group in groups]
    states = [_Allocation(0, 0, (), (), tuple(bounds))]
    for position, group in enumerate(groups):
        # What the later groups need at least is not for this one to spend.
        needed = [sum(each[i] for each in least[position + 1 :]) for i in range(len(bounds))]
        last = position == len(groups) - 1
        at_least = partial(prices.completed, position + 1)
        found = (new for state in states for new in _choices(state, group, needed, last=last))
        if most is not None:
            found = (new for new in found if at_least(new) <= most)
        if last:
            # No later group needs what is left, so only the least counts.
            return min(found)
        states = _undominated(found if width is None else nsmallest(width, found, key=at_least))
    raise AssertionError("the last group returns")


FEW = 1000
"""Choices for all groups but the last that are followed without prices on the bounds."""


def _choices_of(groups: Sequence[SizeGroup], bounds: Sequence[int]) -> int:
    """Return about how many choices groups have, apart from which size is their largest."""
    return prod(
        min([group.program.most, *(bound // each for bound, each in zip(bounds, group.takes, strict=True) if each)])
        for group in groups
    )


_WIDTH = 32
"""Choices that are followed to know what some table costs."""


@attrs.frozen
class _Prices:
    """A price for each bound, and what groups cost at least with these prices."""

    each: tuple[Value, ...]
    least: tuple[Value, ...]

    def completed(self, number: int, state: _Allocation) -> Value:
        """Return what a choice for the first groups, of that number, costs at least when it is completed."""
        spent: Value = sum(map(mul, self.each, state.left))
        return state.value + sum(self.least[number:]) - spent


_ROUNDS = 2
"""Times that the price of each bound is adjusted to those of the others."""

_HALVINGS = 12
"""Halvings of the range of a price."""


def _prices(groups: Sequence[SizeGroup], bounds: Sequence[int]) -> _Prices:
    """Return prices with which groups, each by itself, take hardly more than the bounds: any are right, these tight."""
    each = [0] * len(bounds)
    dearest = sum(group.problem.cost(group.program.least) for group in groups)

    def taken() -> tuple[list[int], tuple[Value, ...]]:
        found = [_priced(group, each) for group in groups]
        return [sum(taken[i] for _, taken in found) for i in range(len(bounds))], tuple(least for least, _ in found)

    for _ in range(_ROUNDS):
        for index, bound in enumerate(bounds):
            own, each[index] = each[index], 0
            total, _ = taken()
            if total[index] <= bound:
                continue
            low, high = 0, max(own, dearest // (64 * max(bound, 1)), 1)
            # The least price at which what is taken is within the bound lies between the last two powers.
            while True:
                each[index] = high
                # Above the cost of the fewest sizes a higher price changes no choice.
                if taken()[0][index] <= bound or high > dearest:
                    break
                low, high = high, 4 * high
            for _ in range(_HALVINGS):
                each[index] = (low + high) // 2
                low, high = (low, each[index]) if taken()[0][index] <= bound else (each[index], high)
            each[index] = high
    return _Prices(tuple(each), taken()[1])


def _priced(group: SizeGroup, prices: Sequence[Value]) -> tuple[Value, tuple[int, ...]]:
    """Return the least cost of a group with prices, and what its sizes then take of each bound."""
    by_top = None if group.pool is None else [prices[-1] * taken for taken in group.pool]
    value, number, top = group.program.penalised(sum(map(mul, prices, group.takes)), by_top)
    return value, group.taken(number, top)


def _choices(state: _Allocation, group: SizeGroup, needed: Sequence[int], *, last: bool) -> Iterator[_Allocation]:
    """Yield the choice with each number of sizes of a group, what the later groups need at least being left."""
    free = [left - need for left, need in zip(state.left, needed, strict=True)]
    lowest: Value | None = None
    for number in range(len(group.program.least), group.program.most + 1):
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
        # No number of sizes costs less than the best of all.
        if lowest == group.program.every_size:
            return


def _tops(group: SizeGroup, left: int, *, last: bool) -> Iterator[int | None]:
    """Yield the largest sizes to consider: any, or by what they take of the pool."""
    if group.pool is None:
        yield None
        return
    first, end = group.program.least[-1], bisect_right(group.pool, left)
    # After the last group nothing needs the pool, so only the largest size that fits is tried.
    yield from range(max(end - 1, first) if last else first, end)


def _undominated(states: Iterable[_Allocation]) -> list[_Allocation]:
    """Return the states that no other one makes useless, least first."""
    kept: list[_Allocation] = []
    # Least first: what makes a state useless costs no more, and so was met before.
    for state in sorted(states):
        left = state.left
        if not any(all(map(int.__ge__, other.left, left)) for other in reversed(kept)):
            kept.append(state)
    return kept


def least_worst(groups: Sequence[SizeGroup], bounds: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return the indices of each group's sizes with the least worst ratio within the bounds, or None where none fits.

    Of equal ratios, the fewest sizes, then the smallest. Exact: the ratios of two times below n differ by 1/n^2.
    """
    bound_groups = [group for group in groups if group.is_bound]

    def chosen(ratio: Fraction) -> list[tuple[int, ...]]:
        return [group.problem.within(ratio) for group in bound_groups]

    def fits(found: Sequence[tuple[int, ...]]) -> bool:
        if not all(found):
            return False
        taken = [group.taken(len(each), each[-1]) for group, each in zip(bound_groups, found, strict=True)]
        return all(sum(each[i] for each in taken) <= bound for i, bound in enumerate(bounds))

    def worst(found: Sequence[tuple[int, ...]]) -> Fraction:
        return max([Fraction(1), *(g.problem.worst(each) for g, each in zip(bound_groups, found, strict=True))])

    longest = max(
        (time + group.problem.base for group in bound_groups for time in (*group.problem.times, *group.problem.eager)),
        default=1,
    )
    fewest = chosen(max([Fraction(longest), *(each for group in bound_groups for each in group.problem.alone)]))
    if groups and not fits(fewest):
        return None
    low, high, grain = Fraction(1), worst(fewest), Fraction(1, longest**2 + 1)
    if fits(chosen(low)):
        high = low
    # What is found at a ratio may be better than it, so the bisection goes on from there.
    while high - low >= grain:
        middle = (low + high) / 2
        found = chosen(middle)
        if fits(found):
            high = worst(found)
        else:
            low = middle
    ready = iter(chosen(high))
    # The fewest sizes within ``FREE_RATIO``, or within the least ratio that there is.
    free = (group.problem for group in groups if not group.is_bound)
    others = iter([each.within(max(FREE_RATIO, each.worst(range(len(each.sizes))))) for each in free])
    return [next(ready if group.is_bound else others) for group in groups]


def by_sum(costs: Mapping[int, int]) -> Iterator[tuple[int, Subset]]:
    """Yield each set of keys with the sum of its costs, ascending; costs may be negative.

    The first set has the negative costs. Each other one differs from it by some keys, in the order of how little they
    change the sum: the next one by the key after its last one too, or instead of it.
    """
    order = sorted(costs, key=lambda key: (abs(costs[key]), key))
    steps = [abs(costs[key]) for key in order]
    first = frozenset(key for key in costs if costs[key] < 0)
    # There may be too many sets to list, so they are made one by one.
    heap: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []

    def push(total: int, changed: tuple[int, ...]) -> None:
        members = tuple(sorted(first.symmetric_difference(order[place] for place in changed)))
        heappush(heap, (total, len(members), members, changed))

    push(sum(costs[key] for key in first), ())
    while heap:
        total, _, members, changed = heappop(heap)
        yield total, frozenset(members)
        last = changed[-1] if changed else -1
        if last + 1 < len(order):
            push(total + steps[last + 1], (*changed, last + 1))
            if changed:
                push(total - steps[last] + steps[last + 1], (*changed[:-1], last + 1))


def by_largest(ratios: Mapping[int, Fraction]) -> Iterator[tuple[Fraction, Subset]]:
    """Yield each set of keys with its largest ratio, ascending; of the empty set that is one."""
    yield Fraction(1), frozenset()
    order = sorted(ratios, key=lambda key: (ratios[key], key))
    for place, key in enumerate(order):
        for number in range(place + 1):
            for others in combinations(order[:place], number):
                yield max(ratios[key], Fraction(1)), frozenset((key, *others))
