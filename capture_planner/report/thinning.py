"""Few points that stand for many: however long a run, no series of a plot has more than MAX_POINTS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from capture_planner.report.plots import MAX_POINTS
from capture_planner.runtime.ledger import Step


def cumulative(values: Iterable[float]) -> tuple[list[float], list[float]]:
    """Return x and y of the share of values up to x, at most MAX_POINTS steps; the extremes are exact."""
    ordered = sorted(values)
    last = len(ordered) - 1
    steps = min(MAX_POINTS, last) or 1
    at = sorted({round(step * last / steps) for step in range(steps + 1)})
    return [ordered[0], *(ordered[i] for i in at)], [0.0, *((i + 1) / len(ordered) for i in at)]


def thinned(counts: Mapping[tuple[int, int], int]) -> list[tuple[tuple[int, int], int]]:
    """Return at most MAX_POINTS points with their counts: of neighbours, the most frequent for all."""
    points = sorted(counts.items(), key=lambda point: point[0][::-1])
    width = -(-len(points) // MAX_POINTS)
    return [
        (max(group, key=lambda point: point[1])[0], sum(count for _, count in group))
        for start in range(0, len(points), width or 1)
        if (group := points[start : start + width])
    ]


@attrs.frozen(kw_only=True)
class Buckets:
    """Steps in at most MAX_POINTS buckets of equally many neighbours; the last may have fewer."""

    first: int
    width: int
    """Steps in a bucket."""
    steps: tuple[int, ...]
    """How many steps were taken in each."""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Buckets:
        """Lay buckets over at least one step."""
        first, last = min(step.index for step in steps), max(step.index for step in steps)
        width = -(-(last - first + 1) // MAX_POINTS)
        counts = [0] * -(-(last - first + 1) // width)
        for step in steps:
            counts[(step.index - first) // width] += 1
        return cls(first=first, width=width, steps=tuple(counts))

    @property
    def edges(self) -> list[int]:
        """The number of the first step of each bucket, and the end of the last one."""
        return [self.first + self.width * index for index in range(len(self.steps) + 1)]

    def means(self, values: Iterable[tuple[int, float]]) -> list[float]:
        """Return the mean over the steps of each bucket of ``(step, value)`` pairs, which may be many a step."""
        totals = [0.0] * len(self.steps)
        for number, value in values:
            index = (number - self.first) // self.width
            # A step that was cut off has forwards and no end: it is in no bucket.
            if 0 <= index < len(totals):
                totals[index] += value
        return [total / max(count, 1) for total, count in zip(totals, self.steps, strict=True)]
