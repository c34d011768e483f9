"""A source of traffic: how its bytes are read, what a reader may be told of it, and what comes out."""

from __future__ import annotations

import codecs
import itertools
import math
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import attrs

from capture_planner.analysis.arrivals import Pace
from capture_planner.analysis.trace import TraceRow
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.records.batch_space import Deployment
from capture_planner.records.observation import Observation
from capture_planner.records.profile import Profile
from capture_planner.records.traffic import TrafficCount

BLOCK = 1 << 22
"""Bytes that are read at once."""
SLICE = 1 << 14
"""Bytes that are decompressed at once."""
HEAD = 1 << 16
"""Bytes that a format is recognised by."""
MAX_WHOLE = 1 << 28
"""Bytes of a file that is not read line by line."""
MAX_SAMPLES = 5
"""Lines that could not be read, of which a source shows the text."""

Advance = Callable[[int], None]
"""Called with the bytes that were read since the last call."""
Note = Callable[[str], None]
"""Called with a sentence about a source."""


@attrs.frozen(kw_only=True)
class SourceOptions:
    """Facts that sources lack."""

    query_len: int | None = None
    """Tokens of each request of a decode, where a source has only one of requests and tokens."""
    decode_log_interval: int = 40
    """SGLang's ``--decode-log-interval``: one decode in so many is in its log."""
    deployment: Deployment | None = None
    """Limits and speculation, for traces of requests and for drafters."""
    pace: Pace | None = None
    """Time of steps, for traces of requests; None: a constant."""
    acceptance: tuple[float, ...] | None = None
    """For traces: share of steps in which each draft and all before it are accepted; None: the deployment's."""
    part: tuple[float, float] = (0.0, 1.0)
    """Part of each source to read, as shares of its length: ``(0, 2 / 3)`` is the first two thirds."""

    def completed(self, deployment: Deployment | None, pace: Pace | None, profile: Profile | None) -> SourceOptions:
        """Return the options with a deployment, and with a pace and an acceptance where they say none.

        :param pace: time of steps; None: a constant.
        :param profile: the acceptance of last resort.
        """
        acceptance = self.acceptance
        for known in (deployment, profile):
            speculative = None if known is None else known.speculative
            if acceptance is None and speculative is not None and speculative.acceptance:
                acceptance = speculative.acceptance
        return attrs.evolve(self, deployment=deployment, pace=self.pace or pace, acceptance=acceptance)


@attrs.frozen
class RequestTrace:
    """The requests of a trace, and the part of it that counts."""

    arrivals: tuple[TraceRow, ...]
    window: tuple[float, float]
    """Seconds from the start, as ``analysis.arrivals.simulate`` takes them."""


@attrs.frozen(kw_only=True)
class SourceCounts:
    """Counts of one source, or of its lines in one format. ``seconds`` and ``skipped`` are as in ``Traffic``."""

    format: str = ""
    batches: tuple[TrafficCount, ...] = attrs.field(converter=tuple[TrafficCount, ...])
    lines: int | None = None
    """Lines that the target's steps rest on, as in ``Traffic``; None: each step has one."""
    blocks: tuple[tuple[TrafficCount, ...], ...] = ()
    """Batches in stretches of the order of time; rare shapes may be larger ones. Empty: it has no order."""
    trace: RequestTrace | None = None
    seconds: float | None = None
    skipped: int = 0
    samples: tuple[str, ...] = ()
    """Some of the lines that could not be read: ``file:line: text``."""
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    worker: tuple[tuple[object, ...], int] | None = None
    """Engine and data-parallel rank of an observation, whose workers take the same steps, and its own rank."""


@attrs.frozen
class TrafficSource:
    """A file, plain or compressed by gzip, or standard input as ``-``."""

    path: str
    observation: Observation | None = None
    """The observation in it, where that was read already."""

    @property
    def name(self) -> str:
        """The name, as messages have it."""
        return "<stdin>" if self.path == "-" else self.path

    def size(self) -> int:
        """Return the bytes on disk; 0 where that is not known."""
        return Path(self.path).stat().st_size if self.path != "-" and Path(self.path).is_file() else 0

    def blocks(
        self, part: tuple[float, float] = (0.0, 1.0), advance: Advance = lambda _: None, note: Note = lambda _: None
    ) -> Iterator[bytes]:
        """Yield the text, as UTF-8, in blocks of whole lines; a line longer than a block is cut.

        ``part``: the lines that begin there. ``note`` is called where the file ends too soon. Raises
        ``InvalidDocument`` where it cannot be read.
        """
        first, last = (0, math.inf) if part == (0.0, 1.0) else self._bounds(part)
        at, rest = 0, b""
        for block in self._raw(advance, note):
            block = rest + block
            end = block.rfind(b"\n") + 1
            if not end and len(block) < BLOCK:  # no line has ended yet
                rest = block
                continue
            whole, rest = (block[:end], block[end:]) if end else (block, b"")
            yield _between(whole, first - at, last - at)
            at += len(whole)
        if rest:
            yield _between(rest, first - at, last - at)

    def _bounds(self, part: tuple[float, float]) -> tuple[float, float]:
        if self.path == "-" or Path(self.path).is_fifo():
            kind = "standard input" if self.path == "-" else "a pipe"
            raise InvalidDocument([Problem(file=self.name, message=f"{kind} has no parts", remedy="name a file")])
        # The length of compressed text is known only once it is read, so a part takes two passes.
        size = sum(map(len, self._raw(lambda _: None, lambda _: None)))
        first, last = (share * size for share in part)
        return first, math.inf if part[1] >= 1 else last

    def _raw(self, advance: Advance, note: Note) -> Iterator[bytes]:
        """Yield the bytes, decompressed and as UTF-8, and report the bytes of the file itself."""
        try:
            with nullcontext(sys.stdin.buffer) if self.path == "-" else Path(self.path).open("rb") as file:
                yield from _plain(_read(file, advance), note)
        except (OSError, zlib.error) as error:
            message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            raise InvalidDocument([Problem(file=self.name, message=message)]) from error


def _read(file: BinaryIO, advance: Advance) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        advance(len(block))
        yield block


def _plain(blocks: Iterator[bytes], note: Note) -> Iterator[bytes]:
    """Yield the text of a file, whether it is compressed or not, as UTF-8."""
    first = next(blocks, b"")
    blocks = itertools.chain([first], blocks)
    return _as_utf8(_joined(_decompressed(blocks, note)) if first.startswith(b"\x1f\x8b") else blocks)


def _decompressed(blocks: Iterator[bytes], note: Note) -> Iterator[bytes]:
    """Yield what gzip compressed, member by member, as far as it goes: a log may still be written."""
    member = None
    # In slices, because what is behind the end of a member is copied, and members may be many and empty.
    for block in (each[at : at + SLICE] for each in blocks for at in range(0, len(each), SLICE)):
        while block:
            if member is None:
                block = block.lstrip(b"\0")  # padding behind a member
                if not block:
                    break
                member = zlib.decompressobj(wbits=31)  # 16 for gzip's header, 15 for any window
            yield member.decompress(block, BLOCK)
            block = member.unused_data if member.eof else member.unconsumed_tail
            member = None if member.eof else member
    if member is not None:
        yield member.flush()
        if not member.eof:
            note("the compressed file is cut short, as one that is still written; it is read as far as it goes")


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield pieces of any length as blocks."""
    held, length = [], 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        # Each block is matched by every format, and what gzip yields may be a few bytes.
        if length >= BLOCK:
            yield b"".join(held)
            held, length = [], 0
    yield b"".join(held)


def _as_utf8(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield text as UTF-8 that begins with the byte-order mark of UTF-16, as PowerShell writes; all else as it is."""
    blocks = filter(None, blocks)
    first = next(blocks, b"")
    blocks = itertools.chain([first], blocks)
    if not first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    for block in blocks:
        yield decoder.decode(block).encode()


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
