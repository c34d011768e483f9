"""The charts of a run: what was captured, what served the batches, and how long it took.

Few points stand for many: however long the run, no series has more than MAX_POINTS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.records.text import query_len_text
from capture_planner.report.plots import (
    MAX_POINTS,
    MODE_COLORS,
    Chart,
    Color,
    Dash,
    Mark,
    Plot,
    PlotAxis,
    Series,
    drawn,
)
from capture_planner.report.writing import CAPTURED_MODES, MODES, ran
from capture_planner_runner.ledger.rows import Forward, GraphCapture, Step
from capture_planner_runner.ledger.session import RunReport
from capture_planner_runner.report.summary import entry_order, first_token_times, nearest_rank, padding, per_token_times

_DASHES: dict[Role, Dash] = {Role.TARGET: "-", Role.DRAFT_PREFILL: "--", Role.DRAFT_DECODE: ":"}
_AXES = ("tokens", "requests")


def charts(report: RunReport) -> tuple[Chart, ...]:
    """Return the charts of a run; those that would be empty are left out."""
    return drawn(report, (_memory, _batches, _paddings, _steps, _acceptance, _latency))


def _extents(forward: Forward, axis: str) -> tuple[int, int]:
    if axis == "tokens":
        return forward.num_tokens, forward.num_tokens + forward.padded_tokens
    return forward.num_reqs, forward.num_reqs + forward.padded_reqs


def _batches(report: RunReport) -> Chart:
    plots = []
    for axis, role in product(_AXES, Role):
        if forwards := [forward for forward in report.forwards if forward.role is role]:
            graphs = [graph for graph in report.captured if graph.role is role and graph.waiver is None]
            extents = sorted(_extents(forward, axis)[1] for forward in forwards)
            low, high = extents[0], extents[-1]
            # Few prompts dwarf many decodes.
            log = high > 8 * max(1, extents[len(extents) // 2])
            series = [Series("no padding", Mark.LINE, [(low, low), (high, high)], color="ink", dash=":")]
            for name, color, sizes in _ladders(graphs, axis):
                # Stairs beyond the batches that came would press their marks together.
                if sizes := [extent for extent in sizes if low <= extent <= high]:
                    sizes = sizes[:: -(-len(sizes) // MAX_POINTS)]
                    series.append(Series(name, Mark.STAIRS, zip(sizes, sizes, strict=True), color=color))
            for mode in MODES:
                counts: Counter[tuple[int, int]] = Counter()
                for forward in forwards:
                    if forward.mode is mode:
                        counts[_extents(forward, axis)] += forward.repeats
                if counts:
                    points, numbers = zip(*thinned(counts), strict=True)
                    series.append(Series(ran(mode), Mark.POINTS, points, counts=numbers, color=MODE_COLORS[mode]))
            x, y = (PlotAxis(label, axis, log=log) for label in ("batch", "computed"))
            plots.append(
                Plot(title=f"{role.value}: {axis} of each batch and {axis} computed for it", x=x, y=y, series=series)
            )
    return Chart(
        name="batches",
        section="served",
        plots=plots,
        caption="Each mark is a batch shape, larger if it was more frequent: its real extent, and the extent of "
        "the graph that served it. The stairs are the captured sizes; the height above the dotted diagonal "
        "is padding. Diamonds on the diagonal ran eager: look for many of them at one extent, and for wide "
        "stairs where the marks are dense. PIECEWISE graphs do not pad requests.",
    )


def _ladders(graphs: Iterable[GraphCapture], axis: str) -> Iterator[tuple[str, Color, list[int]]]:
    """Yield name, colour and ascending sizes of each mode and query length."""
    ladders: dict[tuple[GraphMode, int | None, bool], set[int]] = {}
    for graph in graphs:
        extent = graph.entry.num_tokens if axis == "tokens" else graph.entry.num_reqs
        if extent is not None:
            entry = graph.entry
            ladders.setdefault((entry.mode, entry.tokens_each, entry.max_query_len is not None), set()).add(extent)
    for (mode, query_len, varies), sizes in ladders.items():
        kind = "mixed" if query_len is None else f"query length {query_len_text(query_len, varies=varies)}"
        yield f"sizes of {mode.value}, {kind}", MODE_COLORS[mode], sorted(sizes)


def _cumulative(name: str, values: Iterable[float], color: Color, dash: Dash = "-") -> Series:
    return Series(name, Mark.LINE, zip(*cumulative(values), strict=True), color=color, dash=dash)


def _paddings(report: RunReport) -> Chart:
    replays = [forward for forward in report.forwards if forward.entry is not None]
    plots = []
    for axis in _AXES:
        series = []
        for role, mode in product(Role, CAPTURED_MODES):
            shares = [
                padding(real, computed - real)
                for forward in replays
                if forward.role is role and forward.mode is mode
                for real, computed in (_extents(forward, axis),)
                for _ in range(forward.repeats)
            ]
            # A PIECEWISE graph pads no requests: its curve would say nothing.
            if shares and not (axis == "requests" and mode is GraphMode.PIECEWISE):
                name = f"{role.value} {mode.value}"
                series.append(_cumulative(name, shares, MODE_COLORS[mode], _DASHES[role]))
        if series:
            x = PlotAxis(f"padded share of the computed {axis}, at most", "%")
            y = PlotAxis("forwards served by a graph", "%", from_zero=True)
            plots.append(Plot(title=f"Padding of {axis}", x=x, y=y, series=series))
    return Chart(
        name="padding",
        section="served",
        plots=plots,
        caption="How many of the forwards had at most so much padding. A curve that rises at once is good; "
        "one that rises late asks for sizes nearer to the batches that came.",
    )


def _memory(report: RunReport) -> Chart:
    captured = [graph for graph in report.captured if graph.waiver is None]
    plots = []
    for role, mode in product(Role, CAPTURED_MODES):
        if graphs := [graph for graph in captured if graph.role is role and graph.entry.mode is mode]:
            graphs.sort(key=lambda graph: entry_order(graph.entry))
            plots.append(_graph_memory(role, mode, graphs))
    return Chart(
        name="memory",
        section="captured",
        plots=plots,
        caption="Alone: what a graph would take in a pool of its own. Added: what it added to the pool that "
        "it shares. The largest graph of a pool is captured first and pays; the others fit into what it "
        f"left and add nothing, or little. Where there are more than {MAX_POINTS} graphs, a point is the mean "
        "of neighbours.",
    )


def _graph_memory(role: Role, mode: GraphMode, graphs: Sequence[GraphCapture]) -> Plot:
    width = -(-len(graphs) // MAX_POINTS)
    groups = [graphs[start : start + width] for start in range(0, len(graphs), width)]
    # In requests only where all are: a mode may hold graphs of both kinds.
    extent = "requests" if all(graph.entry.tokens_each for graph in graphs) else "tokens"
    at = [group[-1].entry.num_reqs if extent == "requests" else group[-1].entry.num_tokens for group in groups]

    def means(name: str) -> list[tuple[float, float]]:
        heights = (sum(getattr(graph, name) for graph in group) / len(group) for group in groups)
        return [(x or 0, height) for x, height in zip(at, heights, strict=True)]

    return Plot(
        title=f"{role.value} {mode.value}: memory of each graph",
        x=PlotAxis("size of the graph", extent, log=True),
        y=PlotAxis("memory", "B", from_zero=True),
        series=(
            Series("alone", Mark.POINTS, means("alone"), color="ink"),
            Series("added to the pool", Mark.POINTS, means("memory"), color=MODE_COLORS[mode]),
        ),
    )


def _steps(report: RunReport) -> Chart | None:
    if not report.steps:
        return None
    buckets = Buckets.of(report.steps)
    step = PlotAxis("step", "number")

    def means(values: Iterable[tuple[int, float]]) -> Iterator[tuple[int, float]]:
        return zip(buckets.edges, buckets.means(values), strict=False)

    running = means((each.index, each.num_reqs) for each in report.steps)
    waiting = means((each.index, each.waiting) for each in report.steps)
    target = [forward for forward in report.forwards if forward.role is Role.TARGET]
    tokens = [
        Series(
            ran(mode),
            Mark.LINE,
            means((f.step, f.num_tokens) for f in target if f.mode is mode),
            color=MODE_COLORS[mode],
        )
        for mode in MODES
    ]
    return Chart(
        name="steps",
        plots=(
            Plot(
                title="Requests in each step",
                x=step,
                y=PlotAxis("requests", "number", from_zero=True),
                series=(
                    Series("running", Mark.LINE, running, color="ink"),
                    Series("waiting", Mark.LINE, waiting, color="violet", dash=":"),
                ),
            ),
            Plot(title="Tokens of the target in each step", x=step, y=PlotAxis("batch", "tokens"), series=tokens),
        ),
        caption="The requests that run and those that wait for a place; the tokens that the "
        "target computed, by the mode of its forward: prompts show as peaks, and eager peaks are those that "
        f"no graph covers. Beyond {MAX_POINTS} steps, means of neighbours are drawn.",
    )


def _acceptance(report: RunReport) -> Chart | None:
    # Steps are sampled in long runs: the mean here is of those that are drawn.
    drafted = sum(step.drafted for step in report.steps)
    # As in the summary: without it the page has no section to draw in.
    if report.plan.speculative is None or not drafted:
        return None
    buckets = Buckets.of(report.steps)
    drafted_means, accepted_means = (
        buckets.means((step.index, getattr(step, name)) for step in report.steps) for name in ("drafted", "accepted")
    )
    # None leaves a gap in the line: no draft was verified there.
    rates = [good / all_ if all_ else None for good, all_ in zip(accepted_means, drafted_means, strict=True)]
    mean = sum(step.accepted for step in report.steps) / drafted
    ends = buckets.edges[0], buckets.edges[-1]
    plot = Plot(
        title="Accepted draft tokens in each step",
        x=PlotAxis("step", "number"),
        y=PlotAxis("accepted of drafted", "%", from_zero=True),
        series=(
            Series("accepted", Mark.LINE, zip(buckets.edges, rates, strict=False), color="full"),
            Series("mean of the run", Mark.LINE, [(end, mean) for end in ends], color="ink", dash=":"),
        ),
    )
    return Chart(
        name="acceptance",
        plots=(plot,),
        caption="The share of draft tokens that the target accepted; dotted, the mean of the run. A gap is a "
        "step that verified none. A lasting fall says that the drafter met text it does not know.",
    )


def _latency(report: RunReport) -> Chart:
    target = [forward for forward in report.forwards if forward.role is Role.TARGET]
    by_mode = [(ran(mode), MODE_COLORS[mode], [f.seconds for f in target if f.mode is mode]) for mode in MODES]
    panels: list[tuple[str, str, list[tuple[str, Color, list[float]]]]] = [
        ("Time to first token", "requests", [("requests", "ink", list(first_token_times(report)))]),
        ("Time per output token", "requests", [("requests", "ink", list(per_token_times(report)))]),
        ("Forward of the target, by mode", "forwards", by_mode),
    ]
    plots = []
    for title, unit, named in panels:
        series = [_cumulative(name, values, color) for name, color, values in named if values]
        if series:
            every = sorted(value for _, _, values in named for value in values)
            # A long tail would squeeze the rest on a linear axis; a logarithmic one has no 0.
            log = every[0] > 0 and every[-1] > 20 * nearest_rank(every, 50)
            x, y = PlotAxis("time, at most", "s", log=log), PlotAxis(unit, "%", from_zero=True)
            plots.append(Plot(title=title, x=x, y=y, series=series))
    return Chart(
        name="latency",
        plots=plots,
        caption="How many took at most so long. A long flat top is a tail: compare it with the waiting requests "
        "above. Of the forwards, what an eager one costs is the distance between the curves, as far as their "
        "batches are alike.",
    )


# Few points that stand for many -----------------------------------------------------------------


def cumulative(values: Iterable[float]) -> tuple[list[float], list[float]]:
    """Return x and y of the share of values up to x, at most MAX_POINTS steps; the extremes are exact."""
    ordered = sorted(values)
    last = len(ordered) - 1
    steps = min(MAX_POINTS, last) or 1
    # A set, since rounding may give an index twice.
    at = sorted({round(step * last / steps) for step in range(steps + 1)})
    return [ordered[0], *(ordered[i] for i in at)], [0.0, *((i + 1) / len(ordered) for i in at)]


def thinned(counts: Mapping[tuple[int, int], int]) -> list[tuple[tuple[int, int], int]]:
    """Return at most MAX_POINTS points with their counts: of neighbours, the most frequent for all."""
    # By what was computed first, so that neighbours were served by the same graph.
    points = sorted(counts.items(), key=lambda point: point[0][::-1])
    width = -(-len(points) // MAX_POINTS)
    return [
        (max(group, key=lambda point: point[1])[0], sum(count for _, count in group))
        for start in range(0, len(points), width or 1)
        if (group := points[start : start + width])
    ]


@attrs.frozen(kw_only=True)
class Buckets:
    """Steps in at most MAX_POINTS buckets of equally many neighbours; the last may have fewer."""

    first: int
    width: int
    """Steps in a bucket."""
    steps: tuple[int, ...]
    """How many steps were taken in each."""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Buckets:
        """Lay buckets over at least one step."""
        first, last = min(step.index for step in steps), max(step.index for step in steps)
        width = -(-(last - first + 1) // MAX_POINTS)
        counts = [0] * -(-(last - first + 1) // width)
        for step in steps:
            counts[(step.index - first) // width] += 1
        return cls(first=first, width=width, steps=tuple(counts))

    @property
    def edges(self) -> list[int]:
        """The number of the first step of each bucket, and the end of the last one."""
        return [self.first + self.width * index for index in range(len(self.steps) + 1)]

    def means(self, values: Iterable[tuple[int, float]]) -> list[float]:
        """Return the mean over the steps of each bucket of ``(step, value)`` pairs, which may be many a step."""
        totals = [0.0] * len(self.steps)
        for number, value in values:
            index = (number - self.first) // self.width
            # A step that was cut off has forwards and no end: it is in no bucket.
            if 0 <= index < len(totals):
                totals[index] += value
        return [total / max(count, 1) for total, count in zip(totals, self.steps, strict=True)]
