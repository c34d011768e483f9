"""How values are distributed, in memory that does not grow with their number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import attrs

BOUND = 0.01
"""How far a percentile from buckets is from the exact one at most, as a share of it."""

LEAST = 1e-9
"""Seconds; what is shorter counts as 0."""

MOST_VALUES = 10_000
"""Values that are kept as they are; more of them are counted in buckets."""

_GROWTH = math.log((1 + BOUND) / (1 - BOUND))


@attrs.define(eq=False)
class Distribution:
    """Seconds of one kind: as they are while they are few, and then counted in buckets.

    A bucket is ``(1 + BOUND) / (1 - BOUND)`` times as wide as the one before, so that its middle is within ``BOUND``
    of all in it. Numbers and the largest value are exact.
    """

    most: int = MOST_VALUES
    """Values that are kept; more of them are counted in buckets."""
    count: int = 0
    max: float = 0.0
    _values: list[float] = attrs.field(factory=list, init=False)
    _buckets: Counter[int | None] = attrs.field(factory=Counter, init=False)
    """By the number of the bucket; None of what is shorter than ``LEAST``."""

    @classmethod
    def of(cls, values: Iterable[float], most: int = MOST_VALUES) -> Distribution:
        found = cls(most)
        for value in values:
            found.add(value)
        return found

    @property
    def is_exact(self) -> bool:
        """Whether percentiles are values that were added, and not the middles of buckets."""
        return not self._buckets

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, which is at least 0, so many times."""
        self.count += times
        self.max = max(self.max, value)
        if self._buckets or self.count > self.most:
            for kept in self._values:
                self._buckets[_bucket(kept)] += 1
            self._values.clear()
            self._buckets[_bucket(value)] += times
        else:
            self._values.extend([value] * times)

    @property
    def pairs(self) -> list[tuple[float, int]]:
        """The values with how often each was added, in ascending order; of buckets, the middles."""
        return sorted(Counter(self._values).items()) if self.is_exact else self._middles()

    def add_all(self, pairs: Iterable[tuple[float, int]], largest: float) -> None:
        """Add all of another distribution: its ``pairs`` and its ``max``. A middle falls into its own bucket again."""
        for value, times in pairs:
            self.add(value, times)
        self.max = max(self.max, largest)

    def percentile(self, percent: int) -> float:
        """Return a percentile (1 to 100) of at least one value, by nearest rank: exact, or within ``BOUND`` of it."""
        return next(self.percentiles((percent,)))

    def percentiles(self, percents: Iterable[int]) -> Iterator[float]:
        """Yield percentiles, in ascending order of ``percents``."""
        last, seen, ordered = 0.0, 0, iter(self.pairs)
        for percent in percents:
            rank = -(-percent * self.count // 100)
            while seen < rank:
                last, times = next(ordered)
                seen += times
            yield last

    def _middles(self) -> list[tuple[float, int]]:
        """Return the middle of each bucket with its count, the smallest first; none is above the largest value."""
        middles = [
            (0.0 if bucket is None else min(LEAST * math.exp(bucket * _GROWTH) * (1 + BOUND), self.max), times)
            for bucket, times in self._buckets.items()
        ]
        return sorted(middles)


def _bucket(value: float) -> int | None:
    return None if value < LEAST else math.floor(math.log(value / LEAST) / _GROWTH)
