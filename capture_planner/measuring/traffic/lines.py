"""Logs, read line by line: how the lines of a file are counted, in every format that they have."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from capture_planner.analysis.arrivals import OrderedBlocks
from capture_planner.codec.rows import MAX_TOKENS
from capture_planner.measuring.traffic.fitting import rounded_up
from capture_planner.measuring.traffic.formats import PROMPTS, Key, LineFormat, Shape
from capture_planner.measuring.traffic.source import MAX_SAMPLES, SourceCounts, SourceOptions
from capture_planner.records.traffic import TrafficCount

MAX_SHAPES = 1 << 16
"""Shapes of one source that are counted apart; those of all its blocks of time together are half as many."""

SAMPLE_LENGTH = 200
"""Characters that are shown of a line that could not be read."""

FIRST_BYTES = 512
"""Length of a block of time at first."""

EVERY_SHAPE = 2.0
"""Share from which decodes whose requests are alike are rounded, too: there are more of them than any engine has."""

RESOLUTION = 0.005
"""How far rare shapes are rounded up at first where there are more."""


class LineReader:
    """Counts the lines of one source, block by block, in every format that they have."""

    def __init__(self, name: str, formats: Sequence[LineFormat]) -> None:
        self._name = name
        self._tallies = [_LineTally(each) for each in formats]
        self._order: OrderedBlocks[tuple[int, Shape]] = OrderedBlocks(FIRST_BYTES)
        self._share = 0.0
        self._lines = 1
        self._skipped = 0
        self._samples: list[str] = []

    def add(self, block: bytes) -> None:
        """Count a block of whole lines."""
        start = 0
        while start < len(block):
            end = start + self._order.room
            end = len(block) if end >= len(block) else block.find(b"\n", end - 1) + 1 or len(block)
            self._add(block if end - start == len(block) else block[start:end])
            start = end

    def _add(self, block: bytes) -> None:
        wrong, counts = [], Counter[tuple[int, Shape]]()
        for index, tally in enumerate(self._tallies):
            whole, shapes = tally.add(block)
            if not whole:
                wrong.append(tally)
            for shape, count in shapes.items():
                counts[index, _coarser(shape, self._share)] += count
        self._order.add(counts, len(block))
        while self._order.entries > MAX_SHAPES // 2 and self._share < 1:
            self._share = max(2 * self._share, RESOLUTION)
            self._order.rename(lambda key: (key[0], _coarser(key[1], self._share)))
        try:
            block.decode("utf-8")
            readable = True
        except UnicodeDecodeError:
            readable = False
        if wrong or not readable:
            self._search(block, [tally.format for tally in wrong], readable)
        self._lines += block.count(b"\n")

    def _search(self, block: bytes, formats: Sequence[LineFormat], readable: bool) -> None:
        """Note each line of a block that has the marker of a format and is not of it, or is no text."""
        for number, line in enumerate(block.split(b"\n"), self._lines):
            broken = any(sum(map(line.count, each.markers)) > _num_readable(each, line) for each in formats)
            if broken or not (readable or _is_text(line) or any(tally.format.find(line) for tally in self._tallies)):
                self._skipped += 1
                if len(self._samples) < MAX_SAMPLES:
                    text = ascii(line[:160].decode("utf-8", "replace").rstrip("\r"))[:SAMPLE_LENGTH]
                    self._samples.append(f"{self._name}:{number}: {text}")

    def results(self, options: SourceOptions) -> Iterator[SourceCounts]:
        """Yield what was counted, by engine: of the formats that show the same steps, the richest."""
        filled = [tally for tally in self._tallies if tally.keys]
        skipped, samples = self._skipped, tuple(self._samples)
        for engine in dict.fromkeys(tally.format.engine for tally in filled):
            alike = [tally for tally in filled if tally.format.engine == engine]
            most = max(tally.format.detail for tally in alike)
            rich = [tally for tally in alike if tally.format.detail == most]
            names = " and ".join(tally.format.name for tally in rich)
            notes = tuple(
                f"{tally.format.name} show the same steps as {names}, and are not counted"
                for tally in alike
                if tally.format.detail < most and tally.format.detail > 0
            )
            counted = [tally for tally in alike if tally in rich or not tally.format.detail]
            kept = {id(tally): tally.format.repeats(tally.keys) for tally in counted}
            parts = [tally.format.count(_without(tally.keys, kept[id(tally)]), options) for tally in counted]
            notes += tuple(
                f"{tally.format.name} of several ranks that show the same steps are counted once"
                for tally in counted
                if kept[id(tally)]
            )
            if merged := sum(tally.merged for tally in rich):
                share = min(1, max(tally.share for tally in rich))
                notes += (f"{merged} rare shapes were rounded up by at most {share:.1%} each, to bound the memory",)
            batches = tuple(batch for part in parts for batch in part.batches)
            lines = sum(
                sum(batch.count for batch in part.batches) if part.lines is None else part.lines for part in parts
            )
            yield SourceCounts(
                format=names,
                batches=batches,
                lines=None if lines == sum(batch.count for batch in batches) else lines,
                blocks=tuple(self._blocks(counted, kept, options)),
                seconds=max((seconds for each in rich if (seconds := each.seconds) is not None), default=None),
                skipped=skipped,
                samples=samples,
                drafted=next((part.drafted for part in parts if part.drafted), ()),
                accepted=next((part.accepted for part in parts if part.accepted), ()),
                notes=tuple(note for part in parts for note in part.notes) + notes,
            )
            skipped, samples = 0, ()

    def _blocks(
        self, tallies: Sequence[_LineTally], repeated: Mapping[int, frozenset[Any]], options: SourceOptions
    ) -> Iterator[tuple[TrafficCount, ...]]:
        """Yield the batches of formats, block of time by block of time."""
        for block in self._order.blocks:
            batches: list[TrafficCount] = []
            for tally in tallies:
                index = self._tallies.index(tally)
                shapes = Counter({shape: count for (each, shape), count in block.items() if each == index})
                batches += tally.format.count(_without(shapes, repeated[id(tally)]), options).batches
            if batches:
                yield tuple(batches)

    @property
    def skipped(self) -> tuple[int, tuple[str, ...]]:
        """How many lines could not be read, and some of them."""
        return self._skipped, tuple(self._samples)


class _LineTally:
    """The lines of one format: how often each shape occurs, and when."""

    def __init__(self, line_format: LineFormat) -> None:
        self.format = line_format
        self.keys: Counter[Shape] = Counter()
        self.merged, self.share = 0, RESOLUTION
        self._most = MAX_SHAPES
        self._milliseconds: dict[Any, float] = {}
        self._first = self._last = b""

    def add(self, block: bytes) -> tuple[bool, Counter[Shape]]:
        """Count a block; return whether every line that has the format's marker could be read, and what was counted."""
        expected, shapes = sum(map(block.count, self.format.markers)), Counter[Shape]()
        if not expected:
            return True, shapes
        found = self.format.find(block)
        if self.format.milliseconds is None or not found:
            counted = Counter(found)
        else:
            columns = list(zip(*found, strict=True))
            times = columns.pop(self.format.milliseconds)
            counted = Counter(zip(*columns, strict=True))
            own: defaultdict[Any, list[float]] = defaultdict(list)
            for engine, each in zip(columns[0], times, strict=True):
                own[engine].append(float(each or 0))
            for engine, milliseconds in own.items():
                self._milliseconds[engine] = math.fsum(milliseconds) + self._milliseconds.get(engine, 0.0)
        readable = 0
        for key, count in counted.items():
            shape = self.format.shape(key)
            if _is_possible(shape):
                shapes[shape] += count * self.format.times(key)
                readable += count
        self.keys.update(shapes)
        if self.format.clock is not None and (moments := set(self.format.clock.findall(block))):
            self._first = min(moments | ({self._first} if self._first else set()))
            self._last = max(moments | {self._last})
        if len(self.keys) > self._most:
            self._merge()
        return readable == expected, shapes

    def _merge(self) -> None:
        """Round up the rarer shapes, as little as it takes to bound the memory."""
        while True:
            for key, _ in self.keys.most_common()[len(self.keys) // 4 :]:
                rounded = _coarser(key, self.share)
                if rounded != key:
                    self.merged += 1
                    self.keys[rounded] += self.keys.pop(key)
            if len(self.keys) <= MAX_SHAPES * 3 // 4 or self.share >= EVERY_SHAPE:
                break
            self.share *= 2
        self._most = max(MAX_SHAPES, 2 * len(self.keys))  # what cannot be rounded is not tried again for each block

    @property
    def seconds(self) -> float | None:
        """The time from the first line to the last, or else of the steps themselves, of the busiest engine."""
        span = _span(self._first, self._last)
        if span:
            return span
        most = max(self._milliseconds.values(), default=0.0)
        return round(most / 1000, 6) or None


def _is_possible(shape: Shape) -> bool:
    """Say whether a batch can have such numbers, and a file hold them."""
    return shape[1] <= MAX_TOKENS and shape[2] <= MAX_TOKENS


def _num_readable(line_format: LineFormat, line: bytes) -> int:
    return sum(_is_possible(line_format.shape(_timeless(line_format, key))) for key in line_format.find(line))


def _timeless(line_format: LineFormat, key: Key) -> Key:
    at = line_format.milliseconds
    return key if at is None else (*key[:at], *key[at + 1 :])


def _coarser(shape: Shape, share: float) -> Shape:
    """Return a shape whose numbers are rounded up by at most a share.

    Decodes whose requests differ keep their requests, and still differ; those whose requests are alike stay.
    """
    kind, reqs, tokens = shape
    if PROMPTS in kind or share >= EVERY_SHAPE:
        share = min(share, 1)
        return kind, rounded_up(reqs, share), rounded_up(tokens, share)
    if not reqs or tokens % reqs == 0:
        return shape
    rounded = rounded_up(tokens, share)
    return kind, reqs, rounded - (rounded % reqs == 0)


def _without(shapes: Counter[Shape], kinds: frozenset[Any]) -> Counter[Shape]:
    return Counter({shape: count for shape, count in shapes.items() if shape[0] not in kinds}) if kinds else shapes


def _span(first: bytes, last: bytes) -> float:
    """Return the seconds between two moments of one year; 0 where they are none."""
    try:
        start, end = (datetime.strptime(f"2000-{each.decode()}", "%Y-%m-%d %H:%M:%S") for each in (first, last))
    except ValueError:
        return 0.0
    # The clocks have no years: over New Year the end seems to come before the start.
    return seconds if (seconds := (end - start).total_seconds()) < 183 * 86_400 else 0.0


def _is_text(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
