"""Reports for people at a terminal, at any width: the parts that all of them share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from capture_planner.modes import GraphMode
from capture_planner.report.writing import Grid, Report, Section, printable, ran

_COLORS = {GraphMode.FULL: "green", GraphMode.PIECEWISE: "cyan", GraphMode.NONE: "yellow"}


def table_of(*columns: str, right: Iterable[str] = (), rows: Iterable[Iterable[str | Text]] = ()) -> Table:
    """Return a table without lines; ``right`` names the columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.show_header = any(columns)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def mode_text(mode: GraphMode) -> Text:
    """Write a mode in its colour; the word says it all where there are no colours."""
    return Text(mode.value, style=_COLORS.get(mode.decode_mode, ""))


def ran_text(mode: GraphMode) -> Text:
    """Write how a batch runs, in the colour of the mode: NONE is eager."""
    return Text(ran(mode), style=_COLORS.get(mode, ""))


def tables(report: Report) -> RenderableType:
    """Return the sections of a report; the first one is the title."""
    parts: list[RenderableType] = []
    if report.alert is not None and report.alert_in_tables:
        parts += [_text(report.alert, style="bold red reverse"), Text("")]
    for number, section in enumerate(report.sections):
        parts += [Text("")] if number else []
        parts.append(_text(section.title, style="bold" if number == 0 else "bold underline"))
        parts += [Padding(part, (0, 0, 0, 2)) for part in _parts(section)]
    return Group(*parts)


def _parts(section: Section) -> Iterator[RenderableType]:
    yield from (_text(warning, style="yellow") for warning in section.warnings)
    yield from map(_text, section.lines)
    if section.grid is not None and section.grid.rows:
        yield _table(section.grid)
    yield from map(_text, section.notes)


def _table(grid: Grid) -> Table:
    rows = ((ran_text(cell) if isinstance(cell, GraphMode) else _text(cell) for cell in row) for row in grid.rows)
    return table_of(*grid.columns, right=grid.right, rows=rows)


def _text(text: str, style: str = "") -> Text:
    # Not a str, which rich would read as markup: a name may have square brackets.
    return Text(printable(text), style=style)
