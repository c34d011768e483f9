"""The report of a run: sections for a terminal and a page, and its JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from capture_planner.codec import json_fields, json_of, plain
from capture_planner.codec.plain import plain_some
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import grouped
from capture_planner.records.text import counted
from capture_planner.report.writing import Cell, Grid, Report, Section, extent, noted, percent, seconds, size, warned
from capture_planner_runner.ledger.rows import Accounts, Forward, GraphCapture, RankRecord, VectorCount, Wait
from capture_planner_runner.ledger.session import Distribution, RunReport
from capture_planner_runner.numerics.record import (
    Comparison,
    Deviation,
    FieldSnapshot,
    LayerScale,
    OutputCheck,
    number,
    shown,
)
from capture_planner_runner.report.charts import charts
from capture_planner_runner.report.summary import (
    Acceptance,
    CapturedKind,
    GraphUse,
    Percentiles,
    PositionAcceptance,
    RunSummary,
    ServedMode,
    has_replicas,
    requests_told,
    summary,
    verdict,
)

MAX_VALUES = 8
"""Values of a field that are shown; the rest is counted."""


def comparison_sections(comparison: Comparison | None) -> Iterator[Section]:
    """Yield what was compared, and what differs where something does; nothing where nothing was to be."""
    if comparison is None:
        return
    difference = comparison.difference
    if difference is not None:
        token = "" if difference.token is None else f", token {difference.token}"
        whose = "padding, or no request's" if difference.request is None else f"{difference.request}{token}"
        error = "infinite" if difference.error is None else f"{difference.error:.2g}"
        chain = "" if difference.draft_step is None else f", draft decode {difference.draft_step}"
        tokens = f"{difference.padded_tokens} tokens after {difference.num_tokens}"
        facts = [
            ("where", difference.where),
            ("after", difference.after or "nothing: it is the first that is compared"),
            ("step", f"{difference.step}, {difference.role.value}{chain}"),
            ("entry", str(difference.entry)),
            ("padding", f"{tokens}, {difference.padded_reqs} requests after {difference.num_reqs}"),
            ("first row", f"row {difference.row}: {whose}"),
            ("graph", shown(difference.graph)),
            ("eager", shown(difference.eager)),
            ("largest error", f"{error}, and {difference.tolerance:g} is allowed; {counted(difference.rows, 'row')}"),
            ("requests", _short(difference.requests)),
        ]
        yield Section(
            name="difference",
            title="First wrong tensor",
            parts=(*warned(f"{difference.where}: the graph and an eager forward differ"), Grid.facts(facts)),
        )
        yield _metadata(difference.fields)
    lines = [
        f"{_counts(comparison.compared)} of {counted(comparison.steps, 'step')} compared with eager, and the same",
        f"{_counts(comparison.eager)} not compared: no graph served them",
    ]
    if comparison.near_ties:
        lines.append(
            f"{counted(comparison.near_ties, 'drafted token')} differ where no state does: two were as likely, "
            "and what came after in such a chain is not compared"
        )
    rows = [
        (
            error.tensor,
            f"{error.error:.1e}" if error.error else "0",
            f"{error.tolerance:g}",
            error.role.value,
            "" if error.layer is None else str(error.layer),
        )
        for error in comparison.largest
    ]
    columns = ("tensor", "largest error", "allowed", "role", "layer")
    grid = Grid(columns=columns, right=frozenset({"largest error", "allowed"}), rows=tuple(rows))
    yield Section(name="comparison", parts=(*tuple(lines), grid))


def _counts(forwards: Mapping[Role, int]) -> str:
    total = sum(forwards.values())
    parts = ", ".join(f"{count:,} {role.value}" for role, count in forwards.items() if count)
    return counted(total, "forward") + (f" ({parts})" if parts else "")


def _metadata(fields: Sequence[FieldSnapshot]) -> Section:
    rows = ((field.name, _short(field.real), _short(field.padding or ())) for field in fields)
    grid = Grid.of(("field", "batch", "padding"), rows)
    return Section(name="metadata", title="Metadata of that forward", parts=(grid,))


def _short(values: Any) -> str:
    """Write the first values of a list, rows of a table each in brackets; nothing for an empty one."""
    if not isinstance(values, list | tuple):
        return str(values)
    if not values:
        return ""
    more = [f"({len(values) - MAX_VALUES} more)"] if len(values) > MAX_VALUES else []
    return f"[{' '.join([*map(_short, values[:MAX_VALUES]), *more])}]"


# Verification -----------------------------------------------------------------------------------


MAX_SCALES = 8
"""Scales that are shown, the nearest to their bounds first."""

json_fields(OutputCheck, "passed", "resolution")
json_fields(LayerScale, "is_within")


def verification_sections(check: OutputCheck | None) -> Iterator[Section]:
    """Yield what was verified, with the numbers that the verdict rests on; nothing where nothing was to be."""
    if check is None:
        return
    rows = (("tokens", _deviation(check.tokens)), ("hidden states", _deviation(check.rows)))
    columns = ("verified", "compared", "within", "bound", "worst", "mean", "noise, worst", "noise, mean")
    grid = Grid.of(columns, ((name, *values) for name, values in rows), text=1)
    yield Section(
        name="verification",
        title="Verification",
        parts=(
            *warned(*check.faults),
            f"reference: dense forwards in {check.reference} over the served tokens; noise: {'; '.join(check.runs)}",
            # The first two lines are in the table.
            *check.measured[2:],
            grid,
        ),
    )
    nearest = sorted(check.scales, key=lambda scale: abs(scale.error) / scale.bound, reverse=True)
    if nearest:
        yield Section(
            name="scales",
            title="Scales of layers",
            parts=(
                Grid.of(
                    ("layer", "part", "served by", "rows", "error", "bound"),
                    (
                        (str(s.layer), s.part, s.served_by, f"{s.rows:,}", f"{s.error:+.3%}", f"{s.bound:.3%}")
                        for s in nearest[:MAX_SCALES]
                    ),
                    text=3,
                ),
            ),
        )


def _deviation(found: Deviation) -> tuple[str, ...]:
    measured = (found.bound, found.worst, found.mean, found.noise_worst, found.noise_mean)
    return f"{found.compared:,}", f"{found.within:,}", *map(number, measured)


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


def _proved(report: RunReport) -> str | None:
    """Return what was compared and found to hold; None where nothing was, or where something does not hold."""
    checks = [each for each in (report.verification, report.comparison) if each is not None]
    if not checks or not all(check.passed for check in checks):
        return None
    held = ["tokens and hidden states are the model's"] if report.verification else []
    held += ["graphs compute what eager forwards do"] if report.comparison else []
    return f"verified: {', and '.join(held)}"


def sections(report: RunReport, numbers: RunSummary) -> tuple[Section, ...]:
    """Return the parts of the report in the order in which they are read."""
    found = (
        _subject(report, verdict(report, numbers)),
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


def _subject(report: RunReport, lines: tuple[str, ...]) -> Section:
    plan = report.plan
    facts = [
        ("plan", f"{plan.model.name} on {plan.environment.name}, {counted(plan.num_graphs, 'graph')}"),
        ("model", report.model),
        ("spec", plan.spec_digest),
        ("backends", ", ".join(f"{name} {version}" for name, version in report.backends.items()) or NONE),
        *report.host.items(),
        *_before(report),
    ]
    return Section(name="run", title=f"Run of {plan.model.name}", parts=(*lines, Grid.facts(facts)))


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
    # A run that was stopped while it captured: no graph of the rest was tried, so none has a reason.
    missing = planned - total - len(dropped)
    if missing > 0:
        warnings.append(f"not captured: {counted(missing, 'graph')} of the plan, which had no turn")
    return Section(
        name="captured",
        parts=(
            *warned(*warnings),
            f"{total} of {counted(planned, 'graph')}{when} in {seconds(report.capture_seconds)}; "
            f"they grew their pool by {size(memory)}, alone they would take {size(alone)}",
            f"persistent buffers {size(report.buffers)}, KV cache {size(report.kv_cache)}",
            Grid.of(
                ("role", "mode", "graphs", "time", "pool growth", "alone", "smallest", "largest"),
                map(_kind, kinds),
                right=("graphs", "time", "pool growth", "alone"),
            ),
        ),
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
    return Section(name="served", title="Served from", parts=(grid, *noted(*notes)))


def _part(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({percent(part / whole)})" if whole else NONE


def _fallbacks(numbers: RunSummary) -> Section:
    listed, rest = numbers.fallbacks[:MAX_FALLBACKS], numbers.fallbacks[MAX_FALLBACKS:]
    if not listed:
        ran = any(role.forwards for role in numbers.served_from)
        line = "none: a graph served every forward" if ran else "none: there was no forward"
        return Section(name="fallbacks", parts=(line,))
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
    note = f"and {', '.join(others)}" if rest else None
    return Section(name="fallbacks", parts=(line, *_causes(numbers), grid, *noted(note)))


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
            NONE if u.graph.fingerprint is None else u.graph.fingerprint.topology,
            f"{u.forwards:,}",
            *_size_of(u.graph),
        )
        for u in used
    ]
    grid = Grid.of(("most used", "mode", "graph", "fingerprint", "forwards", "nodes", "kernels"), rows, text=4)
    return Section(name="graphs", title="Graphs used", parts=(line, grid))


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
    return Section(name="steps", parts=(line, *noted(sampled if report.every_step > 1 else None)))


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
    note = "synthetic: drawn by --seed, whatever the target says" if acceptance.synthetic else None
    yield Section(name="acceptance", parts=(line, grid if acceptance.drafted else None, *noted(note)))


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
    note = f"percentiles are from histograms, within {percent(bound)} of the exact ones" if bound else None
    return Section(name="latency", parts=(*lines, grid, *noted(note)))


def _percentiles(values: Percentiles | None) -> tuple[str, ...]:
    if values is None:
        return ("0", *[NONE] * 4)
    return (f"{values.count:,}", *map(seconds, (values.p50, values.p90, values.p99, values.max)))


# Captured on first use --------------------------------------------------------------------------


def first_use_sections(report: RunReport, numbers: RunSummary) -> Iterator[Section]:
    """Yield the section of a lazy plan: each graph that was tried, when, what it took, and why it was left out.

    Those that were not tried, since nothing of the memory was left, are counted.
    """
    lazy = report.lazy
    if lazy is None:
        return
    late = [graph for graph in report.captured if graph.step is not None]
    tried = [graph for graph in late if graph.tried]
    refused = [(graph, graph.waiver) for graph in tried if graph.waiver is not None]
    untried = f"{counted(lazy.untried, 'graph')} not tried: nothing of capture.memory is left; raise it in the spec"
    uses = {(use.graph.role, use.graph.entry): use.forwards for use in numbers.graphs}
    rows = (
        (
            graph.role,
            graph.entry.mode,
            extent(graph.entry),
            f"{graph.step:,}",
            seconds(graph.seconds),
            size(graph.taken),
            "refused" if graph.waiver else f"{uses[graph.role, graph.entry]:,}",
        )
        for graph in tried
    )
    more = f"{seconds(lazy.left)} are left" if lazy.left > 0 else f"{seconds(-lazy.left)} more than that were taken"
    yield Section(
        name="first-use",
        title="Captured on first use",
        parts=(
            *warned(*(f"{graph.role.value}: {waiver.message}" for graph, waiver in refused)),
            *warned(untried if lazy.untried else None),
            f"{len(tried) - len(refused)} of {counted(report.plan.num_lazy, 'graph')} in {seconds(lazy.seconds)}; "
            f"{lazy.asked:,} were asked for and have had no turn, {lazy.unused:,} were not asked for",
            f"budget: {size(lazy.taken)} of {size(lazy.memory)} are taken; of {lazy.seconds_per_minute:g} s a minute "
            f"{more}",
            Grid.of(("role", "mode", "graph", "after step", "time", "memory", "forwards"), rows, text=3),
        ),
    )


# Memory -----------------------------------------------------------------------------------------

MOST_APART = 0.05
"""The ledger is flagged where it is further than this share from what the device reports."""

_APART = (
    "what captures took is {} apart from what the device reports: another process took or gave back memory meanwhile; "
    "run on a device that nothing else uses"
)

MAX_GRAPHS = 10
"""Graphs that are listed with their memory, the largest first; the rest is counted."""


def memory_sections(report: RunReport, numbers: RunSummary) -> Iterator[Section]:
    """Yield the sections: where the memory went, and the graphs that took most of it."""
    accounts, later, rest = numbers.accounts, numbers.later, report.buffers - report.workspaces
    rows = [_memory_row(kind) for kind in numbers.captured if not kind.on_first_use]
    # These account for captures at start alone, so they come before those on first use.
    rows += [] if accounts is None else _others(accounts)
    rows += [_memory_row(kind) for kind in numbers.captured if kind.on_first_use]
    yield Section(
        name="memory",
        parts=(
            *warned(_APART.format(percent(accounts.apart)) if accounts and accounts.apart > MOST_APART else None),
            f"weights {size(report.weights)}, KV cache {size(report.kv_cache)}, fields and outputs "
            f"{size(rest)}, workspaces {size(report.workspaces)}",
            *_cache(report),
            _reconciled(report, accounts),
            Grid.of(("what", "mode", "allocator", "driver", "sum"), rows, text=2),
            *noted(None if later is None else _later(later)),
        ),
    )
    yield from _by_graph(numbers)


def _memory_row(kind: CapturedKind) -> tuple[Cell, ...]:
    what = f"{kind.role.value}, on first use" if kind.on_first_use else kind.role
    return what, kind.mode, *map(_change, (kind.memory, kind.driver, kind.memory + kind.driver))


def _later(lost: int) -> str:
    change = f"the device lost {size(lost)}" if lost >= 0 else f"{size(-lost)} of the device came back"
    return f"from the last capture to the end, {change}"


def _others(accounts: Accounts) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield a row for all that is no graph, and the sum that the device must confirm."""
    if accounts.dropped:
        yield "graphs that were dropped", "", size(accounts.dropped), "", size(accounts.dropped)
    warm_up, modules = accounts.warm_up, accounts.modules
    yield "warm-ups, and modules they load", "", _change(warm_up), _change(modules), _change(warm_up + modules)
    if accounts.unexplained:
        yield "others on the device, meanwhile", "", "", "", _change(accounts.unexplained)
    yield "gone from the device", "", "", "", _change(accounts.device)


def _change(bytes_: int) -> str:
    """Write by how much memory went down, or what came back."""
    return size(bytes_) if bytes_ >= 0 else f"{size(-bytes_)} came back"


def _reconciled(report: RunReport, accounts: Accounts | None) -> str:
    if not report.captured:
        return "no graph was captured"
    if accounts is None:
        return "no device was read: graphs that are recorded lie in the host's memory"
    return (
        f"captures took {_change(accounts.device)} of the device; with {_change(accounts.explained)} the ledger is "
        f"{percent(accounts.apart)} apart from it"
    )


def _cache(report: RunReport) -> Iterator[str]:
    """Yield why the KV cache is as large as it is, and whether graphs took what was expected."""
    chosen = report.cache_memory
    if chosen is None:
        return
    took = Accounts.of(report.captured)
    compared = ""
    # On a CPU no device was read, and a prediction has nothing to be held against.
    if chosen.predicted and took is not None:
        compared = f"; graphs took {size(took.graphs + took.driver)}, and {size(chosen.predicted)} were expected"
    yield f"KV cache: {chosen.reason}{compared}"


def _by_graph(numbers: RunSummary) -> Iterator[Section]:
    # Most graphs fit into what larger ones left in their pool, and take nothing.
    taking = (used.graph for used in numbers.graphs if used.graph.memory or used.graph.driver)
    graphs = sorted(taking, key=lambda graph: -(graph.memory + graph.driver))
    if not graphs:
        return
    listed = graphs[:MAX_GRAPHS]
    rest = len(numbers.graphs) - len(listed)
    memory = sum(graph.memory + graph.driver for graph in graphs[MAX_GRAPHS:])
    rows: list[tuple[Cell, ...]] = [
        (g.role, g.entry.mode, extent(g.entry), *map(_change, (g.memory, g.driver, g.alone))) for g in listed
    ]
    grid = Grid.of(("graph of", "mode", "size", "allocator", "driver", "alone"), rows, text=3)
    note = f"and {counted(rest, 'other graph')}, which took {_change(memory)}" if rest else None
    yield Section(name="memory-by-graph", title="Memory by graph", parts=(grid, *noted(note)))


# Adapters ---------------------------------------------------------------------------------------


def adapter_sections(report: RunReport) -> Iterator[Section]:
    """Yield a section where the plan has LoRA; it says so where the run had no adapters."""
    lora = report.plan.lora
    if lora is None:
        return
    if not report.adapters:
        entries = [entry for role in report.plan.roles for entry in role.entries]
        unused = sum(entry.active_loras > 0 for entry in entries)
        warning = (
            f"the plan has LoRA and the run had no adapters: {unused} of {counted(len(entries), 'graph')} are for "
            "batches with adapters, and hold none; give --adapters N"
        )
        yield Section(name="adapters", parts=(*warned(warning),))
        return
    named = "; ".join(report.adapters[:MAX_NAMED])
    more = f"; and {len(report.adapters) - MAX_NAMED} more" if len(report.adapters) > MAX_NAMED else ""
    tally = report.counts
    rows = [
        (str(active), "eager" if graph < 0 else f"for {graph}", f"{count:,}")
        for (active, graph), count in sorted(tally.adapters.items())
    ]
    yield Section(
        name="adapters",
        parts=(
            f"{counted(len(report.adapters), 'adapter')}, at most {lora.max_active} at once: {named}{more}",
            f"{tally.with_adapter} of {counted(tally.requests, 'request')} had one",
            Grid.of(("active in the batch", "graph", "forwards"), rows, text=0),
            *noted("next to requests with an adapter, those without one count as one more"),
        ),
    )


# Ranks ------------------------------------------------------------------------------------------

JOINT = frozenset({"run", "ranks", "acceptance", "latency"})
"""Sections whose numbers cover all replicas, once the report has the other ranks."""


def labelled(report: RunReport, section: Section) -> Section:
    """Return the section, with "(rank 0)" in its title if its numbers cover the first rank only."""
    # Replicas run forwards together, so the first rank's stand for all; requests are summed.
    if not has_replicas(report) or section.name in ({"run"} if report.ranks is None else JOINT):
        return section
    return attrs.evolve(section, title=f"{section.title} (rank 0)")


def rank_sections(report: RunReport) -> Iterator[Section]:
    """Yield a section where several ranks ran the plan."""
    record = report.ranks
    if record is None:
        return
    parallel = report.plan.parallel
    size = parallel.tensor * parallel.data
    # A rank that ended early has sent no row.
    missing = size - len(record.rows)
    skew = Percentiles.of(Distribution.of(record.skews))
    lines = [f"{size} ranks: {counted(parallel.data, 'replica')} of {counted(parallel.tensor, 'tensor-parallel rank')}"]
    if skew is not None:
        lines.append(
            f"{counted(record.agreements, 'agreement')} of steps; from the first rank to the last, "
            f"p50 {seconds(skew.p50)}, p99 {seconds(skew.p99)}, max {seconds(skew.max)}"
        )
    # Of a long run, times are kept of the last agreements alone.
    agreements = len(record.skews)
    rows = [
        (
            f"{row.rank}",
            row.host,
            f"{row.data}",
            f"{row.tensor}",
            f"{row.steps:,}",
            f"{row.idle_steps:,}",
            f"{row.output_tokens:,}",
            *((seconds(row.waited), percent(row.last / agreements)) if agreements else ("", "")),
            f"{row.eager_by_others:,}",
            f"{row.larger_by_others:,}",
        )
        for row in record.rows
    ]
    columns = ("rank", "host", "data", "tensor", "steps", "idle", "output tokens", "waited", "came last")
    others = ("eager by others", "larger by others")
    unmeasured = "tensor-parallel ranks wait for each other inside of their forwards, which is not measured"
    yield Section(
        name="ranks",
        parts=(
            *warned(f"{counted(missing, 'rank')} ended without a report" if missing else None),
            *lines,
            Grid.of((*columns, *others), rows, text=4),
            *noted(None if record.agreements else unmeasured),
        ),
    )


@json_of(RankRecord)
def _record(record: RankRecord) -> dict[str, Any]:
    skew = Percentiles.of(Distribution.of(record.skews))
    return {
        "rows": [attrs.asdict(row) for row in record.rows],
        "agreements": record.agreements,
        "skew": plain(skew),
        **plain_some(record, "vectors", "vectors_dropped"),
    }


@json_of(VectorCount)
def _vector(vector: VectorCount) -> dict[str, Any]:
    """Return the vector as ``capture-planner ranks --vectors`` reads it, and its steps."""
    pairs = zip(vector.batches, vector.captured, strict=True)
    ranks = [
        # A replica with graphs and without a batch is null in a vector.
        {**(plain(batch) if batch is not None else {}), **({} if captured else {"captured": False})} or None
        for batch, captured in pairs
    ]
    return {"role": vector.role.value, "steps": vector.steps, "ranks": ranks}


__all__ = ["run_report", "summary"]


def run_report(report: RunReport) -> Report:
    """Return the report of a run for ``terminal.tables`` and ``page.page``."""
    numbers = summary(report)
    return Report(
        kind="run",
        title=f"Run of {report.plan.model.name}",
        alert=alert(report, numbers),
        proved=_proved(report),
        alert_in_tables=True,
        sections=sections(report, numbers),
        charts=partial(charts, report),
        spec=report.plan.spec_digest,
    )


@json_of(RunReport)
def _run(report: RunReport) -> dict[str, Any]:
    """Return the JSON of a run. Seconds, bytes, shares from 0 to 1.

    ``verdict``: three sentences at most. ``model``, ``environment``, ``spec`` (digest), ``backends``, ``adapters``,
    ``host``, ``interrupted``: what ran. ``stage``: what was under way when it was stopped, and ``fault``: the rank
    that stopped it, or empty. ``ranks``: ``rows`` by rank, ``skew`` of their agreements and the ``vectors`` of replicas
    with the ``steps`` of each; null for a single process. Of replicas, requests, drafts and tokens are summed, and all
    else is the first rank's. ``captured``: totals of all captured graphs, those on first use included, ``by`` role and
    mode, and all ``entries``, each with the forwards that it served and its ``fingerprint``, and how many steps had run
    when it was captured on first use (``step``, null at start); a graph that was dropped has ``reason`` and
    ``message``, and is in no total but ``dropped`` and ``seconds``. ``lazy``: the budget of captures on first use, and
    what is left of it; null where all is captured at start. ``memory``: what the run holds, and the
    device's ``accounts`` with their share ``apart``, null where graphs are recorded. ``served_from``: by
    role, with ``modes``. ``fallbacks``: eager forwards by role, reason and shape. ``acceptance``: null
    without a drafter. ``comparison``: what was compared with eager forwards, and the first ``difference``;
    null without a comparison. ``verification``: bounds, errors and faults, null without one. ``latency``:
    percentiles, each null where nothing was measured, with the ``bound`` of their error. ``throughput``. ``waited``:
    requests by what they waited for. ``warm_up``, ``compiled``: what ran and what was compiled before and while the
    clock ran. Then a row each in ``steps``, ``forwards`` and ``requests``, with the generated tokens; of long runs
    one of ``every_step`` and ``every_request``. ``ended``: on the host's monotonic clock.
    """
    numbers = summary(report)
    return {
        "verdict": list(verdict(report, numbers)),
        "model": report.model,
        "environment": report.plan.environment.name,
        "spec": report.plan.spec_digest,
        **plain_some(report, "backends", "adapters", "host", "interrupted", "stage", "fault"),
        "captured": _captured_json(report, numbers),
        "memory": plain_some(report, "weights", "kv_cache", "buffers", "workspaces")
        | plain_some(numbers, "accounts", "later")
        | {"chosen": plain(report.cache_memory)},
        **plain_some(numbers, "served_from", "fallbacks", "acceptance", "latency"),
        "throughput": {"seconds": report.serve_seconds}
        | plain_some(numbers, "output_tokens", "tokens_per_second", "finished", "cut_off"),
        "waited": {wait.value: report.counts.waited[wait] for wait in Wait},
        **plain_some(
            report, "ranks", "mismatched_requests", "lazy", "warm_up", "compiled", "comparison", "verification"
        ),
        **plain_some(report, "every_step", "every_request", "steps", "forwards"),
        "requests": plain(report.served),
    }


json_fields(Accounts, "unexplained", "apart")
json_fields(ServedMode, "token_padding", "request_padding")
json_fields(Acceptance, "rate", "length")
json_fields(PositionAcceptance, "rate")
json_fields(Forward, "mode")


@json_of(GraphUse)
def _used(used: GraphUse) -> dict[str, Any]:
    graph, waiver = used.graph, used.graph.waiver
    return plain_some(
        graph, "role", "entry", "seconds", "memory", "alone", "driver", "readings", "fingerprint", "step"
    ) | {"forwards": used.forwards, "reason": waiver and plain(waiver.reason), "message": waiver and waiver.message}


def _captured_json(report: RunReport, numbers: RunSummary) -> dict[str, Any]:
    dropped = (GraphUse(graph=graph, forwards=0) for graph in numbers.dropped)
    # `capture_seconds` is of the captures at start.
    late = (graph.seconds for graph in report.captured if graph.step is not None)
    return {
        "planned": numbers.planned,
        "graphs": len(numbers.graphs),
        "dropped": len(numbers.dropped),
        "unused": len(numbers.unused),
        "seconds": report.capture_seconds + math.fsum(late),
        **{name: sum(getattr(kind, name) for kind in numbers.captured) for name in ("memory", "alone", "driver")},
        **plain_some(report, "buffers", "kv_cache"),
        "by": plain(numbers.captured),
        "entries": plain((*numbers.graphs, *dropped)),
    }
