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
from capture_planner.measuring.traffic.formats import PROMPTS, LineFormat, Shape
from capture_planner.measuring.traffic.source import MAX_SAMPLES, SourceCounts, SourceOptions

MAX_SHAPES = 1 << 17
"""Shapes of one source that are counted apart, over all its blocks of time."""

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
        self._share, self._most = 0.0, MAX_SHAPES
        self._lines = 1
        self._skipped = 0
        self._samples: list[str] = []

    def add(self, block: bytes) -> None:
        """Count a block of whole lines."""
        start = 0
        while start < len(block):
            end = start + self._order.room
            # A line belongs to one block of time.
            end = len(block) if end >= len(block) else block.find(b"\n", end - 1) + 1 or len(block)
            self._add(block if end - start == len(block) else block[start:end])
            start = end

    def _add(self, block: bytes) -> None:
        wrong, counts = [], Counter[tuple[int, Shape]]()
        for index, tally in enumerate(self._tallies):
            whole, shapes = tally.add(block)
            if not whole:
                wrong.append(tally.format)
            for shape, count in shapes.items():
                counts[index, _coarser(shape, self._share)] += count
        self._order.add(counts, len(block))
        while self._order.entries > self._most:
            if self._share >= EVERY_SHAPE:
                self._most = 2 * self._order.entries  # what cannot be rounded is not tried again for each block
            self._share = max(2 * self._share, RESOLUTION)
            # Shapes that were counted before are rounded too, or one would be counted under two names.
            self._order.rename(lambda key: (key[0], _coarser(key[1], self._share)))
        readable = _is_text(block)
        # Line by line is slow, and most blocks have nothing to note.
        if wrong or not readable:
            self._search(block, wrong, readable)
        self._lines += block.count(b"\n")

    def _search(self, block: bytes, formats: Sequence[LineFormat], readable: bool) -> None:
        """Note each line of a block that has the marker of a format and is not of it, or is no text."""
        for number, line in enumerate(block.split(b"\n"), self._lines):
            # A tally of its own: the block is counted already.
            broken = not all(_LineTally(each).add(line)[0] for each in formats)
            if broken or not (readable or _is_text(line) or any(tally.format.find(line) for tally in self._tallies)):
                self._skipped += 1
                if len(self._samples) < MAX_SAMPLES:
                    text = ascii(line[:160].decode("utf-8", "replace").rstrip("\r"))[:SAMPLE_LENGTH]
                    self._samples.append(f"{self._name}:{number}: {text}")

    def results(self, options: SourceOptions) -> Iterator[SourceCounts]:
        """Yield what was counted, by engine: of the formats that show the same steps, the richest."""
        blocks = [self._by_format(block) for block in self._order.blocks]
        keys = {each: sum((block[each] for block in blocks), Counter[Shape]()) for each in self._by_format({})}
        filled = [each for each in keys if keys[each]]
        skipped, samples = self.skipped
        for engine in dict.fromkeys(each.format.engine for each in filled):
            alike = [each for each in filled if each.format.engine == engine]
            most = max(each.format.detail for each in alike)
            rich = [each for each in alike if each.format.detail == most]
            names = " and ".join(each.format.name for each in rich)
            # Lines of detail 0 have no steps, such as the acceptance of drafts.
            counted = [each for each in alike if each in rich or not each.format.detail]
            repeated = {each: each.format.repeats(keys[each]) for each in counted}
            whole = _parts(keys, repeated, options)
            batches = tuple(batch for part in whole for batch in part.batches)
            in_order = (
                tuple(batch for part in _parts(block, repeated, options) for batch in part.batches) for block in blocks
            )
            steps = [sum(batch.count for batch in part.batches) for part in whole]
            lines = sum(own if part.lines is None else part.lines for own, part in zip(steps, whole, strict=True))
            yield SourceCounts(
                format=names,
                batches=batches,
                lines=None if lines == sum(steps) else lines,
                blocks=tuple(filter(None, in_order)),
                seconds=max((seconds for each in rich if (seconds := each.seconds) is not None), default=None),
                skipped=skipped,
                samples=samples,
                drafted=next((part.drafted for part in whole if part.drafted), ()),
                accepted=next((part.accepted for part in whole if part.accepted), ()),
                notes=(*(note for part in whole for note in part.notes), *self._notes(alike, names, most, repeated)),
            )
            skipped, samples = 0, ()  # the first engine's counts have them

    def _notes(
        self, alike: Sequence[_LineTally], names: str, most: int, repeated: Mapping[_LineTally, frozenset[Any]]
    ) -> Iterator[str]:
        for each in alike:
            if 0 < each.format.detail < most:
                yield f"{each.format.name} show the same steps as {names}, and are not counted"
        for each, kinds in repeated.items():
            if kinds:
                yield f"{each.format.name} of several ranks that show the same steps are counted once"
        if self._share:
            yield f"rare shapes were rounded up by at most {min(1, self._share):.1%} each, to bound the memory"

    def _by_format(self, block: Mapping[tuple[int, Shape], int]) -> dict[_LineTally, Counter[Shape]]:
        """Return the counts of each format of a block of time."""
        found = {tally: Counter[Shape]() for tally in self._tallies}
        for (index, shape), count in block.items():
            found[self._tallies[index]][shape] = count
        return found

    @property
    def skipped(self) -> tuple[int, tuple[str, ...]]:
        """How many lines could not be read, and some of them."""
        return self._skipped, tuple(self._samples)


class _LineTally:
    """The lines of one format: what they say, and when."""

    def __init__(self, line_format: LineFormat) -> None:
        self.format = line_format
        self._milliseconds: dict[Any, float] = {}
        self._first = self._last = b""

    def add(self, block: bytes) -> tuple[bool, Counter[Shape]]:
        """Count a block; return whether every line that has the format's marker could be read, and what was counted."""
        expected, shapes = sum(map(block.count, self.format.markers)), Counter[Shape]()
        # Counting markers is much faster than matching lines.
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
                # A plain sum of millions of short times loses digits.
                self._milliseconds[engine] = math.fsum(milliseconds) + self._milliseconds.get(engine, 0.0)
        readable = 0
        for key, count in counted.items():
            shape = self.format.shape(key)
            # No batch has more, and a file cannot hold more.
            if max(shape[1:]) <= MAX_TOKENS:
                shapes[shape] += count * self.format.times(key)
                readable += count
        if self.format.clock is not None and (moments := set(self.format.clock.findall(block))):
            # b"" is no time yet, and would be the least.
            self._first = min(moments | ({self._first} if self._first else set()))
            self._last = max(moments | {self._last})
        return readable == expected, shapes

    @property
    def seconds(self) -> float | None:
        """The time from the first line to the last, or else of the steps themselves, of the busiest engine."""
        span = _span(self._first, self._last)
        if span:  # 0 where all lines are of one second
            return span
        most = max(self._milliseconds.values(), default=0.0)
        return round(most / 1000, 6) or None


def _parts(
    keys: Mapping[_LineTally, Counter[Shape]], repeated: Mapping[_LineTally, frozenset[Any]], options: SourceOptions
) -> list[SourceCounts]:
    """Return the batches of each format, without the kinds that other lines show too."""
    return [
        each.format.count(Counter({key: count for key, count in keys[each].items() if key[0] not in kinds}), options)
        for each, kinds in repeated.items()
    ]


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
    return kind, reqs, rounded - (rounded % reqs == 0)  # a multiple would be requests that are alike


def _span(first: bytes, last: bytes) -> float:
    """Return the seconds between two moments of one year; 0 where they are none."""
    try:
        # A leap year, so that 29 February is a date.
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
