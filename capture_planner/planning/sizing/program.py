"""The sizes of one ladder that cost least, for every number of sizes: a dynamic program.

A size j serves the counts above the size i before it, each for the time of j: ``times[j] * (weights[j] - weights[i])``
with cumulative weights. As times grow with the size, each row of the program is a walk along the lower hull of lines:
a few steps for each size. All numbers are integers, so that equal costs are equal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from operator import mul

import attrs

Value = int
"""Nanoseconds of a step, times the weights' scale."""

TAIL = 1 << 96
"""What the batch of a percentile weighs more than all others together, which decide between equal percentiles."""


@attrs.frozen(kw_only=True)
class LadderProblem:
    """What each size of a ladder would cost, for the sizes that are worth a graph.

    A size that takes no less time than a larger one never is: the larger one serves more. So times ascend strictly.
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

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        times: Sequence[int],
        weights: Sequence[int],
        eager: Sequence[int],
        least_top: int,
        above: Sequence[Value] | None = None,
    ) -> LadderProblem:
        """Drop the sizes that are not worth a graph.

        :param weights: of the counts that each size serves and no smaller one does.
        :param least_top: the smallest size that may be the largest of a ladder; a larger one of no more time counts.
        :param above: what the counts of each size cost without a graph; None: its largest count's time for each.
        """
        kept = [len(sizes) - 1]
        for index in reversed(range(len(sizes) - 1)):
            if times[index] < times[kept[-1]]:
                kept.append(index)
        kept.reverse()
        sums = [0, *accumulate(weights)]
        costs = [0, *accumulate(map(mul, weights, eager) if above is None else above)]
        return cls(
            sizes=tuple(sizes[index] for index in kept),
            times=tuple(times[index] for index in kept),
            weights=tuple(sums[index + 1] for index in kept),
            eager=tuple(eager[index] for index in kept),
            tails=tuple(costs[-1] - costs[index + 1] for index in kept),
            least_top=bisect_left([sizes[index] for index in kept], least_top),
        )

    def cost(self, chosen: Sequence[int]) -> Value:
        """Return the cost of a ladder, given by the ascending indices of its sizes."""
        before, total = 0, 0
        for index in chosen:
            total += self.times[index] * (self.weights[index] - before)
            before = self.weights[index]
        return total + self.tails[chosen[-1]]

    @cached_property
    def every_size(self) -> Value:
        """The least cost that any number of sizes has."""
        own = accumulate(
            time * (weight - before)
            for time, weight, before in zip(self.times, self.weights, (0, *self.weights), strict=False)
        )
        return min(list(map(sum, zip(own, self.tails, strict=True)))[self.least_top :])

    @property
    def eager_ratio(self) -> Fraction:
        """The largest ratio of a count's time to that of its own size, where no count has a graph."""
        pairs = zip(self.eager, self.times, strict=True)
        return max(Fraction(eager, max(time, 1)) for eager, time in pairs)

    def within(self, ratio: Fraction) -> tuple[int, ...]:
        """Return the fewest sizes with which no count takes more than ``ratio`` times its own size; then the smallest.

        Counts above the largest size take their eager time.
        """
        up, down, times = ratio.numerator, ratio.denominator, self.times
        top = len(times) - 1
        while top > self.least_top and self.eager[top] * down <= times[top] * up:
            top -= 1
        chosen = [top]
        while True:
            # The first size whose own time is near enough: what is below it needs a smaller size.
            first = bisect_left(times, -(-times[chosen[-1]] * down // up))
            if first == 0:
                return tuple(reversed(chosen))
            chosen.append(first - 1)

    def worst(self, chosen: Sequence[int]) -> Fraction:
        """Return the largest ratio of a count's time to the time of its own size."""
        worst, first = Fraction(1), 0
        for index in chosen:
            worst = max(worst, Fraction(self.times[index], max(self.times[first], 1)))
            first = index + 1
        above = zip(self.eager[first:], self.times[first:], strict=True)
        return max([worst, *(Fraction(eager, max(time, 1)) for eager, time in above)])


@attrs.define
class LadderProgram:
    """The least cost of a ladder for each number of sizes, row by row."""

    problem: LadderProblem
    _values: list[list[Value | None]] = attrs.field(factory=list, init=False)
    _before: list[list[int]] = attrs.field(factory=list, init=False)
    _tops: list[tuple[list[int], list[Value]]] = attrs.field(factory=list, init=False)

    @property
    def most(self) -> int:
        """The most sizes that it may have."""
        return len(self.problem.sizes)

    def value(self, number: int, highest: int | None = None) -> Value | None:
        """Return the least cost of ``number`` sizes, or None where that many do not fit.

        :param highest: index of the largest size allowed; None: any.
        """
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

        Of a percentile, both its own cost and the mean are.
        """
        least = divmod(self.problem.every_size, TAIL)
        for number in range(1, self.most + 1):
            value = self.value(number)
            if value is not None and all(
                part * tolerance.denominator <= best * (tolerance + 1).numerator
                for part, best in zip(divmod(value, TAIL), least, strict=True)
            ):
                return number
        return self.most

    def _row(self, number: int) -> tuple[list[int], list[Value]]:
        """Return the tops at which a ladder of that many sizes gets better, with its cost there."""
        while len(self._tops) < number:
            self._add_row()
        return self._tops[number - 1]

    def _add_row(self) -> None:
        times, weights = self.problem.times, self.problem.weights
        count = len(times)
        if not self._values:
            values: list[Value | None] = [time * weight for time, weight in zip(times, weights, strict=True)]
            before = [-1] * count
        else:
            values, before = _hull_walk(times, weights, self._values[-1])
        self._values.append(values)
        self._before.append(before)
        tops: list[int] = []
        best: list[Value] = []
        for index in range(self.problem.least_top, count):
            value = values[index]
            if value is not None and (not best or value + self.problem.tails[index] < best[-1]):
                tops.append(index)
                best.append(value + self.problem.tails[index])
        self._tops.append((tops, best))


def _hull_walk(
    times: Sequence[int], weights: Sequence[int], previous: Sequence[Value | None]
) -> tuple[list[Value | None], list[int]]:
    """Return ``min over i < j of previous[i] + times[j] * (weights[j] - weights[i])`` and the first such i, for each j.

    The line of i is ``previous[i] - weights[i] * time``: slopes fall with i, and times grow with j, so that the best
    line only moves on. Where lines are equal at a time, the first stays.
    """
    values: list[Value | None] = [None]
    before = [-1]
    hull: list[int] = []
    heights: list[int] = []
    slopes: list[int] = []
    front = 0
    for j in range(1, len(times)):
        height = previous[j - 1]
        if height is not None:
            slope = weights[j - 1]
            if hull and slopes[-1] == slope:
                if height < heights[-1]:
                    hull.pop(), heights.pop(), slopes.pop()
                else:
                    slope = -1
            if slope >= 0:
                # The last line is never alone below when the new one takes over from the one before it no later.
                while len(hull) - front >= 2 and (height - heights[-1]) * (slopes[-1] - slopes[-2]) < (
                    heights[-1] - heights[-2]
                ) * (slope - slopes[-1]):
                    hull.pop(), heights.pop(), slopes.pop()
                hull.append(j - 1)
                heights.append(height)
                slopes.append(slope)
        time = times[j]
        last = len(hull) - 1
        if last < 0:
            values.append(None)
            before.append(-1)
            continue
        best = heights[front] - slopes[front] * time
        while front < last and (next_best := heights[front + 1] - slopes[front + 1] * time) < best:
            front += 1
            best = next_best
        values.append(best + time * weights[j])
        before.append(hull[front])
    return values, before
