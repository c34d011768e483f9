"""How reports are written: sections of sentences and grids, and numbers for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from capture_planner.modes import GraphMode
from capture_planner.records.batch import Entry
from capture_planner.report.plots import Chart

Cell = str | GraphMode
"""Text, or the mode that a forward ran in."""

MODES = (GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE)
"""What serves a forward, best first."""

CAPTURED_MODES = MODES[:-1]
"""The modes of a captured graph."""


@attrs.frozen(kw_only=True)
class Grid:
    """A table of cells, which are text or a mode; numbers stand right."""

    columns: tuple[str, ...]
    right: frozenset[str] = frozenset()
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, columns: Sequence[str], rows: Iterable[tuple[Cell, ...]], *, text: int | None = None) -> Grid:
        """Return a table whose columns after the first ``text`` are numbers; None: no column is."""
        columns = tuple(columns)
        return cls(columns=columns, right=frozenset() if text is None else frozenset(columns[text:]), rows=tuple(rows))

    @classmethod
    def facts(cls, facts: Iterable[tuple[str, str]]) -> Grid:
        """Return names and values, without a head."""
        return cls.of(("", ""), facts)


@attrs.frozen(kw_only=True)
class Section:
    """One part of the report: sentences that warn, sentences, a table, and sentences below it."""

    name: str
    title: str = attrs.field(default=attrs.Factory(lambda self: self.name.capitalize(), takes_self=True))
    warnings: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    grid: Grid | None = None
    notes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Report:
    """What a terminal (``terminal.tables``) and a page (``page.page``) show of a run, bench or suite."""

    kind: str
    """As in "report of a run"."""
    title: str
    alert: str | None
    """What must not be overlooked, such as an interruption."""
    alert_in_tables: bool = False
    """Whether a terminal shows the alert too: False where a section warns of the same."""
    sections: tuple[Section, ...]
    charts: Callable[[], tuple[Chart, ...]]
    """Called for a page only."""
    spec: str | None = None
    """Digest of the spec; None where the report is not of one plan."""


def ran(mode: GraphMode) -> str:
    """Write how a forward ran: without a graph it is eager."""
    return "eager" if mode is GraphMode.NONE else mode.value


def extent(entry: Entry) -> str:
    """Write an entry's size without its mode, for a row that has the mode in a cell of its own."""
    text = str(entry).removeprefix(f"{entry.mode.value} ")
    return text if entry.tokens_each is None or entry.num_reqs is None else text.partition(", ")[2]


def seconds(value: float) -> str:
    """Write a time: ``1.50 s``, ``2.3 ms``, ``45.0 us``."""
    if value == 0:
        return "0"
    for unit, scale, digits in (("s", 1, 2), ("ms", 1e-3, 1)):
        if abs(value) >= scale:
            return f"{value / scale:,.{digits}f} {unit}"
    return f"{value / 1e-6:.1f} us"


def size(value: int) -> str:
    """Write bytes: ``0``, ``512 B``, ``3.5 KiB``, ``25.0 MiB``, ``1.25 GiB``."""
    for unit, shift, digits in (("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1)):
        if abs(value) >= 1 << shift:
            return f"{value / (1 << shift):,.{digits}f} {unit}"
    return f"{value} B" if value else "0"


def printable(text: str) -> str:
    """Write a name or sentence on one line, whatever is in it: no control character reaches a terminal."""
    return "".join(char if char.isprintable() else " " if char.isspace() else ascii(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """Write text of several lines, each as ``printable`` does."""
    return "\n".join(map(printable, text.split("\n")))


def percent(share: float) -> str:
    """Write a share; nothing that is not all or none is rounded to it."""
    if share in (0, 1):
        return f"{share:.0%}"
    if 0 < share < 0.001:
        return "<0.1%"
    return ">99.9%" if 0.999 < share < 1 else f"{share:.1%}"
