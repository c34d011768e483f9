"""The pictures of a run of the conformance suite: what was covered."""

from __future__ import annotations

from capture_planner.modes import Role
from capture_planner.report.conformance_record import Conformance
from capture_planner.report.drawing import COLORS, INK, chart, charts_of, draw_rows, new_figure
from capture_planner.report.writing import MODES, Chart


def conformance_charts(report: Conformance) -> tuple[Chart, ...]:
    """Return the pictures; those that would be empty are left out."""
    return charts_of(report, (_forwards, _steps))


def _forwards(report: Conformance) -> Chart | None:
    counts = {(role, mode): report.log.forwards[f"{role.value} {mode.value}"] for role in Role for mode in MODES}
    roles = [role for role in Role if any(counts[role, mode] for mode in MODES)]
    if not roles:
        return None
    figure, axes = new_figure(1, 1, 0.7 + 0.45 * len(roles))
    used_modes = tuple(mode for mode in MODES if any(counts[role, mode] for role in roles))
    parts = [(COLORS[mode], [counts[role, mode] for role in roles]) for mode in used_modes]
    draw_rows(axes[0][0], [role.value for role in roles], parts, "forwards")
    return chart(
        figure,
        "forwards",
        alt="Bars by role: how many forwards ran from whole graphs, from graphs in pieces, and eager.",
        caption="What was checked, by what ran it. A short bar of a mode that matters to you means that little was "
        "tried of it: more examples, or a shape of your own, try more.",
        modes=used_modes,
    )


def _steps(report: Conformance) -> Chart | None:
    steps = sorted(report.log.steps.items(), key=lambda step: (-step[1], step[0]))
    if not steps:
        return None
    figure, axes = new_figure(1, 1, 0.7 + 0.3 * len(steps))
    names, times = zip(*steps, strict=True)
    draw_rows(axes[0][0], names, [(INK, times)], "steps")
    return chart(
        figure,
        "steps",
        alt="Bars: how many steps of each kind were done.",
        caption="What happened between and in the forwards. A step serves a whole batch, or requests to their end.",
        modes=(),
    )
