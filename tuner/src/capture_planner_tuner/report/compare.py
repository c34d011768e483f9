"""Reports of two deployments side by side, and what became of a promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from capture_planner.codec import json_fields, json_of, plain_fields
from capture_planner.records.batch import Kind
from capture_planner.records.text import counted
from capture_planner.report.writing import Cell, Grid, Part, Report, Section, Tone, TonedText, mode_cell
from capture_planner_tuner.journal import PromiseVerdict
from capture_planner_tuner.promises import ClassCheck, PromiseCheck, SideCheck
from capture_planner_tuner.side_by_side import BatchClass, Hole, Pair, Service, SideBySide

MAX_HOLES = 20
"""Holes that are shown; the rest is counted. ``--format json`` has them all."""


def side_by_side_report(compared: SideBySide, promise: tuple[PromiseCheck, str] | None = None) -> Report:
    """Return what each captures, what each serves, and what one alone runs eager.

    :param promise: what became of the promise of B's plan, and what the plan is called: it comes first.
    """
    parts: list[Part] = [] if promise is None else [*_promise(*promise), ""]
    parts += [TonedText(f"{letter}: {name}", "strong") for letter, name in (("A", compared.a), ("B", compared.b))]
    parts += ["", _side_graphs(compared), "", _families(compared)]
    for side, other in (("a", "b"), ("b", "a")):
        holes = [hole for hole in compared.holes if hole.eager == side]
        parts += ["", *_holes(holes, side.upper(), other.upper(), often=compared.from_traffic)]
    if compared.unknown:
        unknown = f"{compared.unknown:,} batches are not counted: the engine that was observed was not asked about them"
        parts += ["", TonedText(unknown, "warning")]
    title = f"{compared.a} and {compared.b}, side by side"
    return Report(kind="comparison", title=title, sections=(Section(name="comparison", title="", parts=parts),))


def _side_graphs(compared: SideBySide) -> Grid:
    rows: list[tuple[Cell, ...]] = []
    for modes in compared.modes:
        rows.append((modes.role, "mode", *("does not run" if m is None else mode_cell(m) for m in (modes.a, modes.b))))
        rows += (
            ("", captured.mode.value, str(captured.a), str(captured.b))
            for captured in compared.graphs
            if captured.role is modes.role
        )
    return Grid.of(("role", "graphs", "A", "B"), rows, text=2)


def _families(compared: SideBySide) -> Grid:
    unit = "steps of the traffic" if compared.from_traffic else "batches"
    rows = []
    for pair in compared.families:
        rows.append((pair.family.role.value, _kind(pair.family), "A", *_figures(pair.a)))
        rows.append(("", "", "B", *_figures(pair.b)))
    return Grid.of(("role", "kind", "", unit, "with a graph", "mean", "worst"), rows, text=3)


def _kind(family: BatchClass) -> str:
    return "mixed" if family.kind is Kind.MIXED else f"decodes of {family.query_len}"


def _figures(service: Service | None) -> tuple[str, ...]:
    if service is None:
        return ("none", "", "", "")
    share = f"{100 * service.coverage:.1f}%"
    padding = (f"{service.mean:.3f}x", f"{service.worst:.2f}x") if service.graphed else ("", "")
    return (f"{service.batches:,}", share, *padding)


def _holes(holes: list[Hole], eager: str, other: str, *, often: bool) -> Iterator[Part]:
    if not holes:
        yield TonedText(f"nothing is eager in {eager} that has a graph in {other}", "good")
        return
    total = sum(hole.batches for hole in holes)
    unit = "step of the traffic" if often else "batch"
    many = f"1 {unit}" if total == 1 else f"{total:,} {'steps of the traffic' if often else 'batches'}"
    yield TonedText(f"{many} eager in {eager} and not in {other}", "warning")
    rows = (
        (
            hole.family.role,
            _kind(hole.family),
            str(hole.first),
            counted(hole.last, "token" if hole.family.kind is Kind.MIXED else "request"),
            str(hole.active_loras) if hole.active_loras else "",
            mode_cell(hole.mode),
            "" if hole.reason is None else hole.reason.value,
        )
        for hole in holes[:MAX_HOLES]
    )
    yield Grid.of(("role", "kind", "from", "to", "LoRA", f"{other} runs", f"{eager} has none for"), rows)
    if len(holes) > MAX_HOLES:
        yield TonedText(f"and {len(holes) - MAX_HOLES} more", "note")


# What became of a promise -----------------------------------------------------------------------

MAX_CLASSES = 16
"""Classes that are shown: those with the most steps. ``--format json`` has them all."""

_TONES: dict[PromiseVerdict, Tone] = {
    PromiseVerdict.KEPT: "good",
    PromiseVerdict.BROKEN: "bad",
    PromiseVerdict.TOO_LITTLE_DATA: "warning",
}

json_fields(SideCheck, "off")
json_fields(ClassCheck, "name", "excess_ms")


def _promise(checked: PromiseCheck, plan: str) -> Iterator[Part]:
    """Yield the verdict on a plan's promise, both sides of it, and the classes of steps."""
    yield TonedText(f"promise {checked.verdict.value.replace('_', ' ')}: {plan}", _TONES[checked.verdict])
    yield f"  {checked.reason}"
    if checked.after is not None:
        yield from ("", _promised_sides(checked))
    if checked.classes:
        yield from ("", _classes(checked))
    if (left := len(checked.classes) - MAX_CLASSES) > 0:
        yield TonedText(f"and {left} more", "note")


def _promised_sides(checked: PromiseCheck) -> Grid:
    rows = [
        (name, *_side(side))
        for name, side in (("B, under the plan", checked.after), ("A, without it", checked.before))
        if side is not None
    ]
    if checked.without_ms is not None:
        rows.append(("B's load without the plan", f"{checked.without_ms:.2f} ms"))
    numbers = ("promised", "measured", "off", "error", "steps", "timed")
    return Grid.of(("mean step, for the load of each", *numbers), rows, text=1)


def _side(side: SideCheck) -> Iterator[str]:
    yield from (f"{side.expected_ms:.2f} ms", f"{side.measured_ms:.2f} ms", f"{side.off:+.1%}")
    yield from (f"{side.error_ms:.2f} ms", f"{side.steps:,}", f"{side.timed:,}")


def _classes(checked: PromiseCheck) -> Grid:
    least = sorted((each.steps for each in checked.classes), reverse=True)[:MAX_CLASSES][-1]
    rows = [
        (
            each.name,
            each.mode,
            f"{each.promised_ms:.2f} ms",
            "" if each.measured_ms is None else f"{each.measured_ms:.2f} ms",
            f"{each.steps:,}",
            f"{each.other_mode:,}" if each.other_mode else "",
        )
        for each in checked.classes
        if each.steps >= least
    ]
    columns = ("steps, under the plan", "runs", "promised", "measured", "steps", "in another mode")
    # Rows are in the promise's order; ties at the limit would make them too many.
    return Grid.of(columns, rows[:MAX_CLASSES], text=2)


# JSON ------------------------------------------------------------------------------------------

json_fields(Service, "coverage")


@json_of(SideBySide)
def _side_by_side(compared: SideBySide) -> dict[str, Any]:
    fields = plain_fields(compared)
    batches = "traffic" if fields.pop("from_traffic") else "admissible"
    return {"a": fields.pop("a"), "b": fields.pop("b"), "batches": batches, **fields}


@json_of(Pair, Hole)
def _of_family(value: Pair | Hole) -> dict[str, Any]:
    fields = plain_fields(value)
    family: dict[str, Any] = fields.pop("family")
    return family | fields
