"""The charts of a bench: how long a step, a preparation, a draft chain and a capture take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capture_planner.bench.record import BenchReport
from capture_planner.modes import GraphMode, Role
from capture_planner.report.plots import MAX_POINTS, MODE_COLORS, Chart, Color, Mark, Plot, PlotAxis, Series, drawn

Height = tuple[str, Color, str]
"""A name, a colour, and the property of a row that is the height of its bar in seconds."""


def bench_charts(report: BenchReport) -> tuple[Chart, ...]:
    """Return the charts of a bench; those that would be empty are left out."""
    return drawn(report, (_decode, _preparation, _chain, _capture))


def _bars(title: str, rows: Sequence[Any], heights: Sequence[Height]) -> Plot:
    """Return a group of bars for each row; a height that was not measured leaves its place free."""
    series = [
        Series(label, Mark.BARS, [(row.num_reqs, getattr(row, name)) for row in rows], color=color)
        for label, color, name in heights
        if any(getattr(row, name) is not None for row in rows)
    ]
    return Plot(title=title, x=PlotAxis("batch", "requests"), y=PlotAxis("time", "s"), series=series)


def _decode(report: BenchReport) -> Chart | None:
    if not report.decode:
        return None
    graphed: list[Height] = [("bare graphs", "full", "bare"), ("step", "piecewise", "step")]
    return Chart(
        name="decode",
        plots=(
            _bars("A decode step and its graphs", report.decode, graphed),
            _bars("A decode step, graphs and eager", report.decode, [*graphed, ("eager step", "none", "eager")]),
        ),
        caption="What stands above the bare graphs is all that the runner adds to them: schedule, preparation, "
        "tokens back to the host. What an eager step takes beyond them is what graphs are for.",
    )


def _preparation(report: BenchReport) -> Chart:
    heights: list[Height] = [
        ("a step", "piecewise", "step"),
        ("all anew", "full", "stage"),
        ("stock call", "none", "stock"),
    ]
    rows = {role: [row for row in report.preparation if row.role is role] for role in Role}
    plots = [_bars(f"{role.value}: preparation on the host", rows[role], heights) for role in Role if rows[role]]
    return Chart(
        name="preparation",
        plots=plots,
        caption="Host time before a replay. It should not grow with requests faster than the graph does: on a GPU "
        "it hides behind the graph before it, as long as it is shorter.",
    )


def _chain(report: BenchReport) -> Chart | None:
    if not report.chain:
        return None
    heights: list[Height] = [
        ("one graph", "full", "fused"),
        ("single steps", "piecewise", "single"),
        ("eager", "none", "eager"),
    ]
    return Chart(
        name="chain",
        plots=(_bars("Draft decodes of one step", report.chain, heights),),
        caption="The draft decodes of one step. A chain in one graph saves a launch for each of them but the first.",
    )


def _capture(report: BenchReport) -> Chart | None:
    if report.capture is None or not report.capture.captured:
        return None
    series = []
    for mode in (GraphMode.PIECEWISE, GraphMode.FULL):
        graphs = [graph for graph in report.capture.captured if graph.entry.mode is mode]
        points = [(graph.entry.num_tokens, graph.seconds) for graph in graphs[:: -(-len(graphs) // MAX_POINTS) or 1]]
        if points:
            series.append(Series(mode.value, Mark.POINTS, points, color=MODE_COLORS[mode]))
    if report.capture.bare is not None:
        tokens = [graph.entry.num_tokens for graph in report.capture.captured]
        mean = report.capture.bare.seconds / report.capture.graphs
        ends = [(end, mean) for end in (min(tokens), max(tokens))]
        series.append(Series("mean of a bare loop", Mark.LINE, ends, color="ink", dash=":"))
    plot = Plot(
        title="Warm-up and capture of each graph",
        x=PlotAxis("size of the graph", "tokens", log=True),
        y=PlotAxis("time", "s", from_zero=True),
        series=series,
    )
    return Chart(
        name="capture",
        plots=(plot,),
        caption="Each mark is a graph. Dotted, where there is a GPU: the mean of a bare torch.cuda.graph loop.",
    )
