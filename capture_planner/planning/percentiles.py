"""Percentiles of counted items."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def percentile(counts: Iterable[tuple[T, float]], percent: float) -> T:
    """Return the first of ascending counted items within which ``percent`` of all counts are; there must be some."""
    # Read twice: for the sum of the counts, and for the item.
    items = list(counts)
    left = sum(count for _, count in items) * percent / 100
    for item, count in items:
        left -= count
        # Counts are whole, and what is left may not be, by rounding.
        if left <= 1e-9:
            return item
    return items[-1][0]
