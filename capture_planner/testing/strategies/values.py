"""What records are made of: names, texts, versions and counts with their extremes."""

from __future__ import annotations

import string
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

BACKENDS = ("alpha", "beta", "gamma")
"""Names that specs choose from, where none are given."""

_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64)
"""Counts on both sides of the steps that sizes have."""


def maybe(strategy: SearchStrategy[T]) -> SearchStrategy[T | None]:
    """Return the strategy, or None."""
    return st.none() | strategy


def any_names() -> SearchStrategy[str]:
    """Return names that YAML may take for something else."""
    plain = st.sampled_from(("tiny", "Qwen/Qwen3-8B", "null", "no", "8", "8.7", "1e3", "0x1F", "true", "a b"))
    return plain | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/+ -]{0,11}", fullmatch=True)


def versions() -> SearchStrategy[str]:
    """Return versions of packages."""
    return st.sampled_from(("2.13.0", "13.0", "8", "1e5", "3.0.0.post1")) | st.from_regex(
        r"[0-9][0-9A-Za-z.+-]{0,9}", fullmatch=True
    )


def any_text() -> SearchStrategy[str]:
    """Return texts of one line or more."""
    return st.sampled_from(
        ("as asked", "no", "8", "- a: [b]", "# not a comment", "two\nlines", " é ")
    ) | st.text(
        string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", ""), min_size=1, max_size=20
    )


def byte_counts() -> SearchStrategy[int]:
    """Return sizes of memory, round or not."""
    units = st.sampled_from((1, 1 << 10, 1 << 20, 1 << 30))
    return st.builds(lambda n, unit: n * unit, st.integers(0, 2000), units) | st.integers(0, 1 << 60)


def counts(most: int = 64) -> SearchStrategy[int]:
    """Return counts up to ``most``, more often those beside a step of sizes."""
    return st.sampled_from([n for n in _COUNTS if n <= most]) | st.integers(1, most)
