"""The report of a run as tables for people and as data for programs; ``page`` shows the same sections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from capture_planner.modes import GraphMode
from capture_planner.records.batch import Entry
from capture_planner.report.sections import alert, sections
from capture_planner.report.summary import RunSummary, Used, summary
from capture_planner.report.tables import entry_data, mode_text
from capture_planner.report.writing import Grid, Section, printable
from capture_planner.runtime.ledger import RunReport

__all__ = ["run_data", "run_tables", "summary"]


def run_tables(report: RunReport) -> RenderableType:
    """The report of a run for people, at any width."""
    numbers = summary(report)
    parts: list[RenderableType] = []
    warning = alert(report, numbers)
    if warning is not None:
        parts += [_text(warning, style="bold red reverse"), Text("")]
    return Group(*parts, section_tables(sections(report, numbers)))


def section_tables(found: Iterable[Section]) -> RenderableType:
    """Return sections for people, whatever they are of; the first one is the title."""
    parts: list[RenderableType] = []
    for number, section in enumerate(found):
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


def _text(text: str, style: str = "") -> Text:
    # Not a str, which rich would read as markup: a name may stand in square brackets.
    return Text(printable(text), style=style)


def _table(grid: Grid) -> Table:
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(grid.columns)
    )
    for column in grid.columns:
        table.add_column(column, justify="right" if column in grid.right else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*(mode_text(cell) if isinstance(cell, GraphMode) else _text(cell) for cell in row))
    return table


def run_data(report: RunReport) -> dict[str, Any]:
    """Return the report of a run as plain data, for ``--format json``. Seconds, bytes, shares from 0 to 1.

    ``model``, ``environment``, ``spec`` (digest), ``backends``, ``host``, ``interrupted``: what ran.
    ``captured``: totals, ``by`` role and mode, and all ``entries``, each with the forwards that it
    served; a graph that was dropped has ``reason`` and ``says``. ``memory``: what the run holds, and the
    device's ``accounts`` with their share ``apart``, null where graphs are recorded. ``served_from``: by role, with
    ``modes``. ``fallbacks``: eager forwards by role, reason and shape. ``acceptance``: null without a
    drafter. ``comparison``: what was compared with eager forwards, and the first ``difference``; null
    where nothing was to be. ``latency``: percentiles, each null where nothing was measured. ``throughput``. Then a row
    each in ``steps``, ``forwards`` and ``requests``, which have the tokens that were generated.
    """
    numbers = summary(report)
    return {
        "model": report.model,
        "environment": report.plan.environment.name,
        "spec": report.plan.spec_digest,
        "backends": dict(report.backends),
        "host": dict(report.host),
        "interrupted": report.interrupted,
        "captured": _captured_data(report, numbers),
        "memory": {
            "weights": report.weights,
            "kv_cache": report.kv_cache,
            "buffers": report.buffers,
            "workspaces": report.workspaces,
            "accounts": numbers.accounts
            and _record(numbers.accounts)
            | {"unexplained": numbers.accounts.unexplained, "apart": numbers.accounts.apart},
            "later": numbers.later,
        },
        "served_from": [
            _record(role)
            | {
                "modes": [
                    _record(mode)
                    | {"token_padding": mode.token_padding, "request_padding": mode.request_padding}
                    for mode in role.modes
                ]
            }
            for role in numbers.served_from
        ],
        "fallbacks": _records(numbers.fallbacks),
        "acceptance": numbers.acceptance
        and _record(numbers.acceptance)
        | {"rate": numbers.acceptance.rate, "length": numbers.acceptance.length},
        "latency": _record(numbers.latency),
        "throughput": {
            "seconds": report.serve_seconds,
            "output_tokens": numbers.output_tokens,
            "tokens_per_second": numbers.tokens_per_second,
            "finished": numbers.finished,
            "cut_off": numbers.cut_off,
        },
        "comparison": report.comparison and _record(report.comparison),
        "steps": _records(report.steps),
        "forwards": [_record(forward) | {"mode": forward.mode.value} for forward in report.forwards],
        "requests": _records(report.served),
    }


def _captured_data(report: RunReport, numbers: RunSummary) -> dict[str, Any]:
    dropped = (Used(graph=graph, forwards=0) for graph in numbers.dropped)
    return {
        "planned": numbers.planned,
        "graphs": len(numbers.graphs),
        "dropped": len(numbers.dropped),
        "unused": len(numbers.unused),
        "seconds": report.capture_seconds,
        "memory": sum(kind.memory for kind in numbers.captured),
        "alone": sum(kind.alone for kind in numbers.captured),
        "driver": sum(kind.driver for kind in numbers.captured),
        "buffers": report.buffers,
        "kv_cache": report.kv_cache,
        "by": _records(numbers.captured),
        "entries": [
            {
                "role": used.graph.role,
                "entry": entry_data(used.graph.entry),
                "seconds": used.graph.seconds,
                "memory": used.graph.memory,
                "alone": used.graph.alone,
                "driver": used.graph.driver,
                "readings": used.graph.readings and _records(used.graph.readings),
                "forwards": used.forwards,
                "reason": used.graph.waiver and used.graph.waiver.reason,
                "says": used.graph.waiver and used.graph.waiver.message,
            }
            for used in (*numbers.graphs, *dropped)
        ],
    }


def _records(values: Iterable[attrs.AttrsInstance]) -> list[dict[str, Any]]:
    return [_record(value) for value in values]


def _record(value: Any) -> dict[str, Any]:
    return {name: _plain(getattr(value, name)) for name in attrs.fields_dict(type(value))}


def _plain(value: Any) -> Any:
    if isinstance(value, Entry):
        return entry_data(value)
    if isinstance(value, GraphMode):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return _record(value) if attrs.has(type(value)) else value
