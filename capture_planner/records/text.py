"""Text for messages."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Write a count with its noun: ``1 token``, ``2 tokens``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
