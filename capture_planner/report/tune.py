"""The report of a tuning: for a terminal, for a page, and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from capture_planner.codec import json_of
from capture_planner.codec.plain import plain, plain_some
from capture_planner.engines.tuning.judgement import SideFigures
from capture_planner.engines.tuning.tune import ParetoPoint, Tuning
from capture_planner.engines.tuning.verdict import LEAST_STEPS, TuneVerdict, subject_of
from capture_planner.modes import Role
from capture_planner.report.tune_charts import tune_charts
from capture_planner.report.writing import Grid, Report, Section, percent

ADVICE = {
    TuneVerdict.CHANGE: "change",
    TuneVerdict.KEEP: "keep what you have",
    TuneVerdict.TOO_LITTLE_DATA: "too little data",
}

_JUDGED = (
    "graphs",
    "objective",
    "mean_step_ms",
    "token_ms",
    "eager_share",
    "memory_mib",
    "seconds",
    "regret",
    "worst_regret",
)


@attrs.frozen(kw_only=True)
class StepCount:
    """How many steps a tuning rests on."""

    chosen: int
    """Steps that sizes are chosen by."""
    judged: int
    """Steps that both sides are judged on."""
    held_out: bool
    """Whether the judged steps came after those that sizes are chosen by, and were not used for that."""


@attrs.frozen(kw_only=True)
class TuneReport:
    """A tuning, and what a reader must know of it."""

    tuning: Tuning
    model: str
    machine: str
    today: str
    """What today is: an engine with its release, or a file."""
    steps: StepCount
    assumptions: tuple[str, ...] = ()
    """What the figures rest on and is not known."""
    notes: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    """The files that were written."""
    commands: tuple[str, ...] = ()
    """What to run next."""


@json_of(TuneReport)
def _json(report: TuneReport) -> dict[str, Any]:
    tuning = report.tuning
    return {
        "verdict": plain(tuning.verdict),
        "reason": tuning.reason,
        "objective": tuning.objective,
        "today": plain(tuning.today),
        "proposed": plain(tuning.proposed),
        "pareto": plain(tuning.pareto),
        "steps": plain_some(report.steps, "chosen", "judged", "held_out") | {"least": LEAST_STEPS},
        "assumptions": list(report.assumptions),
        "notes": list(report.notes),
        "commands": list(report.commands),
    }


@json_of(SideFigures)
def _side(side: SideFigures) -> dict[str, Any]:
    figures = plain_some(side, *_JUDGED) | ({"unknown": side.unknown} if side.unknown else {})
    return {name: _digits(value) for name, value in figures.items()}


@json_of(ParetoPoint)
def _point(point: ParetoPoint) -> dict[str, Any]:
    names = ("graphs", "objective", "mean_step_ms", "memory_mib", "seconds", "within")
    return {name: _digits(value) for name, value in plain_some(point, *names).items()}


def _digits(value: Any) -> Any:
    """Return a figure with six digits, which is more than any is known to."""
    if isinstance(value, dict):
        return {key: _digits(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def tune_report(report: TuneReport) -> Report:
    """Return the report of a tuning for ``terminal.tables`` and ``page.page``."""
    parts = (_verdict, _sides, _pareto, _next)
    return Report(
        kind="tuning",
        title=f"Capture sizes of {report.model} on {report.machine}: {ADVICE[report.tuning.verdict]}",
        alert=None,
        sections=tuple(section for part in parts if (section := part(report)) is not None),
        charts=partial(tune_charts, report.tuning),
        spec=None if report.tuning.plan is None else report.tuning.plan.spec_digest,
    )


def _verdict(report: TuneReport) -> Section:
    tuning, steps = report.tuning, report.steps
    judged = f"judged on the last {steps.judged:,} steps; sizes are chosen by the {steps.chosen:,} before them"
    if not steps.held_out:
        judged = f"chosen by and judged on the same {steps.judged:,} steps: nothing is held out"
    return Section(
        name="verdict",
        title=f"{report.model} on {report.machine}, {report.today}: {ADVICE[tuning.verdict]}",
        warnings=tuple(f"assumed: {each}" for each in report.assumptions),
        lines=(f"{tuning.reason}.", f"{judged}."),
        notes=tuple(f"note: {each}" for each in report.notes),
    )


Row = tuple[str, Callable[[SideFigures], str]]


def _sides(report: TuneReport) -> Section | None:
    today, proposed = report.tuning.today, report.tuning.proposed
    if today is None or proposed is None:
        return None
    objective = report.tuning.objective
    roles = [role for role in Role if role in today.eager_share or role in proposed.eager_share]
    rows: list[Row] = [
        ("time per token", lambda side: _ms(side.token_ms)),
        *([(subject_of(objective), lambda side: _ms(side.objective))] if objective.startswith("p") else []),
        ("mean step", lambda side: _ms(side.mean_step_ms)),
        ("slower than with every size", lambda side: percent(max(side.regret, 0.0))),
        ("at worst", lambda side: percent(max(side.worst_regret, 0.0))),
        ("graphs", lambda side: f"{side.graphs:,}"),
        ("memory of the graphs", lambda side: f"{side.memory_mib:,.0f} MiB"),
        ("start-up for them", lambda side: f"{side.seconds:.1f} s"),
        *((f"eager steps, {role}", partial(_eager, role)) for role in roles),
    ]
    grid = Grid.of(("", "today", "proposed"), [(name, write(today), write(proposed)) for name, write in rows], text=1)
    return Section(name="sides", title="Today and proposed", grid=grid, notes=_noise(report.tuning))


def _eager(role: Role, side: SideFigures) -> str:
    return percent(side.eager_share[role]) if role in side.eager_share else ""


def _noise(tuning: Tuning) -> tuple[str, ...]:
    if tuning.noise is None or tuning.objective != "mean":
        return ()
    noise = tuning.noise
    return (
        f"the difference of two mean steps is known to {_ms(noise.total)}: {_ms(noise.measuring)} from the spread of "
        f"the profile where the two run other graphs, {_ms(noise.sampling)} from the number of steps (95 %).",
    )


def _pareto(report: TuneReport) -> Section | None:
    points = report.tuning.pareto
    if not points:
        return None
    proposed, objective = report.tuning.proposed, report.tuning.objective
    rows = [
        (
            f"{point.graphs:,}",
            *_objective(point, objective),
            _ms(point.mean_step_ms),
            f"{point.memory_mib:,.0f}",
            f"{point.seconds:.1f}",
            "proposed" if proposed and point.graphs == proposed.graphs else "" if point.within else "beyond the bounds",
        )
        for point in points
    ]
    own = () if objective == "mean" else ("at worst" if objective == "regret" else subject_of(objective),)
    columns = ("graphs", *own, "mean step", "MiB", "s", "")
    grid = Grid(columns=columns, right=frozenset(columns[:-1]), rows=tuple(rows))
    return Section(name="pareto", title="What graphs buy", grid=grid)


def _objective(point: ParetoPoint, objective: str) -> tuple[str, ...]:
    """Return the cell of an objective that has a column of its own."""
    if objective == "mean":
        return ()
    return (percent(max(point.objective - 1, 0.0)) if objective == "regret" else _ms(point.objective),)


def _next(report: TuneReport) -> Section | None:
    lines = (*(f"written to {file}" for file in report.written), *report.commands)
    return Section(name="next", title="Next", lines=lines) if lines else None


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.3f} ms"
