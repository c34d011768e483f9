"""Logs, read line by line: what a format of lines is, and how the lines of a file are counted."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import attrs

from capture_planner.measuring.traffic.fitting import rounded_up
from capture_planner.measuring.traffic.source import MAX_SAMPLES, SourceCounts, SourceOptions
from capture_planner.records.traffic import TrafficCount

Key = tuple[Any, ...]
"""What a line says of its step, as the format's own pattern has it."""

Shape = tuple[Any, int, int]
"""Kind of a step, its requests and its tokens; 0 where the line does not say."""

DECODE, PROMPTS = "decode", "prompts"
"""Kinds that formats share; each may have others, and a tuple with PROMPTS in it is rounded where it is rare."""

MAX_SHAPES = 1 << 16
"""Shapes of one source that are counted apart."""

RESOLUTION = 0.005
"""How far rare shapes are rounded up at first where there are more."""


@attrs.frozen(kw_only=True)
class LineCounts:
    """What the lines of one format come to."""

    batches: Sequence[TrafficCount]
    notes: tuple[str, ...] = ()
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class LineFormat:
    """One format of lines that a log may have among others."""

    name: str
    engine: str
    """Formats of one engine show the same steps; of those in one source, the richest counts."""
    detail: int
    """How much its lines say; formats of equal detail show different steps."""
    markers: tuple[bytes, ...]
    """Texts, one of which is in each of its lines, once."""
    example: str
    find: Callable[[bytes], list[Key]]
    """Return the keys of all lines in a block of text that are of this format."""
    milliseconds: int | None = None
    """Which item of a key is the duration of the step, where lines have one; the first then names engine or rank."""
    shape: Callable[[Key], Shape]
    """Return the shape of a key, without the duration."""
    count: Callable[[Counter[Shape], SourceOptions], LineCounts]
    """Return the batches of counted shapes."""
    clock: re.Pattern[bytes] | None = None
    """Matches month, day and time of a line: ``11-22 05:51:30``."""


class LineReader:
    """Counts the lines of one source, block by block, in every format that they have."""

    def __init__(self, name: str, formats: Sequence[LineFormat]) -> None:
        self._name = name
        self._tallies = [_LineTally(each) for each in formats]
        self._lines = 1
        self._skipped = 0
        self._samples: list[str] = []

    def add(self, block: bytes) -> None:
        """Count a block of whole lines."""
        wrong = [tally for tally in self._tallies if not tally.add(block)]
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
            broken = any(sum(map(line.count, each.markers)) > len(each.find(line)) for each in formats)
            if broken or not (readable or _is_text(line) or any(tally.format.find(line) for tally in self._tallies)):
                self._skipped += 1
                if len(self._samples) < MAX_SAMPLES:
                    text = ascii(line[:160].decode("utf-8", "replace").rstrip("\r"))
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
            parts = [tally.format.count(tally.keys, options) for tally in counted]
            if merged := sum(tally.merged for tally in rich):
                share = max(tally.share for tally in rich)
                notes += (f"{merged} rare shapes were rounded up by at most {share:.1%} each, to bound the memory",)
            yield SourceCounts(
                format=names,
                batches=tuple(batch for part in parts for batch in part.batches),
                seconds=max((seconds for each in rich if (seconds := each.seconds) is not None), default=None),
                skipped=skipped,
                samples=samples,
                drafted=next((part.drafted for part in parts if part.drafted), ()),
                accepted=next((part.accepted for part in parts if part.accepted), ()),
                notes=tuple(note for part in parts for note in part.notes) + notes,
            )
            skipped, samples = 0, ()

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
        self._milliseconds: dict[Any, float] = {}
        self._first = self._last = b""

    def add(self, block: bytes) -> bool:
        """Count a block; return whether every line that has the format's marker could be read."""
        expected = sum(map(block.count, self.format.markers))
        if not expected:
            return True
        found = self.format.find(block)
        if self.format.milliseconds is None or not found:
            counted = Counter(found)
        else:
            columns = list(zip(*found, strict=True))
            times = columns.pop(self.format.milliseconds)
            counted = Counter(zip(*columns, strict=True))
            engines = set(columns[0])
            for engine in engines:
                own = times if len(engines) == 1 else itertools.compress(times, map(engine.__eq__, columns[0]))
                before = self._milliseconds.get(engine, 0.0)
                self._milliseconds[engine] = math.fsum(map(float, filter(None, own))) + before
        shape = self.format.shape
        for key, count in counted.items():
            self.keys[shape(key)] += count
        if self.format.clock is not None and (moments := set(self.format.clock.findall(block))):
            self._first = min(moments | ({self._first} if self._first else set()))
            self._last = max(moments | {self._last})
        if len(self.keys) > MAX_SHAPES:
            self._merge()
        return len(found) == expected

    def _merge(self) -> None:
        """Round up the rarer shapes with prompts, as little as it takes to bound the memory."""
        while len(self.keys) > MAX_SHAPES * 3 // 4:
            for key, _ in self.keys.most_common()[len(self.keys) // 4 :]:
                kind, reqs, tokens = key
                rounded = kind, rounded_up(reqs, self.share), rounded_up(tokens, self.share)
                if PROMPTS in kind and rounded != key:
                    self.merged += 1
                    self.keys[rounded] += self.keys.pop(key)
            if len(self.keys) > MAX_SHAPES * 3 // 4:
                if self.share > 1:  # decodes alone are more
                    return
                self.share *= 2

    @property
    def seconds(self) -> float | None:
        """The time from the first line to the last, or else of the steps themselves, of the busiest engine."""
        span = _span(self._first, self._last)
        if span:
            return span
        most = max(self._milliseconds.values(), default=0.0)
        return round(most / 1000, 6) or None


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
