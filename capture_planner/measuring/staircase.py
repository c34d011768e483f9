"""Which sizes to measure: time is a staircase of the size, and its steps are found by bisection.

Numbers come from a function that measures, so nothing here needs a device, or a clock but the caller's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, zip_longest
from typing import Generic, TypeVar

import attrs

SPREAD = 0.02
"""Relative spread of repeats below which a median is good enough; smaller steps are not looked for."""
LEAST, MOST = 5, 25
"""Repeats of a size."""

K = TypeVar("K", bound=Hashable)


@attrs.frozen
class Timing:
    """The median of repeats, and how far they spread."""

    milliseconds: float
    spread: float
    """The distance between the quartiles, relative to the median."""
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Return the figures of one repeat or more."""
        median = statistics.median(samples)
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else (median,) * 3
        return cls(median, (high - low) / median if median else 0.0, len(samples))


def steady(sample: Callable[[], float], is_over: Callable[[], bool], spread: float = SPREAD) -> Timing:
    """Return the timing of ``sample``, in milliseconds: repeated until it spreads less than ``spread``.

    At least ``LEAST`` repeats, one where the time is over, and at most ``MOST``.
    """
    samples = [sample()]
    while not is_over() and len(samples) < MOST:
        if len(samples) >= LEAST and Timing.of(samples).spread < spread:
            break
        samples.append(sample())
    return Timing.of(samples)


@attrs.frozen(kw_only=True)
class SizeRange(Generic[K]):
    """The sizes of one curve that can be measured."""

    key: K
    last: int
    """The largest size; the smallest is 1."""
    named: tuple[int, ...] = ()
    """Sizes to measure in any case."""
    search: bool = True
    """Whether to look for steps between the sizes; else the ends and the named sizes are all."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The sizes that are measured first: both ends, then powers of two and named sizes."""
        inner = set(self.named) | {1 << bit for bit in range(self.last.bit_length() if self.search else 0)}
        return tuple(dict.fromkeys((1, self.last, *sorted(size for size in inner if size <= self.last))))


Size = tuple[K, int]
"""A size of one curve."""


@attrs.frozen(kw_only=True)
class Gap(Generic[K]):
    """Two measured sizes whose times differ, with sizes between them that were not measured."""

    key: K
    low: int
    high: int
    rise: float
    """By how much the larger one takes longer, relative to the smaller."""

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2


def gaps(times: Mapping[K, Mapping[int, float]], noise: float = SPREAD) -> list[Gap[K]]:
    """Return the intervals that may have a step in them, the highest rise first.

    A larger size that is not slower than a smaller one has no step between the two that a table can use.
    """
    found = [
        Gap(key=key, low=low, high=high, rise=of_key[high] / of_key[low] - 1)
        for key, of_key in times.items()
        for low, high in pairwise(sorted(of_key))
        if high - low > 1 and of_key[high] > of_key[low] * (1 + noise)
    ]
    return sorted(found, key=lambda gap: -gap.rise)


def disputed(times: Mapping[K, Mapping[int, float]], noise: float = SPREAD) -> list[Size[K]]:
    """Return the sizes that take longer than a larger one: mistakes of measuring, or sizes of no use."""
    found = []
    for key, of_key in times.items():
        least = float("inf")
        for size in sorted(of_key, reverse=True):
            if of_key[size] > least * (1 + noise):
                found.append((key, size))
            least = min(least, of_key[size])
    return found


def rounds(
    ranges: Sequence[SizeRange[K]], times: Mapping[K, Mapping[int, float]], group: int, noise: float = SPREAD
) -> Iterator[list[Size[K]]]:
    """Yield up to ``group`` sizes to measure at a time, until every interval is flat or its ends are adjacent.

    First the ends of each curve, then powers of two and named sizes; then the middle of the intervals that rise most.
    A size that takes longer than a larger one is measured once more: the caller keeps the lower time. It puts times
    into ``times``, by curve and size, before it asks for the next round; a size that it leaves out is not asked for
    again.
    """
    by_turns = zip_longest(*([(each.key, size) for size in each.seeds] for each in ranges))
    seeds = (size for size in chain.from_iterable(by_turns) if size is not None)
    searched = {each.key for each in ranges if each.search}
    asked: set[Size[K]] = set()
    while batch := list(islice(seeds, group)):
        asked.update(batch)
        yield batch
    again: set[Size[K]] = set()
    while True:
        doubtful = [size for size in disputed(times, noise) if size not in again][:group]
        again.update(doubtful)
        middles = ((gap.key, gap.middle) for gap in gaps(times, noise) if gap.key in searched)
        new = list(islice((size for size in middles if size not in asked), group - len(doubtful)))
        asked.update(new)
        if not doubtful and not new:
            return
        yield [*doubtful, *new]
