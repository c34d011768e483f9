"""A source of traffic: how its bytes are read, what a reader may be told of it, and what comes out."""

from __future__ import annotations

import gzip
import math
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import attrs

from capture_planner.analysis.arrivals import STEP_SECONDS
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.records.batch_space import Deployment
from capture_planner.records.traffic import TrafficCount

BLOCK = 1 << 22
"""Bytes that are read at once."""
HEAD = 1 << 16
"""Bytes that a format is recognised by."""
MAX_WHOLE = 1 << 28
"""Bytes of a file that is not read line by line."""
MAX_SAMPLES = 5
"""Lines that could not be read, of which a source shows the text."""

Advance = Callable[[int], None]
"""Called with the bytes that were read since the last call."""


@attrs.frozen(kw_only=True)
class SourceOptions:
    """What sources do not say."""

    query_len: int | None = None
    """Tokens of each request of a decode, where a source has only one of requests and tokens."""
    decode_log_interval: int = 40
    """SGLang's ``--decode-log-interval``: one decode in so many is in its log."""
    deployment: Deployment | None = None
    """Limits and speculation, for traces of requests and for drafters."""
    step_seconds: float = STEP_SECONDS
    """Duration of a step, for traces of requests."""
    part: tuple[float, float] = (0.0, 1.0)
    """Which part of each source to read, as shares of its length: ``(0, 2 / 3)`` is the first two thirds."""


@attrs.frozen(kw_only=True)
class SourceCounts:
    """What was read of one source. ``seconds`` and ``skipped`` are as in ``Traffic``."""

    format: str
    batches: tuple[TrafficCount, ...]
    seconds: float | None = None
    skipped: int = 0
    samples: tuple[str, ...] = ()
    """Some of the lines that could not be read: ``file:line: text``."""
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    worker: tuple[tuple[object, ...], int] | None = None
    """Of an observation: its engine and data-parallel rank, whose workers take the same steps; and its own rank."""


@attrs.frozen
class TrafficSource:
    """A file, plain or compressed by gzip, or standard input as ``-``."""

    path: str

    @property
    def name(self) -> str:
        """The name, as messages have it."""
        return "<stdin>" if self.path == "-" else self.path

    def size(self) -> int:
        """Return the bytes on disk; 0 where that is not known."""
        return Path(self.path).stat().st_size if self.path != "-" and Path(self.path).is_file() else 0

    def blocks(self, part: tuple[float, float] = (0.0, 1.0), advance: Advance = lambda _: None) -> Iterator[bytes]:
        """Yield the bytes in blocks of whole lines; a line longer than a block is cut.

        ``part``: the lines that begin there. Raises ``InvalidDocument`` where the file cannot be read.
        """
        first, last = (0, math.inf) if part == (0.0, 1.0) else self._bounds(part)
        at, rest = 0, b""
        for block in self._raw(advance):
            block = rest + block
            end = block.rfind(b"\n") + 1
            if not end and len(block) < BLOCK:
                rest = block
                continue
            whole, rest = (block[:end], block[end:]) if end else (block, b"")
            yield _between(whole, first - at, last - at)
            at += len(whole)
        if rest:
            yield _between(rest, first - at, last - at)

    def _bounds(self, part: tuple[float, float]) -> tuple[float, float]:
        path = Path(self.path)
        if self.path == "-" or path.is_fifo():
            kind = "standard input" if self.path == "-" else "a pipe"
            raise InvalidDocument([Problem(file=self.name, message=f"{kind} has no parts", remedy="name a file")])
        size = sum(map(len, self._raw(lambda _: None)))
        first, last = (share * size for share in part)
        return first, math.inf if part[1] >= 1 else last

    def _raw(self, advance: Advance) -> Iterator[bytes]:
        """Yield the bytes, decompressed, and report the bytes of the file itself."""
        try:
            if self.path == "-":
                yield from _read(sys.stdin.buffer, sys.stdin.buffer, advance)
                return
            with Path(self.path).open("rb") as raw:
                if raw.peek(2)[:2] == b"\x1f\x8b":
                    with gzip.open(raw) as file:
                        yield from _read(file, raw, advance)  # type: ignore[arg-type]
                else:
                    yield from _read(raw, raw, advance)
        except (OSError, EOFError, zlib.error) as error:
            message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise InvalidDocument([Problem(file=self.name, message=message)]) from error


def _read(file: BinaryIO, raw: BinaryIO, advance: Advance) -> Iterator[bytes]:
    seekable, before = raw.seekable(), 0
    while block := file.read(BLOCK):
        now = raw.tell() if seekable else before + len(block)
        advance(now - before)
        before = now
        yield block


def _between(block: bytes, first: float, last: float) -> bytes:
    """Return the lines of a block that begin from ``first`` on and before ``last``."""
    if first <= 0 and last >= len(block):
        return block
    return block[_line_start(block, first) : _line_start(block, last)]


def _line_start(block: bytes, at: float) -> int:
    """Return where the first line begins that begins at ``at`` or later."""
    if at <= 0:
        return 0
    if at >= len(block):
        return len(block)
    return block.find(b"\n", math.ceil(at) - 1) + 1 or len(block)
