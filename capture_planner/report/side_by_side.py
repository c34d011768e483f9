"""Two deployments side by side, as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capture_planner.analysis.arrivals import STEP_SECONDS
from capture_planner.engines.side_by_side import BatchClass, Hole, Service, SideBySide
from capture_planner.modes import GraphMode
from capture_planner.records.batch import Kind
from capture_planner.records.text import counted
from capture_planner.report.terminal import mode_text, table_of

MAX_HOLES = 20
"""Holes that are shown; the rest is counted. ``--format json`` has them all."""


def side_by_side_table(compared: SideBySide) -> RenderableType:
    """What each captures, what each serves, and what one alone runs eager."""
    parts: list[RenderableType] = [Text(f"A: {compared.a}\nB: {compared.b}", style="bold")]
    parts += [Text(""), _graphs(compared), Text(""), _families(compared)]
    for side, other in (("a", "b"), ("b", "a")):
        holes = [hole for hole in compared.holes if hole.eager == side]
        parts += [Text(""), *_holes(holes, side.upper(), other.upper(), often=compared.from_traffic)]
    if compared.unknown:
        says = f"{compared.unknown:,} batches are not counted: the engine that was observed was not asked about them"
        parts += [Text(""), Text(says, style="yellow")]
    if compared.from_traffic:
        pace = f"of the trace: each step takes {STEP_SECONDS * 1000:.0f} ms, and no draft is accepted"
        parts += [Text(""), Text(pace, style="dim")]
    return Group(*parts)


def _graphs(compared: SideBySide) -> Table:
    table = table_of("role", "graphs", "A", "B", right=("A", "B"))
    for modes in compared.modes:
        table.add_row(modes.role, "mode", _mode(modes.a), _mode(modes.b))
        for captured in compared.graphs:
            if captured.role is modes.role:
                table.add_row("", captured.mode.value, str(captured.a), str(captured.b))
    return table


def _mode(mode: GraphMode | None) -> Text:
    return Text("does not run") if mode is None else mode_text(mode)


def _families(compared: SideBySide) -> Table:
    unit = "steps of the trace" if compared.from_traffic else "batches"
    figures = (unit, "with a graph", "mean", "worst")
    table = table_of("role", "kind", "", *figures, right=figures)
    for pair in compared.families:
        table.add_row(pair.family.role.value, _kind(pair.family), "A", *_figures(pair.a))
        table.add_row("", "", "B", *_figures(pair.b))
    return table


def _kind(family: BatchClass) -> str:
    return "mixed" if family.kind is Kind.MIXED else f"decodes of {family.query_len}"


def _figures(service: Service | None) -> tuple[str, ...]:
    if service is None:
        return ("none", "", "", "")
    share = f"{100 * service.coverage:.1f}%"
    padding = (f"{service.mean:.3f}x", f"{service.worst:.2f}x") if service.graphed else ("", "")
    return (f"{service.batches:,}", share, *padding)


def _holes(holes: list[Hole], eager: str, other: str, *, often: bool) -> Iterable[RenderableType]:
    if not holes:
        yield Text(f"nothing is eager in {eager} that has a graph in {other}", style="green")
        return
    total = sum(hole.batches for hole in holes)
    unit = "step of the trace" if often else "batch"
    many = f"1 {unit}" if total == 1 else f"{total:,} {'steps of the trace' if often else 'batches'}"
    yield Text(f"{many} eager in {eager} and not in {other}", style="yellow")
    rows = (
        (
            hole.family.role,
            _kind(hole.family),
            str(hole.first),
            counted(hole.last, "token" if hole.family.kind is Kind.MIXED else "request"),
            str(hole.active_loras) if hole.active_loras else "",
            mode_text(hole.mode),
            "" if hole.reason is None else hole.reason.value,
        )
        for hole in holes[:MAX_HOLES]
    )
    yield table_of("role", "kind", "from", "to", "LoRA", f"{other} runs", f"{eager} has none for", rows=rows)
    if len(holes) > MAX_HOLES:
        yield Text(f"and {len(holes) - MAX_HOLES} more", style="dim")
