"""The report at a terminal, at any width."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from capture_planner.modes import GraphMode
from capture_planner.report.printable import printable
from capture_planner.report.writing import Cell, Grid, Part, Report, Section, Tone, ran, tone_of

_STYLES: dict[Tone | None, str] = {
    "good": "green",
    "bad": "bold red",
    "warning": "yellow",
    "strong": "bold",
    GraphMode.FULL: "green",
    GraphMode.PIECEWISE: "cyan",
    GraphMode.NONE: "yellow",
}


def tables(report: Report) -> RenderableType:
    """Return the assumptions and the sections of a report."""
    parts: list[RenderableType] = [_text(f"assumption: {each}", "yellow") for each in report.assumptions]
    if report.alert is not None and report.alert_in_tables:
        parts += [_text(report.alert, "bold red reverse"), Text("")]
    for number, section in enumerate(report.sections):
        parts += _section(section, is_first=number == 0)
    return Group(*parts)


def _section(section: Section, *, is_first: bool) -> Iterator[RenderableType]:
    if section.title:
        yield from [] if is_first else [Text("")]
        yield from (_text(line, "bold" if is_first else "bold underline") for line in section.title.split("\n"))
    for part in section.parts:
        shown = _part(part)
        # Padding would cut off a line that must not be broken.
        yield Padding(shown, (0, 0, 0, 2)) if section.title and tone_of(part) != "verbatim" else shown


def _part(part: Part) -> RenderableType:
    if isinstance(part, Grid):
        return _table(part)
    text = _cell(part)
    if tone_of(part) == "verbatim":
        # A broken command cannot be copied to a shell.
        text.no_wrap, text.overflow = True, "ignore"
    return text


def _table(grid: Grid) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    # Facts have a name in the first column of each row, and no heads.
    table.show_header = any(grid.columns)
    for column in grid.columns:
        table.add_column(column, justify="right" if column in grid.right else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(cell: Cell) -> Text:
    return _text(ran(cell) if isinstance(cell, GraphMode) else cell, _STYLES.get(tone_of(cell), ""))


def _text(text: str, style: str = "") -> Text:
    # Not a str, which rich would read as markup: a name may have square brackets.
    return Text(printable(text), style=style)
