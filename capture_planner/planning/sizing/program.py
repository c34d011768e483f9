"""The sizes of one ladder that cost least, for every number of sizes: a dynamic program.

A size j serves the counts above the size i before it, each for the time of j: ``times[j] * (weights[j] - weights[i])``
with cumulative weights. As times grow with the size, each row of the program is a walk along the lower hull of lines:
a few steps for each size. All numbers are integers, so that equal costs are equal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul, sub
from typing import TypeVar

import attrs

Value = int
"""Nanoseconds of a step, times the weights' scale."""

Number = TypeVar("Number", int, float)

TAIL = 1 << 96
"""Weight of a percentile's batch, more than all others together; those decide between equal percentiles."""


@attrs.frozen(kw_only=True)
class LadderProblem:
    """The cost of each size of a ladder, for the sizes that are worth a graph.

    A size that takes no less time than a larger one serves nothing better than that. So times ascend strictly, unless
    the largest size of a ladder is to be chosen by what it takes of the memory too: then they may be equal.

    Ratios are those of times, with ``base`` added to both: of a count on the graph that serves it, or without one, to
    that on a graph of its own.
    """

    sizes: tuple[int, ...]
    """Ascending; each is needed by some count."""
    times: tuple[int, ...]
    """Nanoseconds of a batch in a graph of each size."""
    weights: tuple[int, ...]
    """Weight of all counts up to each size."""
    eager: tuple[int, ...]
    """Nanoseconds of the largest count of each size without a graph."""
    tails: tuple[Value, ...]
    """Cost of all counts above each size without graphs."""
    least_top: int
    """Index of the smallest size that may be the largest of a ladder."""
    own: tuple[int, ...]
    """Least nanoseconds of the counts above each smaller size on graphs of their own."""
    alone: tuple[Fraction, ...]
    """The largest ratio of the counts above each size, which have no graph; last, that of all counts."""
    base: int = 0
    """Nanoseconds that a step takes besides, which do not depend on the graph."""
    border: int = -1
    """Index of the largest measured size; -1: all sizes or none were measured, or a larger one takes no longer."""

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        times: Sequence[int],
        weights: Sequence[int],
        eager: Sequence[int],
        least_top: int,
        above: Sequence[Value] | None = None,
        *,
        own: Sequence[int] | None = None,
        alone: Sequence[Fraction] = (),
        base: int = 0,
        known: int | None = None,
        every_top: bool = False,
    ) -> LadderProblem:
        """Drop the sizes that are not worth a graph.

        :param weights: of the counts that each size serves and no smaller one does.
        :param least_top: the smallest size that may be the largest of a ladder; a larger one of no more time counts.
        :param above: what the counts of each size cost without a graph; None: its largest count's time for each.
        :param own: least time of the counts of each size on graphs of their own; None: that of the size.
        :param alone: the largest ratios of the counts of each size without a graph, where others run on it too.
        :param known: the largest measured size; None: all sizes were measured, or none was.
        :param every_top: whether sizes of equal times are kept.
        """
        # From the largest down, as only a larger size can make one useless.
        kept = [len(sizes) - 1]
        for index in reversed(range(len(sizes) - 1)):
            if times[index] < times[kept[-1]] + every_top:
                kept.append(index)
        kept.reverse()
        sums = [0, *accumulate(weights)]
        costs = [0, *accumulate(map(mul, weights, eager) if above is None else above)]
        firsts = [0, *(index + 1 for index in kept)]
        least = list(accumulate(reversed(times if own is None else own), min))[::-1]
        ratios = [Fraction(eager[index] + base, max(times[index] + base, 1)) for index in kept]
        if alone:
            ratios = [max(ratio, *alone[i : j + 1]) for ratio, i, j in zip(ratios, firsts, kept, strict=False)]
        worst = [*accumulate(reversed(ratios), max)][::-1]
        border = next((n for n, (i, j) in enumerate(pairwise(kept)) if sizes[i] == known and times[i] < times[j]), -1)
        return cls(
            sizes=tuple(sizes[index] for index in kept),
            times=tuple(times[index] for index in kept),
            weights=tuple(sums[index + 1] for index in kept),
            eager=tuple(eager[index] for index in kept),
            tails=tuple(costs[-1] - costs[index + 1] for index in kept),
            least_top=bisect_left([sizes[index] for index in kept], least_top),
            own=tuple(min(least[first], times[index]) for first, index in zip(firsts, kept, strict=False)),
            alone=(*worst[1:], Fraction(1), worst[0]),
            base=base,
            border=border,
        )

    def cost(self, chosen: Sequence[int]) -> Value:
        """Return the cost of a ladder, given by the ascending indices of its sizes."""
        before, total = 0, 0
        for index in chosen:
            total += self.times[index] * (self.weights[index] - before)
            before = self.weights[index]
        return total + self.tails[chosen[-1]]

    @cached_property
    def with_each_top(self) -> tuple[Value, ...]:
        """The least cost that any number of sizes has, by the index of the largest."""
        own = accumulate(map(mul, self.times, map(sub, self.weights, (0, *self.weights))))
        return tuple(map(sum, zip(own, self.tails, strict=True)))

    @cached_property
    def every_size(self) -> Value:
        """The least cost that any number of sizes has."""
        return min(self.with_each_top[self.least_top :])

    def first_served(self, index: int, ratio: Fraction) -> int:
        """Return the index of the smallest size whose counts a larger one may serve within ``ratio``.

        :param index: of the larger size; what is returned is above it where it may not even serve its own counts.
        """
        least = -(-(self.times[index] + self.base) * ratio.denominator // ratio.numerator) - self.base
        return bisect_left(self.own, least)

    def least_top_within(self, ratio: Fraction) -> int:
        """Return the index of the smallest size above which no count exceeds ``ratio`` without a graph."""
        falling = range(self.least_top, len(self.sizes) - 1)
        return self.least_top + bisect_left(falling, True, key=lambda index: self.alone[index] <= ratio)

    def within(self, ratio: Fraction | None, *, measured: bool = False) -> tuple[int, ...]:
        """Return the fewest sizes with which no count takes more than ``ratio`` times its own size; then the smallest.

        Counts above the largest size take their eager time. Empty: no sizes are so near. ``measured``: as in a program.
        """
        # Each next smaller size is the largest whose counts the one above may not serve.
        chosen = [self.least_top if ratio is None else self.least_top_within(ratio)]
        while True:
            first = 0 if ratio is None else self.first_served(chosen[-1], ratio)
            if measured and chosen[-1] > self.border:
                first = max(first, self.border + 1)
            if first > chosen[-1]:
                return ()
            if first == 0:
                return tuple(reversed(chosen))
            chosen.append(first - 1)

    def worst(self, chosen: Sequence[int]) -> Fraction:
        """Return the largest ratio of a count's time to the time of its own size."""
        worst, first = Fraction(1), 0
        for index in chosen:
            worst = max(worst, Fraction(self.times[index] + self.base, max(self.own[first] + self.base, 1)))
            first = index + 1
        return max(worst, self.alone[chosen[-1]])


@attrs.define
class LadderProgram:
    """The least cost of a ladder for each number of sizes, row by row."""

    problem: LadderProblem
    limit: Fraction | None = None
    """The largest ratio that a count may have; None: any."""
    measured: bool = False
    """Whether sizes above the border need it too, so that counts up to it run on measured sizes."""
    _values: list[list[Value | None]] = attrs.field(factory=list, init=False)
    _before: list[list[int]] = attrs.field(factory=list, init=False)
    _tops: list[tuple[list[int], list[Value]]] = attrs.field(factory=list, init=False)
    _lows: list[int] | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        ratio, border = self.limit, self.problem.border if self.measured else -1
        if ratio is not None or border >= 0:
            # Before size j comes one that is no smaller than the one at lows[j], if any.
            lows = [-1 if ratio is None else self.problem.first_served(j, ratio) - 1 for j in range(self.most)]
            self._lows = [max(low, border) if j > border else low for j, low in enumerate(lows)]

    @property
    def most(self) -> int:
        """The most sizes that it may have."""
        return len(self.problem.sizes)

    @cached_property
    def least(self) -> tuple[int, ...]:
        """The fewest sizes that it may have, and the smallest of those; empty: no sizes are within the limit."""
        return self.problem.within(self.limit, measured=self.measured)

    @cached_property
    def every_size(self) -> Value:
        """The least cost that any number of sizes has; some must be within the limit."""
        if self.limit is None or self._lows is None:
            return self.problem.every_size
        useless = next((j for j, low in enumerate(self._lows) if low >= j), self.most)
        return min(self.problem.with_each_top[self.problem.least_top_within(self.limit) : useless])

    def value(self, number: int, highest: int | None = None) -> Value | None:
        """Return the least cost of ``number`` sizes, the largest at most at ``highest``; None: that many do not fit."""
        tops, values = self._row(number)
        index = len(tops) if highest is None else bisect_right(tops, highest)
        return values[index - 1] if index else None

    def sizes(self, number: int, highest: int | None = None) -> tuple[int, ...]:
        """Return the indices of the sizes that cost least; of equal ones the smallest, the largest size first."""
        tops, _ = self._row(number)
        index = tops[(len(tops) if highest is None else bisect_right(tops, highest)) - 1]
        chosen = []
        for row in reversed(range(number)):
            chosen.append(index)
            index = self._before[row][index]
        return tuple(reversed(chosen))

    def fewest(self, tolerance: Fraction) -> int:
        """Return the fewest sizes whose cost is within ``tolerance`` of the least that any number has.

        Of a percentile, its own cost is the least, and the mean is within ``tolerance``.
        """
        least_tail, least = divmod(self.every_size, TAIL)
        for number in range(len(self.least), self.most + 1):
            value = self.value(number)
            if value is not None:
                # The remainder is the mean's part: ``TAIL`` weighs more than all other batches together.
                tail, mean = divmod(value, TAIL)
                if tail == least_tail and mean * tolerance.denominator <= least * (tolerance + 1).numerator:
                    return number
        return self.most

    def penalised(self, each: int, by_top: Sequence[int] | None = None) -> tuple[Value, int, int]:
        """Return the least cost with a price on sizes, how many have it, and the index of the largest.

        Some sizes must be within the limit.

        :param each: what each size costs more.
        :param by_top: what the largest size costs more, by its index; None: nothing.
        """
        problem, lows = self.problem, self._lows
        times, weights = problem.times, problem.weights
        values: list[Value | None] = []
        numbers: list[int] = []
        for j, found in enumerate(_before(times, weights, values, lows)):
            own = times[j] * weights[j]
            # Alone, a size serves all counts below it too: only where that is within the limit.
            best, number = (own, 0) if lows is None or lows[j] < 0 else (None, 0)
            if found is not None and (best is None or found[0] + own < best):
                best, number = found[0] + own, numbers[found[1]]
            values.append(None if best is None else best + each)
            numbers.append(number + 1)
        ends = (
            (value + problem.tails[top] + (by_top[top] if by_top else 0), numbers[top], top)
            for top, value in enumerate(values)
            if value is not None and top >= self.least[-1]
        )
        return min(ends)

    def _row(self, number: int) -> tuple[list[int], list[Value]]:
        """Return the tops at which a ladder of that many sizes gets better, with its cost there."""
        while len(self._tops) < number:
            self._add_row()
        return self._tops[number - 1]

    def _add_row(self) -> None:
        times, weights, lows = self.problem.times, self.problem.weights, self._lows
        count = len(times)
        if self._values:
            values, before = _next_row(times, weights, self._values[-1], lows)
        else:
            values = [time * weight for time, weight in zip(times, weights, strict=True)]
            before = [-1] * count
            if lows is not None:
                values = [value if low < 0 else None for value, low in zip(values, lows, strict=True)]
        self._values.append(values)
        self._before.append(before)
        tops: list[int] = []
        best: list[Value] = []
        problem = self.problem
        for index in range(problem.least_top if self.limit is None else problem.least_top_within(self.limit), count):
            value = values[index]
            # Only tops that improve on all smaller ones are kept, so that a bound on the top is a bisection.
            if value is not None and (not best or value + problem.tails[index] < best[-1]):
                tops.append(index)
                best.append(value + problem.tails[index])
        self._tops.append((tops, best))


def _next_row(
    times: Sequence[int], weights: Sequence[int], previous: Sequence[Value | None], lows: Sequence[int] | None
) -> tuple[list[Value | None], list[int]]:
    """Return ``min over lows[j] <= i < j of previous[i] + times[j] * (weights[j] - weights[i])``, and the first i."""
    found = list(_before(times, weights, previous, lows))
    values = [None if each is None else each[0] + times[j] * weights[j] for j, each in enumerate(found)]
    return values, [-1 if each is None else each[1] for each in found]


def _before(
    times: Sequence[int], weights: Sequence[int], heights: Sequence[Value | None], lows: Sequence[int] | None
) -> Iterator[tuple[Value, int] | None]:
    """Yield ``min over lows[j] <= i < j of heights[i] - times[j] * weights[i]`` and the first such i, for each j.

    A height is read when the first j after it asks, so the caller may fill ``heights`` as it goes.
    """
    count, start = len(times), 0
    while start < count:
        # Without a limit no line leaves, and all j are one block.
        end = count if lows is None else max(bisect_right(lows, start, start), start + 1)
        far = [None] * (end - start) if lows is None else _ahead(times, weights, heights, lows, start, end)
        inside = hull_walk(times[start:end], weights[start:end], heights, range(end - start), first=start)
        for late, early in zip(inside, far, strict=True):
            yield late if early is None or (late is not None and late[0] < early[0]) else early
        start = end


def _ahead(
    times: Sequence[int],
    weights: Sequence[int],
    previous: Sequence[Value | None],
    lows: Sequence[int],
    start: int,
    end: int,
) -> list[tuple[Value, int] | None]:
    """Return the best line of those before ``start`` for each j of a block from there to ``end``, and its index.

    Lines that leave at the front do not fit a walk along a hull. So j are taken in blocks: all lines from the block's
    first one on may be those of each j of it, which is one walk; those before it leave one by one, which is a walk from
    the last j to the first, with lines that come.
    """
    left = min(max(lows[start], 0), start)
    turned = hull_walk(
        [-time for time in reversed(times[start:end])],
        [-weight for weight in reversed(weights[left:start])],
        list(reversed(previous[left:start])),
        [max(start - max(low, 0), 0) for low in reversed(lows[start:end])],
        last=True,
    )
    found = [None if each is None else (each[0], start - 1 - each[1]) for each in turned]
    return found[::-1]


def hull_walk(
    times: Sequence[Number],
    slopes: Sequence[Number],
    heights: Sequence[Number | None],
    behind: Sequence[int],
    *,
    first: int = 0,
    last: bool = False,
) -> Iterator[tuple[Number, int] | None]:
    """Yield ``min of heights[i] - slopes[i] * times[j] over i < behind[j]`` and the i, for each j; None: no such i.

    Slopes, times and ``behind`` ascend, so that the best line only moves on. Where lines are equal at a time, the first
    stays, or with ``last`` the last is taken. A height is read when the first j asks for it. Exact for integers.

    :param first: index of the first line in ``heights``, and in what is returned.
    """
    hull: list[int] = []
    levels: list[Number] = []
    falls: list[Number] = []
    front = added = 0
    for time, reach in zip(times, behind, strict=True):
        for index in range(added, reach):
            height, slope = heights[index + first], slopes[index]
            if height is None:
                continue
            if hull and falls[-1] == slope:
                if height > levels[-1] or (height == levels[-1] and not last):
                    continue
                hull.pop(), levels.pop(), falls.pop()
            # The last line is never alone below when the new one takes over from the one before it no later.
            while len(hull) - front >= 2 and (height - levels[-1]) * (falls[-1] - falls[-2]) < (
                levels[-1] - levels[-2]
            ) * (slope - falls[-1]):
                hull.pop(), levels.pop(), falls.pop()
            hull.append(index + first)
            levels.append(height)
            falls.append(slope)
        added = reach
        end = len(hull) - 1
        if end < 0:
            yield None
            continue
        front = min(front, end)
        best = levels[front] - falls[front] * time
        while front < end and (
            (next_best := levels[front + 1] - falls[front + 1] * time) < best or (last and next_best == best)
        ):
            front += 1
            best = next_best
        yield best, hull[front]
