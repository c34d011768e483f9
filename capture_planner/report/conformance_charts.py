"""The pictures of a run of the conformance suite: what was covered."""

from __future__ import annotations

from capture_planner.modes import GraphMode, Role
from capture_planner.report.conformance import Conformance
from capture_planner.report.drawing import COLORS, INK, Chart, as_svg, drawn, new_figure
from capture_planner.report.summary import MODES


def conformance_charts(report: Conformance) -> tuple[Chart, ...]:
    """Return the pictures; those that would be empty are left out."""
    return drawn(report, (_forwards, _steps))


def _forwards(report: Conformance) -> Chart | None:
    counts = {
        (role, mode): report.log.forwards[f"{role.value} {mode.value}"] for role in Role for mode in MODES
    }
    roles = [role for role in Role if any(counts[role, mode] for mode in MODES)]
    if not roles:
        return None
    figure, axes = new_figure(1, 1, 0.7 + 0.45 * len(roles))
    plot = axes[0][0]
    left = [0] * len(roles)
    shown: list[GraphMode] = []
    for mode in MODES:
        widths = [counts[role, mode] for role in roles]
        if any(widths):
            shown.append(mode)
            plot.barh(range(len(roles)), widths, 0.7, left=left, color=COLORS[mode], linewidth=0)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    plot.set_yticks(range(len(roles)), labels=[role.value for role in roles])
    plot.invert_yaxis()
    plot.set_xlabel("forwards")
    plot.grid(False, axis="y")
    return Chart(
        name="forwards",
        section="forwards",
        svg=as_svg(figure, "forwards"),
        alt="Bars by role: how many forwards ran from whole graphs, from graphs in pieces, and eager.",
        caption="What was checked, by what ran it. A short bar of a mode that matters to you means that little was "
        "tried of it: more examples, or a shape of your own, try more.",
        modes=tuple(shown),
    )


def _steps(report: Conformance) -> Chart | None:
    steps = sorted(report.log.steps.items(), key=lambda step: (-step[1], step[0]))
    if not steps:
        return None
    figure, axes = new_figure(1, 1, 0.7 + 0.3 * len(steps))
    plot = axes[0][0]
    plot.barh(range(len(steps)), [count for _, count in steps], 0.7, color=INK, linewidth=0)
    plot.set_yticks(range(len(steps)), labels=[name for name, _ in steps])
    plot.invert_yaxis()
    plot.set_xlabel("steps")
    plot.grid(False, axis="y")
    return Chart(
        name="steps",
        section="steps",
        svg=as_svg(figure, "steps"),
        alt="Bars: how many steps of each kind were done.",
        caption="What happened between and in the forwards. A step serves a whole batch, or requests to their end.",
        modes=(),
    )
