"""The report of a run in sections, whatever shows them: sentences and grids of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from capture_planner.modes import GraphMode
from capture_planner.records._base import grouped
from capture_planner.records.text import counted
from capture_planner.report.adapters import adapter_sections
from capture_planner.report.eager_check import comparison_sections
from capture_planner.report.first_use import first_use_sections
from capture_planner.report.memory import memory_sections
from capture_planner.report.run_ranks import has_replicas, labelled, rank_sections, requests_told
from capture_planner.report.summary import CapturedKind, Percentiles, RunSummary
from capture_planner.report.verdict import verdict
from capture_planner.report.verification import verification_sections
from capture_planner.report.writing import Grid, Section, extent, percent, seconds, size
from capture_planner.runtime.ledger import GraphCapture
from capture_planner.runtime.session import RunReport

MAX_FALLBACKS = 10
"""Shapes of eager forwards that are listed; the rest is counted."""

MAX_NAMED = 5
"""Graphs that are named where there may be many."""

NONE = "none"
"""Written where nothing was measured."""

UNKNOWN = "unknown"
"""Written where a ledger gives no reason for an eager forward."""


def alert(report: RunReport, numbers: RunSummary) -> str | None:
    """Return what must not be overlooked: that the run was stopped, and by what. None where it was not."""
    difference = report.comparison and report.comparison.difference
    if report.interrupted:
        progress = f"{numbers.finished} of {requests_told(report)} finished"
        during = f" during {report.stage}" if report.stage else ""
        if report.fault:
            return f"STOPPED{during}: {report.fault}; {progress}"
        return f"INTERRUPTED{during}: the run was stopped before all requests were served; {progress}"
    if difference:
        place = f"{difference.role.value}, {difference.entry}: {difference.where}"
        return f"DIFFERENT: {place} is not what eager has; stopped there"
    if report.verification is not None and report.verification.faults:
        return f"NOT VERIFIED: {report.verification.faults[0]}"
    return None


def sections(report: RunReport, numbers: RunSummary) -> tuple[Section, ...]:
    """Return the parts of the report in the order in which they are read."""
    found = (
        _run(report, verdict(report, numbers)),
        *comparison_sections(report.comparison),
        *verification_sections(report.verification),
        _captured(report, numbers),
        *first_use_sections(report, numbers),
        _served_from(numbers),
        _fallbacks(numbers),
        _graphs(numbers),
        *adapter_sections(report),
        *rank_sections(report),
        *memory_sections(report, numbers),
        _steps(report),
        *_acceptance(numbers),
        _latency(report, numbers),
    )
    return tuple(labelled(report, section) for section in found)


def _run(report: RunReport, lines: tuple[str, ...]) -> Section:
    plan = report.plan
    facts = [
        ("plan", f"{plan.model.name} on {plan.environment.name}, {counted(plan.num_graphs, 'graph')}"),
        ("spec", plan.spec_digest),
        ("backends", ", ".join(f"{name} {version}" for name, version in report.backends.items()) or NONE),
        *report.host.items(),
        *_before(report),
    ]
    return Section(name="run", title=report.model, lines=lines, grid=Grid.facts(facts))


def _before(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield what was done before the clock started, and what it left to compile."""
    warm = report.warm_up
    if warm is not None:
        ran = f"{warm.ran:,} of {counted(warm.shapes, 'shape')} in {seconds(warm.seconds)}"
        compiled = f", {_compiled(warm.compiled)} of it for compiling" if warm.compiled else ""
        yield "warm-up", f"{ran}{compiled}" + (f"; {warm.reason}" if warm.reason else "")
    if report.compiled:
        yield "compiled while serving", _compiled(report.compiled)


def _compiled(kernels: tuple[float, ...]) -> str:
    return f"{counted(len(kernels), 'kernel')} in {seconds(sum(kernels))}"


def _dropped(dropped: Iterable[GraphCapture]) -> Iterator[str]:
    """Say what was not captured, a line for each role and mode: its largest graph stands for the rest."""
    kinds = grouped(dropped, lambda graph: (graph.role.value, graph.entry.mode.value))
    for (role, mode), graphs in kinds.items():
        reason = graphs[0].waiver.message if graphs[0].waiver else ""
        rest = f" and {counted(len(graphs) - 1, 'smaller graph')}" if len(graphs) > 1 else ""
        yield f"not captured: {role} {mode} of {extent(graphs[0].entry)}{rest}: {reason}"


def _captured(report: RunReport, numbers: RunSummary) -> Section:
    kinds = [kind for kind in numbers.captured if not kind.on_first_use]
    total = sum(kind.graphs for kind in kinds)
    memory, alone = sum(kind.memory for kind in kinds), sum(kind.alone for kind in kinds)
    planned, when = numbers.planned - report.plan.num_lazy, " at start" if report.plan.num_lazy else ""
    dropped = [graph for graph in numbers.dropped if graph.step is None]
    warnings = list(_dropped(dropped))
    missing = planned - total - len(dropped)
    if missing > 0:
        warnings.append(f"not captured: {counted(missing, 'graph')} of the plan, which had no turn")
    return Section(
        name="captured",
        lines=(
            f"{total} of {counted(planned, 'graph')}{when} in {seconds(report.capture_seconds)}; "
            f"they grew their pool by {size(memory)}, alone they would take {size(alone)}",
            f"persistent buffers {size(report.buffers)}, KV cache {size(report.kv_cache)}",
        ),
        grid=Grid(
            columns=("role", "mode", "graphs", "time", "pool growth", "alone", "smallest", "largest"),
            right=frozenset({"graphs", "time", "pool growth", "alone"}),
            rows=tuple(map(_kind, kinds)),
        ),
        warnings=tuple(warnings),
    )


def _kind(kind: CapturedKind) -> tuple[str | GraphMode, ...]:
    sizes = size(kind.memory), size(kind.alone)
    ends = extent(kind.smallest), extent(kind.largest)
    return kind.role, kind.mode, f"{kind.graphs:,}", seconds(kind.seconds), *sizes, *ends


def _served_from(numbers: RunSummary) -> Section:
    rows = [
        (
            role.role,
            mode.mode,
            f"{mode.forwards:,}",
            percent(mode.share) if role.forwards else NONE,
            percent(mode.token_padding) if mode.forwards else NONE,
            percent(mode.request_padding) if mode.forwards else NONE,
        )
        for role in numbers.served_from
        for mode in role.modes
    ]
    covered = ((role.role, _part(role.covered, role.decodes)) for role in numbers.served_from)
    varying = ((each.role, _part(each.varying_covered, each.varying)) for each in numbers.served_from if each.varying)
    notes = tuple(f"{role}: uniform decodes covered: {part}" for role, part in covered)
    notes += tuple(f"{role}: decodes of varying lengths in full graphs: {part}" for role, part in varying)
    grid = Grid.of(("role", "mode", "forwards", "share", "token padding", "request padding"), rows, text=2)
    return Section(name="served", title="Served from", grid=grid, notes=notes)


def _part(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({percent(part / whole)})" if whole else NONE


def _fallbacks(numbers: RunSummary) -> Section:
    listed, rest = numbers.fallbacks[:MAX_FALLBACKS], numbers.fallbacks[MAX_FALLBACKS:]
    if not listed:
        ran = any(role.forwards for role in numbers.served_from)
        line = "none: a graph served every forward" if ran else "none: there was no forward"
        return Section(name="fallbacks", lines=(line,))
    eager = sum(fallback.forwards for fallback in numbers.fallbacks)
    total = sum(role.forwards for role in numbers.served_from)
    others = counted(len(rest), "other shape"), counted(sum(each.forwards for each in rest), "forward")
    rows = [
        (
            fallback.role,
            fallback.reason or UNKNOWN,
            f"{fallback.num_reqs:,}",
            f"{fallback.num_tokens:,}",
            "mixed" if fallback.query_len is None else f"{fallback.query_len:,}",
            f"{fallback.forwards:,}",
        )
        for fallback in listed
    ]
    line = f"eager: {_part(eager, total)} forwards, in {counted(len(numbers.fallbacks), 'shape')}"
    grid = Grid.of(("role", "reason", "requests", "tokens", "query length", "forwards"), rows, text=2)
    notes = (f"and {', '.join(others)}",) if rest else ()
    return Section(name="fallbacks", lines=(line, *_causes(numbers)), grid=grid, notes=notes)


def _causes(numbers: RunSummary) -> Iterator[str]:
    causes = grouped(numbers.fallbacks, lambda fallback: (fallback.role, fallback.reason or UNKNOWN))
    for (role, reason), fallbacks in causes.items():
        tokens = [fallback.num_tokens for fallback in fallbacks]
        span = f"{min(tokens):,}" + (f" to {max(tokens):,}" if max(tokens) > min(tokens) else "")
        yield f"{role}, {reason}: {counted(sum(f.forwards for f in fallbacks), 'forward')} of {span} tokens"


def _graphs(numbers: RunSummary) -> Section:
    unused, total = numbers.unused, len(numbers.graphs)
    named = "; ".join(f"{graph.role} {graph.entry}" for graph in unused[:MAX_NAMED])
    line = f"never used: {_part(len(unused), total)}" if total else "none: no graph was captured"
    if unused:
        line += f": {named}" + (f"; and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else "")
    used = [graph for graph in numbers.graphs[:MAX_NAMED] if graph.forwards]
    rows = [
        (
            u.graph.role,
            u.graph.entry.mode,
            extent(u.graph.entry),
            _topology(u.graph),
            f"{u.forwards:,}",
            *_size_of(u.graph),
        )
        for u in used
    ]
    grid = Grid.of(("most used", "mode", "graph", "fingerprint", "forwards", "nodes", "kernels"), rows, text=4)
    return Section(name="graphs", title="Graphs used", lines=(line,), grid=grid if used else None)


def _topology(graph: GraphCapture) -> str:
    return NONE if graph.fingerprint is None else graph.fingerprint.topology


def _size_of(graph: GraphCapture) -> tuple[str, str]:
    """Return how many nodes a graph has, and of how many different kernels, or operators."""
    found = graph.fingerprint
    return (NONE, NONE) if found is None else (f"{found.nodes:,}", f"{len(found.kernels):,}")


def _steps(report: RunReport) -> Section:
    tally, count = report.counts, report.counts.steps
    line = f"{NONE}: no step was taken"
    if count:
        line = (
            f"{count:,} steps of {tally.reqs / count:,.1f} requests and {tally.tokens / count:,.1f} tokens on average; "
            f"at most {tally.most_reqs:,} requests at once, {tally.most_waiting:,} waiting"
        )
    sampled = f"charts and rows show one of {report.every_step:,} steps; counts are of all"
    return Section(name="steps", lines=(line,), notes=(sampled,) if report.every_step > 1 else ())


def _acceptance(numbers: RunSummary) -> Iterator[Section]:
    acceptance = numbers.acceptance
    if acceptance is None:
        return
    grid = Grid.of(
        ("draft", "verified", "accepted", "share", *(["asked for"] if acceptance.synthetic else [])),
        (
            (
                str(number),
                f"{each.drafted:,}",
                f"{each.accepted:,}",
                NONE if each.rate is None else percent(each.rate),
                *([percent(acceptance.synthetic[number])] if acceptance.synthetic else []),
            )
            for number, each in enumerate(acceptance.positions)
        ),
        text=0,
    )
    line = f"accepted {_part(acceptance.accepted, acceptance.drafted)} drafted tokens"
    if acceptance.drafted == 0:
        line = "none: no draft token was verified"
    elif acceptance.length is not None:
        line += f"; a decode with drafts gained {acceptance.length:.2f} tokens, its own included"
    notes = ("synthetic: drawn by --seed, whatever the target says",) if acceptance.synthetic else ()
    yield Section(name="acceptance", lines=(line,), grid=grid if acceptance.drafted else None, notes=notes)


def _latency(report: RunReport, numbers: RunSummary) -> Section:
    rate = NONE if numbers.tokens_per_second is None else f"{numbers.tokens_per_second:,.1f} tokens/s"
    first = ", rank 0" if report.ranks is not None and has_replicas(report) else ""
    names = ("to first token", "per output token", "to last token", f"step{first}", f"host, per forward{first}")
    percentiles = zip(names, attrs.astuple(numbers.latency, recurse=False), strict=True)
    rows = ((name, *_percentiles(values)) for name, values in percentiles)
    lines = (
        f"output tokens: {numbers.output_tokens:,} in {seconds(report.serve_seconds)}, {rate}",
        f"requests: {numbers.finished:,} finished, {numbers.cut_off:,} cut off",
    )
    grid = Grid.of(("time", "measured", "p50", "p90", "p99", "max"), rows, text=1)
    bound = max((values.bound for values in attrs.astuple(numbers.latency, recurse=False) if values), default=0.0)
    notes = (f"percentiles are from histograms, within {percent(bound)} of the exact ones",) if bound else ()
    return Section(name="latency", lines=lines, grid=grid, notes=notes)


def _percentiles(values: Percentiles | None) -> tuple[str, ...]:
    if values is None:
        return ("0", *[NONE] * 4)
    return (f"{values.count:,}", *map(seconds, (values.p50, values.p90, values.p99, values.max)))
