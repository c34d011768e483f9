"""The report of a bench: the same sections as tables, as a page with plots, and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import RenderableType

from capture_planner.bench.record import BenchReport, CaptureFigure, ChainTiming, TargetVerdict, Throughput
from capture_planner.bench.targets import verdicts
from capture_planner.records.batch import Entry
from capture_planner.records.text import counted
from capture_planner.report.page import rendered
from capture_planner.report.run import section_tables
from capture_planner.report.sections import NONE
from capture_planner.report.tables import entry_data
from capture_planner.report.writing import Grid, Section, seconds, size

if TYPE_CHECKING:
    from capture_planner.report.drawing import Chart


STOPPED = "the bench was stopped before all figures were measured"


def bench_tables(report: BenchReport) -> RenderableType:
    """The report of a bench for people, at any width."""
    return section_tables(bench_sections(report))


def bench_page(report: BenchReport) -> str:
    """Return the report as one page with plots that needs nothing else.

    Raises ``CapturePlannerError`` where jinja2 or matplotlib is not installed.
    """

    def drawn() -> Sequence[Chart]:
        from capture_planner.report.bench_charts import bench_charts

        return bench_charts(report)

    return rendered(
        "bench",
        title=f"Bench of {report.plan.model.name}",
        alert=_alert(report),
        sections=bench_sections(report),
        charts=drawn,
        spec=report.plan.spec_digest,
    )


def _alert(report: BenchReport) -> str | None:
    says = [f"INTERRUPTED: {STOPPED}"] if report.interrupted else []
    if report.failed:
        broken = dict.fromkeys(absent.figure for absent in report.failed)
        says.append(f"INCOMPLETE: something broke in {', '.join(broken)}")
    return "; ".join(says) or None


def bench_sections(report: BenchReport) -> tuple[Section, ...]:
    """Return the parts of the report in the order in which they are read."""
    return (
        _what(report),
        _targets(report),
        _decode(report),
        _preparation(report),
        _chain(report),
        _throughput(report),
        _capture(report),
        _pools(report),
    )


def _what(report: BenchReport) -> Section:
    plan = report.plan
    facts = [
        ("plan", f"{plan.model.name} on {plan.environment.name}, {counted(plan.num_graphs, 'graph')}"),
        ("spec", plan.spec_digest),
        ("model", report.model),
        ("backends", ", ".join(f"{name} {version}" for name, version in report.backends.items()) or NONE),
        ("clock", f"{report.clock}; medians"),
        ("pages", f"of {counted(report.page_size, 'token')}"),
        *report.facts.items(),
    ]
    return Section(
        name="bench",
        title=f"Bench of {plan.model.name}",
        warnings=(
            *((f"interrupted: {STOPPED}",) if report.interrupted else ()),
            *(f"{absent.figure} broke: {absent.says}" for absent in report.failed),
        ),
        grid=Grid(columns=("", ""), rows=tuple(facts)),
    )


def _absent(report: BenchReport, figure: str) -> tuple[str, ...]:
    """Return why a figure is not there."""
    return tuple(
        f"{'broke' if absent.failed else NONE}: {absent.says}"
        for absent in report.absent
        if absent.figure == figure
    ) or ("not measured",)


def _section(
    report: BenchReport,
    name: str,
    title: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    *,
    text: int = 0,
    notes: tuple[str, ...] = (),
) -> Section:
    """Return one figure; its first ``text`` columns are words, and the others numbers."""
    if not rows:
        return Section(name=name, title=title, lines=_absent(report, name))
    grid = Grid(columns=columns, right=frozenset(columns[text:]), rows=tuple(rows))
    left_out = tuple(f"left out: {absent.says}" for absent in report.absent if absent.figure == name)
    return Section(name=name, title=title, grid=grid, notes=(*left_out, *notes))


def times(value: float | None) -> str:
    """Write a ratio: ``1.05x``."""
    return NONE if value is None else f"{value:,.2f}x"


def _optional(value: float | None) -> str:
    return NONE if value is None else seconds(value)


def verdict_text(verdict: TargetVerdict) -> str:
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
    notes = ("Stated for Qwen3-0.6B's shape in bfloat16 on an H100; on anything else they are a ruler.",)
    if not rows:
        return Section(name="targets", title="Targets", lines=("none: no figure has a target",))
    grid = Grid(columns=("", "target", "reached", "verdict"), right=frozenset({"reached"}), rows=tuple(rows))
    return Section(name="targets", title="Targets", grid=grid, notes=notes)


def _value(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if unit else times(value)


def _decode(report: BenchReport) -> Section:
    rows = [
        (
            str(row.num_reqs),
            " + ".join(
                f"{each.role}{f' x {each.times}' if each.times > 1 else ''} ({each.entry})"
                for each in row.graphs
            ),
            seconds(row.step),
            seconds(row.bare),
            _optional(row.eager),
            seconds(row.host),
            times(row.overhead),
            times(row.gain),
        )
        for row in report.decode
    ]
    columns = (
        "requests",
        "graphs",
        "step",
        "bare graphs",
        "eager step",
        "host",
        "step / bare",
        "eager / bare",
    )
    notes: tuple[str, ...] = (
        "A step is all of it: schedule, preparation, replay, tokens back to the host, verification. Bare: the "
        "graphs that it replays, again and again, on what the last step staged. Host: the step's part before "
        "its replays; on a GPU it hides behind the step before, where that can be ahead.",
    )
    if report.decode:
        first = report.decode[0]
        notes += (f"At most {counted(first.windows, 'window')} of {counted(first.steps, 'step')} each.",)
    if any(len(row.graphs) > 1 for row in report.decode):
        notes += ("With a drafter a bare step is the sum of its graphs, one after the other.",)
    return _section(report, "decode", "Decode", columns, rows, text=2, notes=notes)


def _preparation(report: BenchReport) -> Section:
    rows = [
        (
            str(row.num_reqs),
            row.role.value,
            ", ".join(dict.fromkeys(row.backends)),
            seconds(row.step),
            seconds(row.stage),
            seconds(row.prepare),
            _optional(row.stock),
            times(row.of_stock),
            str(row.steps),
        )
        for row in report.preparation
    ]
    columns = (
        "requests",
        "role",
        "backend",
        "a step",
        "anew",
        "backend",
        "stock call",
        "step / stock",
        "steps",
    )
    notes = (
        "Host time of one forward in a decode whose lengths grow. A step: as the runner does it, a mean over "
        "all; a graph of one token a request moves its own fields on, and a drafter's fields are filled with "
        "the target's. Anew: where all fields of the role are made and padded anew. Stock: the library's own "
        "plan call of the same shape, where the library plans on the host.",
    )
    return _section(report, "preparation", "Preparation", columns, rows, text=3, notes=notes)


def _chain(report: BenchReport) -> Section:
    rows = [
        (
            str(row.num_reqs),
            str(row.steps),
            _optional(row.fused),
            seconds(row.single),
            seconds(row.eager),
            times(row.over_single),
            times(row.over_eager),
        )
        for row in report.chain
    ]
    columns = ("requests", "draft decodes", "one graph", "single steps", "eager", "over single", "over eager")
    notes: tuple[str, ...] = (
        "Forwards alone: what the host does between single steps is not in these times.",
        *(_bound(row) for row in report.chain),
    )
    if any(row.fused is None for row in report.chain):
        notes += ("No chain in one graph: a backend needs the host between draft steps.",)
    return _section(report, "chain", "Draft chain", columns, rows, notes=notes)


def _bound(row: ChainTiming) -> str:
    """Say what bounds the gain over single steps."""
    says = f"Of {counted(row.num_reqs, 'request')} a single step takes the device {seconds(row.one)}"
    if row.host is None:
        return f"{says}; what it takes the host was not measured."
    gain = (
        "while the host is the faster one, a chain saves only launches."
        if row.host < row.one
        else "the host is the slower one, and a chain saves its time as well."
    )
    return f"{says} and the host {seconds(row.host)}: {gain}"


def _throughput(report: BenchReport) -> Section:
    found = report.throughput
    if found is None:
        return _section(report, "throughput", "Throughput", (), ())
    return Section(name="throughput", title="Throughput", lines=tuple(_throughput_lines(found)))


def _throughput_lines(found: Throughput) -> Iterator[str]:
    yield (
        f"{counted(found.num_requests, 'request')} of {found.prompt_tokens} + {found.output_tokens} tokens: "
        f"{found.tokens_per_second:,.0f} tokens/s generated"
    )
    if found.other is None:
        yield f"not compared: {found.other_says}"
    else:
        yield f"{found.other_says}: {found.other:,.0f} tokens/s; ours is {times(found.gain)} of it"


def _capture(report: BenchReport) -> Section:
    found = report.capture
    if found is None:
        return _section(report, "capture", "Capture", (), ())
    rows = [
        (
            name,
            seconds(cost.seconds),
            size(cost.pool),
            size(cost.driver),
            size(round(cost.memory / found.graphs)),
        )
        for name, cost in (("the runner", found.ours), ("bare loop", found.bare))
        if cost is not None
    ]
    notes: tuple[str, ...] = tuple(_capture_notes(found))
    columns = (counted(found.graphs, "graph"), "time", "in pools", "in the driver", "a graph")
    return _section(report, "capture", "Capture", columns, rows, text=1, notes=notes)


def _capture_notes(found: CaptureFigure) -> Iterator[str]:
    if found.bare is None:
        yield "no bare loop: torch.cuda.graph needs a GPU"
    else:
        yield (
            f"the runner by the bare loop: {times(found.of_seconds)} of its seconds, "
            f"{times(found.of_memory)} of its bytes a graph"
        )
        yield f"the first capture took {seconds(found.first_seconds)}: it compiles and loads kernels too"


def _pools(report: BenchReport) -> Section:
    found = report.pools
    if found is None:
        return _section(report, "pools", "Pools", (), ())
    same = (
        f"{counted(found.requests, 'request')} served with both: the same tokens"
        if not found.differing
        else f"{len(found.differing)} of {counted(found.requests, 'request')} differ: "
        f"{', '.join(found.differing[:5])}"
    )
    line = f"one for all roles {size(found.shared)}, one each {size(found.per_role)}: sharing saves {size(found.saved)}"
    return Section(
        name="pools",
        title="Pools",
        lines=(line,) if found.differing else (line, same),
        warnings=(same,) if found.differing else (),
    )


def bench_data(report: BenchReport) -> dict[str, Any]:
    """Return the report of a bench as plain data, for ``--format json``. Seconds, bytes, ratios.

    ``model``, ``plan``, ``spec`` (digest), ``environment``, ``backends``, ``facts``, ``clock``,
    ``page_size``: what was measured, where and with what. A key for each figure: ``decode``,
    ``preparation`` and ``chain`` are lists, a row for each number of requests; ``throughput``,
    ``capture`` and ``pools`` are one record each; what was not measured is empty or null, and
    ``absent`` says why; ``interrupted``, whether somebody stopped it. ``targets``: each with what was reached.
    """
    return {
        "model": report.model,
        "plan": report.plan.model.name,
        "spec": report.plan.spec_digest,
        "environment": _plain(report.plan.environment),
        "backends": dict(report.backends),
        "facts": dict(report.facts),
        "clock": report.clock,
        "page_size": report.page_size,
        "decode": [_plain(row) | {"overhead": row.overhead, "gain": row.gain} for row in report.decode],
        "preparation": [_plain(row) | {"of_stock": row.of_stock} for row in report.preparation],
        "chain": [
            _plain(row) | {"one": row.one, "over_single": row.over_single, "over_eager": row.over_eager}
            for row in report.chain
        ],
        "throughput": report.throughput and _plain(report.throughput) | {"gain": report.throughput.gain},
        "capture": report.capture
        and _plain(report.capture)
        | {"of_seconds": report.capture.of_seconds, "of_memory": report.capture.of_memory},
        "pools": report.pools and _plain(report.pools) | {"saved": report.pools.saved},
        "interrupted": report.interrupted,
        "absent": [_plain(absent) for absent in report.absent],
        "targets": [
            _plain(verdict) | {"holds": verdict.holds, "missed_by": verdict.missed_by}
            for verdict in verdicts(report)
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Entry):
        return entry_data(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if attrs.has(type(value)):
        return {name: _plain(getattr(value, name)) for name in attrs.fields_dict(type(value))}
    return getattr(value, "value", value)
