"""What a report is: sections of sentences and tables, which ``terminal`` and ``page`` show; and numbers for people.

A report is data: it imports neither rich nor jinja2. Its JSON is that of the value it is about (``plain``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import attrs

from capture_planner.modes import GraphMode
from capture_planner.records.batch import Entry
from capture_planner.report.plots import Chart

Tone = Literal["good", "bad", "warning", "note", "strong", "verbatim"] | GraphMode
"""What a text is, which decides how it looks: a verdict; a warning; a remark below a table; a heading; a line for a
shell or a program, which is never broken; or the colour of a mode."""

MODES = (GraphMode.FULL, GraphMode.PIECEWISE, GraphMode.NONE)
"""What serves a forward, best first."""

CAPTURED_MODES = MODES[:-1]
"""The modes of a captured graph."""


class TonedText(str):
    """Text with a tone; it says the same where there are no colours."""

    tone: Tone

    def __new__(cls, text: str, tone: Tone) -> TonedText:
        toned = super().__new__(cls, text)
        toned.tone = tone
        return toned


Cell = str | GraphMode
"""Text, or the mode that a forward ran in, which is written as ``ran`` writes it."""


@attrs.frozen(kw_only=True)
class Grid:
    """A table of cells, which are text or a mode; numbers stand right."""

    columns: tuple[str, ...]
    right: frozenset[str] = frozenset()
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(
        cls,
        columns: Sequence[str],
        rows: Iterable[Iterable[Cell]],
        *,
        text: int | None = None,
        right: Iterable[str] = (),
    ) -> Grid:
        """Return a table.

        :param text: how many columns are text: those after them are numbers. None: ``right`` names the numbers.
        """
        columns = tuple(columns)
        numbers = frozenset(right if text is None else columns[text:])
        return cls(columns=columns, right=numbers, rows=tuple(map(tuple, rows)))

    @classmethod
    def facts(cls, facts: Iterable[tuple[str, str]]) -> Grid:
        """Return names and values, without a head."""
        return cls.of(("", ""), facts)


Part = str | Grid
"""A sentence or a table; an empty sentence is a blank line on a terminal."""


def _shown(parts: Iterable[Part | None]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part is not None and (isinstance(part, str) or part.rows))


@attrs.frozen(kw_only=True)
class Section:
    """A part of a report. One without a title goes on with the section before it."""

    name: str
    """An identifier, unique in the report."""
    title: str = attrs.field(default=attrs.Factory(lambda self: self.name.capitalize(), takes_self=True))
    parts: tuple[Part, ...] = attrs.field(converter=_shown, default=())
    """Without tables that have no row."""

    def texts(self, *tones: Tone | None) -> tuple[str, ...]:
        """Return the sentences of these tones; None: those without one."""
        return tuple(part for part in self.parts if isinstance(part, str) and tone_of(part) in tones)


@attrs.frozen(kw_only=True)
class Report:
    """What a terminal (``terminal.tables``) and a page (``page.page``) show."""

    kind: str
    """As in "report of a run"."""
    title: str
    sections: tuple[Section, ...]
    alert: str | None = None
    """What must not be overlooked, such as an interruption."""
    alert_in_tables: bool = False
    """Whether a terminal shows the alert too: False where a section warns of the same."""
    proved: str | None = None
    """What a check found to hold; pages show it next to the title, and a terminal in its section."""
    assumptions: tuple[str, ...] = ()
    """What the answer rests on; it comes first on a terminal, and after the answer on a page."""
    charts: Callable[[], tuple[Chart, ...]] = tuple
    """Called for a page only."""
    spec: str | None = None
    """Digest of the spec; None where the report is not of one plan."""


def tone_of(shown: Cell | Part) -> Tone | None:
    """Return the tone of a text or a cell; None: it has none."""
    return shown if isinstance(shown, GraphMode) else shown.tone if isinstance(shown, TonedText) else None


def toned(texts: Iterable[str], tone: Tone) -> tuple[TonedText, ...]:
    """Return texts with a tone."""
    return tuple(TonedText(text, tone) for text in texts)


def warned(*texts: str | None) -> tuple[TonedText, ...]:
    """Return texts as warnings; None: there is nothing to warn of."""
    return toned(filter(None, texts), "warning")


def noted(*texts: str | None) -> tuple[TonedText, ...]:
    """Return texts as remarks; None: there is nothing to say."""
    return toned(filter(None, texts), "note")


def mode_cell(mode: GraphMode) -> TonedText:
    """Write the mode of a role in the colour of its decodes."""
    return TonedText(mode.value, mode.decode_mode)


def ran(mode: GraphMode) -> str:
    """Write how a forward ran: without a graph it is eager."""
    return "eager" if mode is GraphMode.NONE else mode.value


def extent(entry: Entry) -> str:
    """Write an entry's size without its mode, for a row that has the mode in a cell of its own."""
    text = str(entry).removeprefix(f"{entry.mode.value} ")
    # The total follows from the requests where each has the same number of tokens.
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


def percent(share: float) -> str:
    """Write a share; nothing that is not all or none is rounded to it."""
    if share in (0, 1):
        return f"{share:.0%}"
    # 0.0% would read as none.
    if 0 < share < 0.001:
        return "<0.1%"
    return ">99.9%" if 0.999 < share < 1 else f"{share:.1%}"
