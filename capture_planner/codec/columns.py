"""Columns of the rows that tables are written as in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from capture_planner.errors import Problem
from capture_planner.records._base import raise_any


def refuse_uneven(row: Any, first: str, *others: str) -> None:
    """Raise ``InvalidValue`` where a column has another length than the column ``first``."""
    length = len(getattr(row, first))
    raise_any(
        Problem(path=(name,), message=f"{len(column)} values, and {first} has {length}", remedy="list one for each")
        for name in others
        if (column := getattr(row, name)) is not None and len(column) != length
    )


def cells_of(column: Sequence[Any] | None, length: int, default: Any = None) -> Sequence[Any]:
    """Return the cells of a column; the default for each where it is omitted."""
    return (default,) * length if column is None else column


def column_of(values: Iterable[Any], default: Any = None) -> tuple[Any, ...] | None:
    """Return a column, or None where every value is the default."""
    column = tuple(values)
    return None if all(value == default for value in column) else column


def query_len_columns(column: Sequence[int | None]) -> dict[str, Any]:
    """Return the query lengths of a row, once where they are the same."""
    return {"query_len": column[0]} if len(set(column)) == 1 else {"query_lens": tuple(column)}
