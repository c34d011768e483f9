"""Which sizes to measure: time is a staircase of the size, and its steps are found by bisection.

Numbers come from a function that measures, so nothing here needs a device, or a clock but the caller's. The notes at
the end are what a reader of the measured times must know.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, zip_longest
from typing import Generic, TypeVar

import attrs

from capture_planner.modes import GraphMode
from capture_planner.planning.costs import Family
from capture_planner.records.profile import family_name
from capture_planner.records.text import counted

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
    # Interleaved, so that every curve has some sizes if the time runs out.
    by_turns = zip_longest(*([(each.key, size) for size in each.seeds] for each in ranges))
    seeds = (size for size in chain.from_iterable(by_turns) if size is not None)
    searched = {each.key for each in ranges if each.search}
    asked: set[Size[K]] = set()
    while batch := list(islice(seeds, group)):
        asked.update(batch)
        yield batch
    # Each size is measured again at most once, or noise could keep the search going.
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


Times = Mapping[Family, Mapping[int, Timing]]
"""Timings by family, eager passes among them, and by size or padded tokens."""


def largest_spread(times: Times) -> float | None:
    """Return the largest spread over the repeats of a size; None without sizes."""
    spreads = [timing.spread for sizes in times.values() for timing in sizes.values()]
    return round(max(spreads), 4) if spreads else None


def time_notes(times: Times) -> Iterator[str]:
    """Yield what a reader of the curves must know: sizes that did not settle, and those that larger ones beat."""
    spreads = [timing.spread for sizes in times.values() for timing in sizes.values()]
    unsettled = [spread for spread in spreads if spread >= SPREAD]
    if unsettled:
        subject = f"{len(unsettled)} of {counted(len(spreads), 'size')}"
        yield f"the repeats of {subject} spread by {SPREAD:.0%} or more, {max(unsettled):.0%} at most"
    for family in sorted(times, key=lambda family: family_name(*family)):
        sizes = sorted(times[family].items())
        yield from _beaten(family_name(*family), {size: timing.milliseconds for size, timing in sizes})


def _beaten(name: str, times: Mapping[int, float]) -> Iterator[str]:
    """Yield a note on the sizes that take longer than a larger one, beyond the noise."""
    sizes, slower = list(times), []
    for index, size in enumerate(sizes[:-1]):
        best = min(sizes[index + 1 :], key=times.__getitem__)
        if times[best] * (1 + SPREAD) < times[size]:
            slower.append(f"{size} tokens ({times[size]:.3f} ms) than {best} ({times[best]:.3f} ms)")
    if slower:
        yield f"{name}: slower {', '.join(slower[:4])}" + (f", and {len(slower) - 4} more" if len(slower) > 4 else "")


def in_tokens(times: Times) -> Times:
    """Return times by padded tokens, of times by size: requests of decodes, tokens of mixed batches."""
    return {
        family: {size * (family[2] or 1): timing for size, timing in by_size.items()}
        for family, by_size in times.items()
    }


def open_gaps(times: Times) -> Iterator[str]:
    """Yield a note for each family of graphs whose steps were not all found, of times by size."""
    plain = {family: {size: timing.milliseconds for size, timing in sizes.items()} for family, sizes in times.items()}
    plain = {family: sizes for family, sizes in plain.items() if family[1] is not GraphMode.NONE}
    by_family: dict[Family, list[tuple[int, int, float]]] = {}
    for gap in gaps(plain):
        by_family.setdefault(gap.key, []).append((gap.low, gap.high, gap.rise))
    for family, found in by_family.items():
        low, high, rise = found[0]
        unit = "requests" if family[2] else "tokens"
        yield (
            f"{family_name(*family)}: {counted(len(found), 'interval')} may have a step that was not found; the "
            f"largest rises by {rise:.0%} from {low} to {high} {unit}"
        )
