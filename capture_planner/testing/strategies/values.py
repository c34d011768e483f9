"""Names, texts, versions and counts, with their extremes; and records, whose fields are drawn by their types.

Hypothesis validates and labels each strategy object once. A strategy made anew at every draw takes longer than
the draw itself, so whatever does not depend on what was drawn before is cached here.
"""

from __future__ import annotations

import enum
import functools
import operator
import string
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner.records._base import UNIONS, Count, Interval, Name, Number, constraints
from capture_planner.records.environment import Version
from capture_planner.records.observation import Moment
from capture_planner.records.plan import Digest, Rule
from capture_planner.records.spec import SchemaVersion

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
    # Read once, since values may be an iterator.
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


NAMES = st.sampled_from(("tiny", "Qwen/Qwen3-8B", "null", "no", "8", "8.7", "1e3", "0x1F", "true", "a b")) | words(
    string.ascii_letters + string.digits, "._/+ -", 11
)
"""Some of them YAML may take for something else."""

VERSIONS = st.sampled_from(("2.13.0", "13.0", "8", "1e5", "3.0.0.post1")) | words(
    string.digits, string.ascii_letters + ".+-", 9
)

TEXTS = st.sampled_from(("as asked", "no", "8", "- a: [b]", "# not a comment", "two\nlines", " é ")) | st.text(
    string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", ""), min_size=1, max_size=20
)
"""Of one line or more."""

BYTE_COUNTS = st.integers(0, 1 << 60) | st.builds(
    operator.mul, st.integers(0, 2000), st.sampled_from((1, 1 << 10, 1 << 20, 1 << 30))
)
"""Sizes of memory, round or not."""

AMOUNTS = st.sampled_from((0.0, 1.0, 1e-05, 1.25)) | st.floats(0, 1e9, allow_nan=False)
"""Figures that are 0 or more."""


@functools.cache
def counts(most: int = 64) -> SearchStrategy[int]:
    """Return counts up to ``most``, more often near a step of sizes."""
    return st.sampled_from([n for n in _COUNTS if n <= most]) | st.integers(1, most)


list_of = functools.cache(st.lists)

_KNOWN: Mapping[Any, SearchStrategy[Any]] = {
    Count: counts(),
    Name: NAMES,
    Version: VERSIONS,
    Moment: one_of(("2026-11-22T13:00:00Z", "2026-11-22T13:00:00.25+00:00")),
    Digest: one_of(("sha256:" + "0" * 64, "sha256:" + "a1" * 32)),
    Rule: words(string.ascii_lowercase, string.digits + "-", 9),
    str: TEXTS,
    float: AMOUNTS,
    bool: st.booleans(),
    int: st.integers(0, 64),
}


@functools.cache
def by_type(hint: Any) -> SearchStrategy[Any]:
    """Return small values of a field's type, within its constraints."""
    if hint in _KNOWN:
        return _KNOWN[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        # Only unions of a type with None are drawn.
        return maybe(by_type(next(arg for arg in args if arg is not type(None))))
    if origin is tuple:
        return list_of(by_type(args[0]), max_size=3).map(tuple) if args[-1] is ... else st.tuples(*map(by_type, args))
    if origin is Mapping:
        return st.dictionaries(*map(by_type, args), max_size=2)
    if origin is typing.Annotated:
        (rule,) = constraints(hint)
        if isinstance(rule, Interval):
            # Bounds of records are far above any machine's; what has none may count steps for years.
            return st.integers(rule.ge, 1 << 40 if rule.le is None else min(rule.le, 64))
        assert isinstance(rule, Number), f"{hint} has no strategy; add one to the known types"
        figures = AMOUNTS if rule.le is None else one_of((0.0, 0.125, rule.le))
        return figures.filter(lambda value: rule.problem(value) is None)
    return one_of(hint) if issubclass(hint, enum.Enum) else records(hint)


@functools.cache
def _fields(kind: type[Any], without: frozenset[str]) -> dict[str, SearchStrategy[Any]]:
    """Return a strategy for each field of a record but those of ``without`` and the version of its schema."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [each.name for each in attrs.fields(kind) if each.init and each.name not in without]
    return {name: by_type(hints[name]) for name in names if (name, hints[name]) != ("version", SchemaVersion)}


def records(kind: type[T], /, **given: SearchStrategy[Any]) -> SearchStrategy[T]:
    """Return records whose fields are drawn by their types, unless a strategy is given."""
    return st.builds(kind, **_fields(kind, frozenset(given)), **given)  # type: ignore[arg-type]


def record_of(draw: DrawFn, kind: type[T], /, **given: Any) -> T:
    """Draw a record whose fields are drawn by their types, unless a value is given."""
    fields: Mapping[str, SearchStrategy[Any]] = _fields(kind, frozenset(given))  # type: ignore[arg-type]
    return kind(**given, **{name: draw(strategy) for name, strategy in fields.items()})
