"""The pictures of a bench: what a step, a preparation, a draft chain and a capture take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from capture_planner.bench.record import BenchReport
from capture_planner.modes import GraphMode, Role
from capture_planner.report.drawing import COLORS, INK, MAX_POINTS, chart, charts_of, draw_marks, new_figure
from capture_planner.report.writing import Chart

GRAPH, STEP, EAGER = COLORS[GraphMode.FULL], COLORS[GraphMode.PIECEWISE], COLORS[GraphMode.NONE]

Series = tuple[str, str, str]
"""A label, a colour, and the property of a row that is the height of its bar."""


def bench_charts(report: BenchReport) -> tuple[Chart, ...]:
    """Return the pictures of a bench; those that would be empty are left out."""
    return charts_of(report, (_decode, _preparation, _chain, _capture))


def _bars(plot: Axes, rows: Sequence[Any], series: Sequence[Series], title: str = "") -> None:
    """Draw a group of bars for each row; a height that was not measured leaves its place free."""
    width = 0.8 / len(series)
    for number, (label, color, name) in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * width
        measured = ((index, getattr(row, name)) for index, row in enumerate(rows))
        points = [(index + shift, height) for index, height in measured if height is not None]
        if points:
            places, heights = zip(*points, strict=True)
            plot.bar(places, heights, width * 0.92, color=color, label=label, linewidth=0)
    plot.set_xticks(range(len(rows)), labels=[str(row.num_reqs) for row in rows])
    plot.set_xlim(-0.6, max(len(rows), 3) - 0.4)
    plot.set_xlabel("requests")
    plot.set_title(title, loc="left")
    plot.yaxis.set_major_formatter(EngFormatter(unit="s"))
    # Room for the legend above the bars.
    plot.set_ylim(0, plot.get_ylim()[1] * 1.18)
    plot.grid(False, axis="x")
    plot.legend(loc="upper left", ncols=len(series))


def _decode(report: BenchReport) -> Chart | None:
    if not report.decode:
        return None
    figure, ((left, right),) = new_figure(1, 2, 2.8)
    graphed: list[Series] = [("bare graphs", GRAPH, "bare"), ("step", STEP, "step")]
    _bars(left, report.decode, graphed, "step and its graphs")
    _bars(right, report.decode, [*graphed, ("eager step", EAGER, "eager")], "and eager")
    return chart(
        figure,
        "decode",
        alt="Bars by number of requests: the bare graphs of a decode step, the step, and the eager step.",
        caption="What stands above the bare graphs is all that the runner adds to them: schedule, preparation, "
        "tokens back to the host. What an eager step takes beyond them is what graphs are for.",
        modes=(),
    )


def _preparation(report: BenchReport) -> Chart | None:
    roles = [role for role in Role if any(row.role is role for row in report.preparation)]
    if not roles:
        return None
    figure, axes = new_figure(1, len(roles), 2.6)
    for plot, role in zip(axes[0], roles, strict=True):
        rows = [row for row in report.preparation if row.role is role]
        series: list[Series] = [("a step", STEP, "step"), ("all anew", GRAPH, "stage")]
        if any(row.stock is not None for row in rows):
            series.append(("stock call", EAGER, "stock"))
        _bars(plot, rows, series, role.value)
    return chart(
        figure,
        "preparation",
        alt="Bars by role and number of requests: host time of a step's preparation, and anew.",
        caption="Host time before a replay. It should not grow with requests faster than the graph does: on a GPU "
        "it hides behind the graph before it, as long as it is shorter.",
        modes=(),
    )


def _chain(report: BenchReport) -> Chart | None:
    if not report.chain:
        return None
    figure, ((plot,),) = new_figure(1, 1, 2.6)
    series = [("one graph", GRAPH, "fused"), ("single steps", STEP, "single"), ("eager", EAGER, "eager")]
    _bars(plot, report.chain, series)
    return chart(
        figure,
        "chain",
        alt="Bars by number of requests: a draft chain as one graph, as single steps replayed, and eager.",
        caption="The draft decodes of one step. A chain in one graph saves a launch for each of them but the first.",
        modes=(),
    )


def _capture(report: BenchReport) -> Chart | None:
    if report.capture is None or not report.capture.captured:
        return None
    figure, ((plot,),) = new_figure(1, 1, 2.6)
    for mode in (GraphMode.PIECEWISE, GraphMode.FULL):
        graphs = [graph for graph in report.capture.captured if graph.entry.mode is mode]
        graphs = graphs[:: -(-len(graphs) // MAX_POINTS) or 1]
        draw_marks(plot, [(graph.entry.num_tokens, graph.seconds) for graph in graphs], mode, 4)
    reference = report.capture.bare
    if reference is not None:
        plot.axhline(reference.seconds / report.capture.graphs, color=INK, linestyle=":", linewidth=1)
    plot.set_xscale("log", base=2)
    plot.xaxis.set_major_formatter("{x:g}")
    plot.set_xlabel("tokens of the graph")
    plot.set_ylabel("warm-up and capture")
    plot.yaxis.set_major_formatter(EngFormatter(unit="s"))
    plot.set_ylim(bottom=0)
    return chart(
        figure,
        "capture",
        alt="Scatter plot: seconds to warm up and capture each graph by its tokens.",
        caption="Each mark is a graph. Dotted, where there is a GPU: the mean of a bare torch.cuda.graph loop.",
        modes=(GraphMode.FULL, GraphMode.PIECEWISE),
    )
