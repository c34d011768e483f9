"""Names, texts, versions and counts, with their extremes.

Hypothesis validates and labels each strategy object once. A strategy made anew at every draw takes longer than
the draw itself, so whatever does not depend on what was drawn before is cached here.
"""

from __future__ import annotations

import functools
import operator
import string
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

P = ParamSpec("P")
T = TypeVar("T")

BACKENDS = ("alpha", "beta", "gamma")
"""Names that specs choose from, where none are given."""

_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64)
"""Counts on both sides of the steps that sizes have."""


def composite(function: Callable[Concatenate[DrawFn, P], T]) -> Callable[P, SearchStrategy[T]]:
    """Do as ``st.composite``, with one strategy for equal arguments."""
    new = st.composite(function)
    cached = functools.cache(new)

    @functools.wraps(new)
    def strategy(*args: P.args, **kwargs: P.kwargs) -> SearchStrategy[T]:
        try:
            return cached(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError:  # An argument is not hashable.
            return new(*args, **kwargs)

    return strategy


def maybe(strategy: SearchStrategy[T]) -> SearchStrategy[T | None]:
    return _maybe(strategy)


def one_of(values: Iterable[T]) -> SearchStrategy[T]:
    """Return a strategy for one of a few values, or of the members of an enum."""
    listed = tuple(values)
    # (1, 2) and (1.0, 2.0) are equal keys of a cache, and are not the same values.
    return _one_of(listed, *map(type, listed))


@functools.cache
def _maybe(strategy: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.none() | strategy


@functools.cache
def _one_of(values: tuple[Any, ...], *types: type) -> SearchStrategy[Any]:
    return st.sampled_from(values)


@functools.cache
def words(first: str, others: str, most: int) -> SearchStrategy[str]:
    """Return texts of a first character, and up to ``most`` more that may be of the others too.

    ``from_regex`` would take several times as long, and every deployment has dozens of names.
    """
    return st.builds(operator.add, st.sampled_from(first), st.text(first + others, max_size=most))


@functools.cache
def any_names() -> SearchStrategy[str]:
    """Return names that YAML may take for something else."""
    plain = st.sampled_from(("tiny", "Qwen/Qwen3-8B", "null", "no", "8", "8.7", "1e3", "0x1F", "true", "a b"))
    return plain | words(string.ascii_letters + string.digits, "._/+ -", 11)


@functools.cache
def versions() -> SearchStrategy[str]:
    listed = st.sampled_from(("2.13.0", "13.0", "8", "1e5", "3.0.0.post1"))
    return listed | words(string.digits, string.ascii_letters + ".+-", 9)


@functools.cache
def any_text() -> SearchStrategy[str]:
    """Return texts of one line or more."""
    return st.sampled_from(("as asked", "no", "8", "- a: [b]", "# not a comment", "two\nlines", " é ")) | st.text(
        string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", ""), min_size=1, max_size=20
    )


@functools.cache
def byte_counts() -> SearchStrategy[int]:
    """Return sizes of memory, round or not."""
    units = st.sampled_from((1, 1 << 10, 1 << 20, 1 << 30))
    return st.builds(lambda n, unit: n * unit, st.integers(0, 2000), units) | st.integers(0, 1 << 60)


@functools.cache
def counts(most: int = 64) -> SearchStrategy[int]:
    """Return counts up to ``most``, more often near a step of sizes."""
    return st.sampled_from([n for n in _COUNTS if n <= most]) | st.integers(1, most)
