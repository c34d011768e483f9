"""The report of a bench: sections for a terminal and a page, and its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from capture_planner.codec import json_fields, json_of, plain, plain_fields
from capture_planner.codec.plain import plain_some
from capture_planner.modes import GraphMode, Role
from capture_planner.records.text import counted
from capture_planner.report.plots import MAX_POINTS, MODE_COLORS, Chart, Color, Mark, Plot, PlotAxis, Series, drawn
from capture_planner.report.writing import Grid, Report, Section, noted, seconds, size, warned
from capture_planner_runner.bench import record
from capture_planner_runner.bench.record import BenchReport, verdicts
from capture_planner_runner.report.run import NONE

STOPPED = "the bench was stopped before all figures were measured"


def bench_report(report: BenchReport) -> Report:
    """Return the report of a bench for ``terminal.tables`` and ``page.page``."""
    alerts = [f"INTERRUPTED: {STOPPED}"] if report.interrupted else []
    if report.failed:
        broken = dict.fromkeys(absent.figure for absent in report.failed)
        alerts.append(f"INCOMPLETE: failed in {', '.join(broken)}")
    parts = (_subject, _targets, _decode, _preparation, _chain, _throughput, _capture, _pools, _made)
    return Report(
        kind="bench",
        title=f"Bench of {report.plan.model.name}",
        alert="; ".join(alerts) or None,
        sections=tuple(part(report) for part in parts),
        charts=partial(bench_charts, report),
        spec=report.plan.spec_digest,
    )


def _subject(report: BenchReport) -> Section:
    plan = report.plan
    facts = [
        ("plan", f"{plan.model.name} on {plan.environment.name}, {counted(plan.num_graphs, 'graph')}"),
        ("model", report.model),
        *((name, text) for name, text in report.facts.items() if name in _FIRST),
    ]
    warnings = [f"interrupted: {STOPPED}"] if report.interrupted else []
    warnings += [f"{absent.figure} broke: {absent.says}" for absent in report.failed]
    title = f"Bench of {plan.model.name}"
    return Section(name="bench", title=title, parts=(*warned(*warnings), Grid.facts(facts)))


_FIRST = ("device", "quick")
"""Facts without which no number should be read; the others come last."""


def _made(report: BenchReport) -> Section:
    facts = [
        ("spec", report.plan.spec_digest),
        ("backends", ", ".join(f"{name} {version}" for name, version in report.backends.items()) or NONE),
        ("clock", f"{report.clock}; medians"),
        ("pages", f"of {counted(report.page_size, 'token')}"),
        *((name, text) for name, text in report.facts.items() if name not in _FIRST),
    ]
    return Section(name="made", title="Measured with", parts=(Grid.facts(facts),))


def _absent(report: BenchReport, figure: str, title: str = "") -> Section:
    absent = [each for each in report.absent if each.figure == figure]
    lines = tuple(f"{'broke' if each.failed else NONE}: {each.says}" for each in absent)
    return Section(name=figure, title=title or figure.capitalize(), parts=(*(lines or ("not measured",)),))


def _skipped(report: BenchReport, figure: str) -> list[str]:
    return [f"skipped: {absent.says}" for absent in report.absent if absent.figure == figure]


Column = tuple[str, str, Callable[[Any], str]]
"""Of a table: its head, the property of a row that it shows, and how that is written."""


def _figure_section(
    report: BenchReport, name: str, title: str, columns: Sequence[Column], *, text: int, notes: Iterable[str]
) -> Section:
    """Return the table of one figure; its first ``text`` columns are words, and the others numbers."""
    rows = [tuple(write(getattr(row, key)) for _, key, write in columns) for row in getattr(report, name)]
    if not rows:
        return _absent(report, name, title)
    grid = Grid.of([head for head, _, _ in columns], rows, text=text)
    return Section(name=name, title=title, parts=(grid, *noted(*_skipped(report, name), *notes)))


def times(value: float | None) -> str:
    """Write a ratio: ``1.05x``."""
    return NONE if value is None else f"{value:,.2f}x"


def _optional(value: float | None) -> str:
    return NONE if value is None else seconds(value)


def verdict_text(verdict: record.TargetVerdict) -> str:
    """Say whether a target is met, or by how much it is missed."""
    return "met" if verdict.holds else f"missed by {verdict.missed_by:.0%}"


def _targets(report: BenchReport) -> Section:
    rows = [
        (
            verdict.what,
            f"{'at most' if verdict.at_most else 'at least'} {_value(verdict.wanted, verdict.unit)}",
            _value(verdict.reached, verdict.unit),
            verdict_text(verdict),
        )
        for verdict in verdicts(report)
    ]
    notes = ("Set for Qwen3-0.6B's shape in bfloat16 on an H100; elsewhere they are only a yardstick.",)
    if not rows:
        return Section(name="targets", parts=("none: no figure has a target",))
    grid = Grid(columns=("", "target", "reached", "verdict"), right=frozenset({"reached"}), rows=tuple(rows))
    return Section(name="targets", parts=(grid, *noted(*notes)))


def _value(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if unit else times(value)


def _graphs(graphs: Iterable[record.GraphReplays]) -> str:
    return " + ".join(f"{each.role}{f' x {each.times}' if each.times > 1 else ''} ({each.entry})" for each in graphs)


def _decode(report: BenchReport) -> Section:
    columns: tuple[Column, ...] = (
        ("requests", "num_reqs", str),
        ("graphs", "graphs", _graphs),
        ("step", "step", seconds),
        ("bare graphs", "bare", seconds),
        ("eager step", "eager", _optional),
        ("host", "host", seconds),
        ("step / bare", "overhead", times),
        ("eager / bare", "gain", times),
    )
    notes = [
        "A step is everything: schedule, preparation, replay, copy of the tokens to the host, verification. Bare: "
        "only the graphs it replays, repeated on what the last step staged. Host: the part of the step before "
        "its replays; on a GPU it overlaps the step before, where the runner can run ahead.",
        # All rows have windows of the same length.
        *(f"At most {counted(r.windows, 'window')} of {counted(r.steps, 'step')} each." for r in report.decode[:1]),
    ]
    if any(len(row.graphs) > 1 for row in report.decode):
        notes.append("With a drafter, a bare step is the sum of its graphs, one after the other.")
    return _figure_section(report, "decode", "Decode", columns, text=2, notes=notes)


def _preparation(report: BenchReport) -> Section:
    columns: tuple[Column, ...] = (
        ("requests", "num_reqs", str),
        ("role", "role", str),
        ("backend", "backends", lambda backends: ", ".join(dict.fromkeys(backends))),
        ("a step", "step", seconds),
        ("anew", "stage", seconds),
        ("backend", "prepare", seconds),
        ("stock call", "stock", _optional),
        ("step / stock", "of_stock", times),
        ("steps", "steps", str),
    )
    notes = [
        "Host time of one forward in a decode whose lengths grow. A step: as the runner does it, averaged over "
        "all steps; a graph of one token per request advances its own fields, and a drafter's fields are filled "
        "with the target's. Anew: all fields of the role made and padded again. Stock: the library's own plan "
        "call for the same shape, if the library plans on the host."
    ]
    return _figure_section(report, "preparation", "Preparation", columns, text=3, notes=notes)


def _chain(report: BenchReport) -> Section:
    columns: tuple[Column, ...] = (
        ("requests", "num_reqs", str),
        ("draft decodes", "steps", str),
        ("one graph", "fused", _optional),
        ("single steps", "single", seconds),
        ("eager", "eager", seconds),
        ("over single", "over_single", times),
        ("over eager", "over_eager", times),
    )
    notes = ["Forwards alone: host work between single steps is not in these times.", *map(_bound, report.chain)]
    if any(row.fused is None for row in report.chain):
        notes.append("No chain in one graph: a backend needs the host between draft steps.")
    return _figure_section(report, "chain", "Draft chain", columns, text=0, notes=notes)


def _bound(row: record.ChainTiming) -> str:
    step = f"With {counted(row.num_reqs, 'request')}, a single step takes {seconds(row.one)} on the device"
    if row.host is None:
        return f"{step}; its host time was not measured."
    # The device is the longer one: it is never idle between single steps, and only launches can be saved.
    if row.host < row.one:
        return f"{step} and {seconds(row.host)} on the host: a chain saves only launches."
    return f"{step} and {seconds(row.host)} on the host, which bounds it: a chain saves host time too."


def _throughput(report: BenchReport) -> Section:
    result = report.throughput
    if result is None:
        return _absent(report, "throughput")
    lines = (
        f"{counted(result.num_requests, 'request')} of {result.prompt_tokens} + {result.output_tokens} tokens: "
        f"{result.tokens_per_second:,.0f} tokens/s generated",
        f"not compared: {result.other_says}"
        if result.other is None
        else f"{result.other_says}: {result.other:,.0f} tokens/s; ours is {times(result.gain)} of it",
    )
    return Section(name="throughput", parts=(*lines,))


def _capture(report: BenchReport) -> Section:
    result = report.capture
    if result is None:
        return _absent(report, "capture")
    rows = [
        (name, seconds(cost.seconds), *map(size, (cost.pool, cost.driver, round(cost.memory / result.graphs))))
        for name, cost in (("the runner", result.ours), ("bare loop", result.bare))
        if cost is not None
    ]
    notes: tuple[str, ...] = ("no bare loop: torch.cuda.graph needs a GPU",)
    if result.bare is not None:
        notes = (
            f"runner / bare loop: {times(result.of_seconds)} in seconds, {times(result.of_memory)} in bytes per graph",
            f"the first capture took {seconds(result.first_seconds)}, as it also loads kernels and compiled "
            f"{seconds(result.first_compiled)} of it, and {size(result.first_driver)} in the driver, which later ones "
            "find there",
        )
    grid = Grid.of((counted(result.graphs, "graph"), "time", "in pools", "in the driver", "a graph"), rows, text=1)
    return Section(name="capture", parts=(grid, *noted(*_skipped(report, "capture"), *notes)))


def _pools(report: BenchReport) -> Section:
    result = report.pools
    if result is None:
        return _absent(report, "pools")
    saved = f"sharing saves {size(result.saved)}"
    line = f"one for all roles {size(result.shared)}, one each {size(result.per_role)}: {saved}"
    requests, differing = counted(result.requests, "request"), result.differing
    if differing:
        warning = f"{len(differing)} of {requests} differ: {', '.join(differing[:5])}"
        return Section(name="pools", parts=(*warned(warning), line))
    return Section(name="pools", parts=(line, f"{requests} served with both: the same tokens"))


@json_of(BenchReport)
def _bench(report: BenchReport) -> dict[str, Any]:
    """Return the JSON of a bench. Seconds, bytes, ratios.

    ``model``, ``plan``, ``spec`` (digest), ``environment``, ``backends``, ``facts``, ``clock``, ``page_size``: what was
    measured, where and with what. A key for each figure: ``decode``, ``preparation`` and ``chain`` are lists, a row for
    each number of requests; ``throughput``, ``capture`` and ``pools`` are one record each; what was not measured is
    empty or null, and ``absent`` says why. ``interrupted``: whether it was stopped. ``targets``: each with the result.
    """
    figures = ("decode", "preparation", "chain", "throughput", "capture", "pools", "interrupted", "absent")
    return {
        "model": report.model,
        "plan": report.plan.model.name,
        "spec": report.plan.spec_digest,
        "environment": plain_fields(report.plan.environment),
        **plain_some(report, "backends", "facts", "clock", "page_size", *figures),
        "targets": plain(tuple(verdicts(report))),
    }


for _figure, _derived in {
    record.Decode: ("overhead", "gain"),
    record.Preparation: ("of_stock",),
    record.ChainTiming: ("one", "over_single", "over_eager"),
    record.CaptureFigure: ("of_seconds", "of_memory"),
    record.Pools: ("saved",),
    record.TargetVerdict: ("holds", "missed_by"),
}.items():
    json_fields(_figure, *_derived)  # properties, after the fields
json_fields(record.Throughput, "gain", other_says="compared_with")
json_fields(record.AbsentFigure, says="message")


# Charts -----------------------------------------------------------------------------------------


Height = tuple[str, Color, str]
"""A name, a colour, and the property of a row that is the height of its bar in seconds."""


def bench_charts(report: BenchReport) -> tuple[Chart, ...]:
    """Return the charts of a bench; those that would be empty are left out."""
    return drawn(report, (_decode_chart, _preparation_chart, _chain_chart, _capture_chart))


def _bars(title: str, rows: Sequence[Any], heights: Sequence[Height]) -> Plot:
    """Return a group of bars for each row; a height that was not measured leaves its place free."""
    series = [
        Series(label, Mark.BARS, [(row.num_reqs, getattr(row, name)) for row in rows], color=color)
        for label, color, name in heights
        if any(getattr(row, name) is not None for row in rows)
    ]
    return Plot(title=title, x=PlotAxis("batch", "requests"), y=PlotAxis("time", "s"), series=series)


def _decode_chart(report: BenchReport) -> Chart | None:
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


def _preparation_chart(report: BenchReport) -> Chart:
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


def _chain_chart(report: BenchReport) -> Chart | None:
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


def _capture_chart(report: BenchReport) -> Chart | None:
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
