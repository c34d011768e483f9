"""The pictures of a run: what was captured, what served the batches, and what that took.

Few points stand for many: however long the run, no series has more than MAX_POINTS.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

import capture_planner.report.drawing as drawing
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner.report.summary import first_token_times, nearest_rank, padding, per_token_times, size
from capture_planner.report.writing import CAPTURED_MODES, MODES, Chart
from capture_planner.runtime.ledger import Forward, GraphCapture, RunReport

_DASHES = {Role.TARGET: "-", Role.DRAFT_PREFILL: "--", Role.DRAFT_DECODE: ":"}


def charts(report: RunReport) -> tuple[Chart, ...]:
    """Return the pictures of a run; those that would be empty are left out."""
    return drawing.charts_of(report, (_memory, _batches, _paddings, _steps, _acceptance, _latency))


_AXES = ("tokens", "requests")


def _extents(forward: Forward, axis: str) -> tuple[int, int]:
    if axis == "tokens":
        return forward.num_tokens, forward.num_tokens + forward.padded_tokens
    return forward.num_reqs, forward.num_reqs + forward.padded_reqs


def _ladders(graphs: Iterable[GraphCapture], axis: str) -> list[tuple[GraphMode, list[int]]]:
    """Return the ascending sizes of each mode and query length."""
    ladders: dict[tuple[GraphMode, int | None], set[int]] = {}
    for graph in graphs:
        extent = graph.entry.num_tokens if axis == "tokens" else graph.entry.num_reqs
        if extent is not None:
            ladders.setdefault((graph.entry.mode, graph.entry.query_len), set()).add(extent)
    return [(mode, sorted(sizes)) for (mode, _), sizes in ladders.items()]


def _batches(report: RunReport) -> Chart | None:
    roles = [role for role in Role if any(forward.role is role for forward in report.forwards)]
    if not roles:
        return None
    figure, axes = drawing.new_figure(2, len(roles), 3.0)
    for row, axis in zip(axes, _AXES, strict=True):
        for plot, role in zip(row, roles, strict=True):
            graphs = [graph for graph in report.captured if graph.role is role and graph.waiver is None]
            _scatter(plot, [forward for forward in report.forwards if forward.role is role], graphs, axis)
            plot.set_title(f"{role}, {axis}", loc="left")
            plot.set_xlabel(f"{axis} of the batch")
        row[0].set_ylabel(f"{axis} computed")
    return drawing.chart(
        figure,
        "batches",
        section="served",
        alt="Scatter plots by role: the real extent of each batch against the extent that was computed.",
        caption="Each mark is a batch shape, larger if it was more frequent: its real extent, and the extent of "
        "the graph that served it. The stairs are the captured sizes; the height above the dotted diagonal "
        "is padding. Diamonds on the diagonal ran eager: look for many of them at one extent, and for wide "
        "stairs where the marks are dense. PIECEWISE graphs do not pad requests.",
    )


def _scatter(plot: Axes, forwards: Sequence[Forward], graphs: Sequence[GraphCapture], axis: str) -> None:
    top = max(_extents(forward, axis)[1] for forward in forwards)
    for mode, sizes in _ladders(graphs, axis):
        sizes = sizes[:: -(-len(sizes) // drawing.MAX_POINTS)] + sizes[-1:]
        plot.step([0, *sizes], [sizes[0], *sizes], where="pre", color=drawing.COLORS[mode], linewidth=0.7, alpha=0.7)
        top = max(top, sizes[-1])
    plot.plot([0, top], [0, top], ":", color=drawing.INK, linewidth=0.7)
    for mode in MODES:
        counts: Counter[tuple[int, int]] = Counter()
        for forward in forwards:
            if forward.mode is mode:
                counts[_extents(forward, axis)] += forward.repeats
        points = drawing.thinned(counts)
        most = max((count for _, count in points), default=1)
        for level, marker_size in enumerate((2.5, 3.5, 5.0)):
            # A third of the most on a logarithmic scale: counts differ by orders of magnitude.
            some = [at for at, n in points if min(2, int(3 * math.log(n + 1) / math.log(most + 2))) == level]
            drawing.draw_marks(plot, some, mode, marker_size)
    _scale(plot, sorted(_extents(forward, axis)[1] for forward in forwards))


def _scale(plot: Axes, extents: Sequence[int]) -> None:
    """Fit both axes to the ascending extents; logarithmic where few prompts dwarf many decodes."""
    low, high = extents[0], extents[-1]
    if high > 8 * max(1, extents[len(extents) // 2]):
        ticks = [1 << power for power in range(high.bit_length() + 1)]
        ticks = ticks[:: 1 + len(ticks) // 8]
        for scale, place in ((plot.set_xscale, plot.set_xticks), (plot.set_yscale, plot.set_yticks)):
            # Not plain log: an idle rank has batches of 0.
            scale("symlog", base=2, linthresh=1)
            place(ticks, labels=map(str, ticks))
        plot.minorticks_off()
        limits = (0.8 * low, 1.2 * high + 1)
    else:
        plot.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        plot.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        margin = 0.04 * (high - low) + 0.5
        limits = (low - margin, high + margin)
    plot.set_xlim(limits)
    plot.set_ylim(limits)


def _paddings(report: RunReport) -> Chart | None:
    replays = [forward for forward in report.forwards if forward.entry is not None]
    if not replays:
        return None
    figure, axes = drawing.new_figure(1, 2, 2.6)
    for plot, axis in zip(axes[0], _AXES, strict=True):
        for role, mode in product(Role, CAPTURED_MODES):
            shares = [
                padding(real, computed - real)
                for forward in replays
                if forward.role is role and forward.mode is mode
                for real, computed in (_extents(forward, axis),)
                for _ in range(forward.repeats)
            ]
            if shares and not (axis == "requests" and mode is GraphMode.PIECEWISE):
                drawing.draw_cumulative(plot, shares, drawing.COLORS[mode], _DASHES[role], f"{role} {mode.value}")
        plot.set_title(f"padding of {axis}", loc="left")
        plot.set_xlabel(f"padded share of the computed {axis}, at most")
        drawing.in_percent(plot.xaxis)
        # Nothing padded is a line at 0, which must not hide in the axis.
        right = max(0.05, plot.get_xlim()[1])
        plot.set_xlim(-0.02 * right, right)
        if plot.get_legend_handles_labels()[0]:
            plot.legend(loc="lower right")
    axes[0][0].set_ylabel("forwards served by a graph")
    return drawing.chart(
        figure,
        "padding",
        section="served",
        alt="Cumulative share of the forwards by their share of padded tokens, and of padded requests.",
        caption="How many of the forwards had at most so much padding. A curve that rises at once is good; "
        "one that rises late asks for sizes nearer to the batches that came.",
        modes=CAPTURED_MODES,
    )


def _memory(report: RunReport) -> Chart | None:
    captured = [graph for graph in report.captured if graph.waiver is None]
    by_kind = {kind: [g for g in captured if (g.role, g.entry.mode) == kind] for kind in product(Role, CAPTURED_MODES)}
    kinds = [(role, mode, graphs) for (role, mode), graphs in by_kind.items() if graphs]
    if not kinds:
        return None
    figure, axes = drawing.new_figure(-(-len(kinds) // 2), 2, 1.9)
    plots = [plot for row in axes for plot in row]
    for plot in plots[len(kinds) :]:
        plot.remove()
    for plot, (role, mode, graphs) in zip(plots, kinds, strict=False):
        _bars(plot, mode, sorted(graphs, key=lambda graph: size(graph.entry)))
        extent = "requests" if all(graph.entry.query_len for graph in graphs) else "tokens"
        plot.set_title(f"{role} {mode.value}, by {extent}", loc="left")
    return drawing.chart(
        figure,
        "memory",
        section="captured",
        alt="Bars of the memory of each captured graph by its size, one panel for each role and mode.",
        caption="Pale: what a graph would take in a pool of its own. Solid: what it added to the pool that "
        "it shares. The largest graph of a pool is captured first and pays; the others fit into what it "
        f"left and add nothing, or little. Where there are more than {drawing.MAX_POINTS} graphs, a bar is the mean "
        "of neighbours.",
        modes=CAPTURED_MODES,
    )


def _bars(plot: Axes, mode: GraphMode, graphs: Sequence[GraphCapture]) -> None:
    width = -(-len(graphs) // drawing.MAX_POINTS)
    groups = [graphs[start : start + width] for start in range(0, len(graphs), width)]
    unit, shift = _unit(max(max(graph.alone, graph.memory) for graph in graphs))
    for name, alpha in (("alone", 0.35), ("memory", 1.0)):
        heights = [sum(getattr(graph, name) for graph in group) / len(group) / (1 << shift) for group in groups]
        plot.bar(range(len(groups)), heights, color=drawing.COLORS[mode], alpha=alpha, width=0.8)
    ticks = sorted({round(i * (len(groups) - 1) / 9) for i in range(10)})
    plot.set_xticks(ticks, labels=[_label(groups[i][-1].entry) for i in ticks])
    plot.set_xlim(-0.6, max(len(groups), 8) - 0.4)
    plot.yaxis.set_major_locator(MaxNLocator(4))
    plot.set_ylabel(unit)
    plot.grid(False, axis="x")
    plot.set_ylim(bottom=0)


def _label(entry: Entry) -> str:
    return str(entry.num_reqs if entry.query_len is not None else entry.num_tokens)


def _unit(most: int) -> tuple[str, int]:
    """Return the unit in which that many bytes are written, and its power of two."""
    return next((unit for unit in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if most >= 1 << unit[1]), ("B", 0))


def _steps(report: RunReport) -> Chart | None:
    if not report.steps:
        return None
    figure, ((requests,), (tokens,)) = drawing.new_figure(2, 1, 1.9, sharex=True)
    buckets = drawing.Buckets.of(report.steps)
    for name, label, dash in (("num_reqs", "running", "-"), ("waiting", "waiting", ":")):
        means = buckets.means((step.index, getattr(step, name)) for step in report.steps)
        requests.stairs(means, buckets.edges, baseline=None, color=drawing.INK, linestyle=dash, label=label)
    requests.set_ylabel("requests")
    requests.set_ylim(bottom=0)
    requests.set_xlim(buckets.edges[0], buckets.edges[-1])
    requests.legend(loc="upper right", ncols=2)
    base = [0.0] * len(buckets.steps)
    target = [forward for forward in report.forwards if forward.role is Role.TARGET]
    for mode in MODES:
        means = buckets.means((f.step, f.num_tokens) for f in target if f.mode is mode)
        top = [low + mean for low, mean in zip(base, means, strict=True)]
        tokens.stairs(top, buckets.edges, baseline=base, fill=True, color=drawing.COLORS[mode], linewidth=0)
        base = top
    tokens.set_ylabel("tokens of the target")
    tokens.set_ylim(bottom=0)
    tokens.set_xlabel("step")
    tokens.xaxis.set_major_locator(MaxNLocator(integer=True))
    return drawing.chart(
        figure,
        "steps",
        alt="Over the steps: requests that run and wait; tokens of the target by the mode that served them.",
        caption="Above, the requests that run and those that wait for a place. Below, the tokens that the "
        "target computed, by the mode of its forward: prompts show as peaks, and eager peaks are those that "
        f"no graph covers. Beyond {drawing.MAX_POINTS} steps, means of neighbours are drawn.",
    )


def _acceptance(report: RunReport) -> Chart | None:
    drafted = sum(step.drafted for step in report.steps)
    if not drafted:
        return None
    figure, ((plot,),) = drawing.new_figure(1, 1, 1.9)
    buckets = drawing.Buckets.of(report.steps)
    drafted_means, accepted_means = (
        buckets.means((step.index, getattr(step, name)) for step in report.steps) for name in ("drafted", "accepted")
    )
    rates = [good / all_ if all_ else math.nan for good, all_ in zip(accepted_means, drafted_means, strict=True)]
    plot.stairs(rates, buckets.edges, baseline=None, color=drawing.INK)
    plot.set_xlim(buckets.edges[0], buckets.edges[-1])
    mean = sum(step.accepted for step in report.steps) / drafted
    plot.axhline(mean, color=drawing.INK, linestyle=":", linewidth=1)
    plot.set_ylim(0, 1.03)
    drawing.in_percent(plot.yaxis)
    plot.set_ylabel("accepted of drafted")
    plot.set_xlabel("step")
    plot.xaxis.set_major_locator(MaxNLocator(integer=True))
    return drawing.chart(
        figure,
        "acceptance",
        alt="The share of draft tokens that the target accepted, over the steps, and its mean.",
        caption="The share of draft tokens that the target accepted; dotted, the mean of the run. A gap is a "
        "step that verified none. A lasting fall says that the drafter met text it does not know.",
        modes=(),
    )


def _latency(report: RunReport) -> Chart | None:
    target = [forward for forward in report.forwards if forward.role is Role.TARGET]
    by_mode = [(drawing.COLORS[mode], "-", [f.seconds for f in target if f.mode is mode]) for mode in MODES]
    panels = [
        ("time to first token", "requests", [(drawing.INK, "-", first_token_times(report))]),
        ("time per output token", "requests", [(drawing.INK, "-", per_token_times(report))]),
        ("forward of the target, by mode", "forwards", by_mode),
    ]
    panels = [panel for panel in panels if any(values for _, _, values in panel[2])]
    if not panels:
        return None
    figure, axes = drawing.new_figure(1, len(panels), 2.5)
    for plot, (title, unit, series) in zip(axes[0], panels, strict=True):
        every = sorted(value for _, _, values in series for value in values)
        for color, dash, values in series:
            if values:
                drawing.draw_cumulative(plot, values, color, dash, "")
        plot.set_title(title, loc="left")
        plot.set_ylabel(unit)
        if every[0] > 0 and every[-1] > 20 * nearest_rank(every, 50):
            plot.set_xscale("log")
        else:
            plot.set_xlim(left=0)
            plot.xaxis.set_major_locator(MaxNLocator(5))
        plot.xaxis.set_major_formatter(EngFormatter(unit="s"))
    return drawing.chart(
        figure,
        "latency",
        alt="Cumulative distributions of the time to the first token, per token, and of target forwards.",
        caption="How many took at most so long. A long flat top is a tail: compare it with the waiting requests "
        "above. Of the forwards, what an eager one costs is the distance between the curves, as far as their "
        "batches are alike.",
    )
