"""Text for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

UNITS = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
"""Units of bytes, each with the power of two."""


def format_bytes(value: int) -> str:
    """Write a number of bytes exactly, in the largest unit that divides it: ``2GiB``, ``1536MiB``."""
    unit = next(u for u in reversed(UNITS) if value % (1 << UNITS[u]) == 0) if value else "B"
    return f"{value >> UNITS[unit]}{unit}"


def rounded_bytes(value: float) -> str:
    """Write a number of bytes for people: ``1.9 GiB``, below one GiB ``33 MiB``."""
    return f"{value / (1 << 30):.1f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.0f} MiB"


def counted(count: int, noun: str) -> str:
    """Write a count with its noun: ``1 token``, ``2,000 tokens``."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def query_len_text(query_len: int | None, *, varies: bool) -> str:
    """Write how many tokens each request of a decode has: ``4``, or ``up to 4`` where that varies."""
    return f"up to {query_len}" if varies else f"{query_len}"


def ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    """Write ranges: ``1 to 4, 9``."""
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in ranges)


def spans(ranges: Sequence[tuple[int, int]], noun: str) -> str:
    """Write ascending ranges: ``1 to 4, 9 tokens``; of more than three the ends, ``1 to 90 tokens, in 7 ranges``."""
    if len(ranges) > 3:
        return f"{ranges[0][0]} to {ranges[-1][1]} {noun}s, in {len(ranges)} ranges"
    text = ranges_text(ranges)
    # Only the count 1 alone is singular.
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"
