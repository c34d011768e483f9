"""The charts of a run of the conformance suite: what was covered."""

from __future__ import annotations

from capture_planner.modes import Role
from capture_planner.report.conformance_record import Conformance
from capture_planner.report.plots import MODE_COLORS, Chart, Mark, Plot, PlotAxis, Series, drawn
from capture_planner.report.writing import MODES, ran


def conformance_charts(report: Conformance) -> tuple[Chart, ...]:
    """Return the charts; those that would be empty are left out."""
    return drawn(report, (_forwards, _steps))


def _forwards(report: Conformance) -> Chart | None:
    counts = {(role, mode): report.log.forwards[f"{role.value} {mode.value}"] for role in Role for mode in MODES}
    roles = [role for role in Role if any(counts[role, mode] for mode in MODES)]
    if not roles:
        return None
    plot = Plot(
        title="Forwards by role and mode",
        x=PlotAxis("role", "name"),
        y=PlotAxis("forwards", "number"),
        series=[
            Series(ran(mode), Mark.ROWS, [(role.value, counts[role, mode]) for role in roles], color=MODE_COLORS[mode])
            for mode in MODES
            if any(counts[role, mode] for role in roles)
        ],
    )
    return Chart(
        name="forwards",
        plots=(plot,),
        caption="What was checked, by what ran it. A short bar of a mode that matters to you means that little was "
        "tried of it: more examples, or a shape of your own, try more.",
    )


def _steps(report: Conformance) -> Chart | None:
    steps = sorted(report.log.steps.items(), key=lambda step: (-step[1], step[0]))
    if not steps:
        return None
    plot = Plot(
        title="Steps by kind",
        x=PlotAxis("kind of step", "name"),
        y=PlotAxis("steps", "number"),
        series=(Series("steps", Mark.ROWS, steps, color="ink"),),
    )
    return Chart(
        name="steps",
        plots=(plot,),
        caption="What happened between and in the forwards. A step serves a whole batch, or requests to their end.",
    )
