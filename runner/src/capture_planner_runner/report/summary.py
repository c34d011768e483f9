"""The numbers of a run: what was captured, what served each forward, how long it took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Entry
from capture_planner.records.batch_space import decode_families
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner.report.writing import MODES, percent, seconds, size
from capture_planner_runner.ledger.rows import Accounts, GraphCapture, Wait
from capture_planner_runner.ledger.session import BOUND, Distribution, ModeTally, RunReport, Tally


@attrs.frozen(kw_only=True)
class Percentiles:
    """Percentiles by nearest rank: the smallest value that so many percent of the values do not exceed."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float
    bound: float = 0.0
    """How far p50, p90 and p99 may be from the exact ones, as a share of them; 0: they are exact."""

    @classmethod
    def of(cls, values: Distribution) -> Percentiles | None:
        """Return the percentiles of a distribution; None where nothing is in it."""
        if not values.count:
            return None
        p50, p90, p99 = values.percentiles((50, 90, 99))
        return cls(
            count=values.count, p50=p50, p90=p90, p99=p99, max=values.max, bound=0.0 if values.is_exact else BOUND
        )


def nearest_rank(ordered: Sequence[float], percent: int) -> float:
    """Return a percentile (1 to 100) of at least one value, in ascending order."""
    return ordered[-(-percent * len(ordered) // 100) - 1]


@attrs.frozen(kw_only=True)
class CapturedKind:
    """The graphs of one role and mode that were captured at start, or on first use."""

    role: Role
    mode: GraphMode
    on_first_use: bool
    """Whether they were captured while requests were served."""
    graphs: int
    seconds: float
    memory: int
    """Bytes by which they grew their pool."""
    alone: int
    """Bytes that they would take in pools of their own, added up."""
    driver: int
    """Bytes of the device that they took outside the allocator."""
    largest: Entry
    smallest: Entry


@attrs.frozen(kw_only=True)
class ServedMode:
    """The forwards of a role that ran in one mode. Rows are summed over them."""

    mode: GraphMode
    forwards: int
    share: float
    """Of the role's forwards: the hit rate of the mode. 0 where the role had no forward."""
    real_tokens: int
    padded_tokens: int
    real_reqs: int
    padded_reqs: int

    @property
    def token_padding(self) -> float:
        """The share of the computed token rows that is padding."""
        return padding(self.real_tokens, self.padded_tokens)

    @property
    def request_padding(self) -> float:
        """The share of the request rows that is padding; 0 for PIECEWISE, which does not pad requests."""
        return padding(self.real_reqs, self.padded_reqs)


def padding(real: int, padded: int) -> float:
    """Return the padded share of ``real + padded`` rows; 0 where there are no rows."""
    return padded / (real + padded) if padded else 0.0


@attrs.frozen(kw_only=True)
class ServedRole:
    """What served the forwards of one role."""

    role: Role
    forwards: int
    modes: tuple[ServedMode, ...]
    """FULL, PIECEWISE and NONE, in that order."""
    decodes: int
    """Forwards whose batch was a uniform decode."""
    covered: int
    """Decodes that a graph served."""
    varying: int
    """Forwards whose batch was a decode of requests that differ, where the plan has such decodes; else 0."""
    varying_covered: int
    """Those that a full graph served."""


@attrs.frozen(kw_only=True)
class Fallback:
    """Eager forwards of one role, reason and shape."""

    role: Role
    reason: Reason | None
    num_reqs: int
    num_tokens: int
    query_len: int | None
    forwards: int


@attrs.frozen(kw_only=True)
class GraphUse:
    """One captured graph, and how many forwards it served."""

    graph: GraphCapture
    forwards: int


@attrs.frozen(kw_only=True)
class PositionAcceptance:
    """What became of the drafts at one place of a step: the first ones, the second ones, and so on."""

    drafted: int
    accepted: int
    """With all drafts before them."""

    @property
    def rate(self) -> float | None:
        """The share of the drafts at this place that were accepted with all before them; as vLLM counts."""
        return self.accepted / self.drafted if self.drafted else None


@attrs.frozen(kw_only=True)
class Acceptance:
    """What became of the draft tokens."""

    drafted: int
    accepted: int
    decodes: int
    """Requests with drafts, summed over the steps; one that ended before its step was read does not count."""
    positions: tuple[PositionAcceptance, ...]
    """By the place of a draft in its step."""
    synthetic: tuple[float, ...]
    """The shares that were asked for, see ``Options.acceptance``; empty: the target verified the drafts."""

    @property
    def rate(self) -> float | None:
        """Accepted draft tokens by drafted ones; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def length(self) -> float | None:
        """Tokens that a decode with drafts gained: those accepted and one more; vLLM's mean acceptance length."""
        return 1 + self.accepted / self.decodes if self.decodes else None


@attrs.frozen
class Latency:
    """Percentiles in seconds; each is None where nothing was measured."""

    first_token: Percentiles | None
    """From the queue to the first token, by request."""
    per_token: Percentiles | None
    """Time of an output token after the first, the mean of each finished request with two or more."""
    finished: Percentiles | None
    """From the queue to the last token, by finished request."""
    step: Percentiles | None
    forward_host: Percentiles | None
    """Host time of a forward: dispatch, fill, padding, backend preparation and guards."""


@attrs.frozen(kw_only=True)
class RunSummary:
    """The numbers of one run. Bytes and seconds; a fused or repeated forward counts as its repeats."""

    planned: int
    """Graphs that the plan wanted."""
    captured: tuple[CapturedKind, ...]
    """All captured graphs: first those captured at start, then those captured on first use."""
    dropped: tuple[GraphCapture, ...]
    """Graphs that could not be captured."""
    accounts: Accounts | None
    """Where the device's memory went during capture; None where no device was read."""
    later: int | None
    """Bytes that the device lost from the last capture to the end of serving; None: as above."""
    served_from: tuple[ServedRole, ...]
    fallbacks: tuple[Fallback, ...]
    """All of them, the most frequent first."""
    graphs: tuple[GraphUse, ...]
    """Every captured graph, the most used first."""
    acceptance: Acceptance | None
    """None where the plan has no drafter."""
    latency: Latency
    output_tokens: int
    tokens_per_second: float | None
    finished: int
    cut_off: int

    @property
    def unused(self) -> tuple[GraphCapture, ...]:
        """Captured graphs that served no forward, in capture order."""
        return tuple(used.graph for used in self.graphs if not used.forwards)


def summary(report: RunReport) -> RunSummary:
    """Return the numbers of a run, of any length: also of one that stopped before anything ran."""
    captured = [graph for graph in report.captured if graph.waiver is None]
    tally = report.counts
    last = next((graph.readings for graph in reversed(report.captured) if graph.readings is not None), None)
    kinds = (tally.first_token, tally.per_token, tally.last_token, tally.step_seconds, tally.host_seconds)
    # Of an entry that a plan lists twice (lint finds it), the later capture replaced the earlier one.
    latest = {(graph.role, graph.entry): graph for graph in captured}
    used = [
        GraphUse(graph=graph, forwards=tally.uses[key] if latest[key] is graph else 0)
        for graph in captured
        for key in [(graph.role, graph.entry)]
    ]
    return RunSummary(
        planned=report.plan.num_graphs,
        captured=tuple(_captured(captured)),
        dropped=tuple(graph for graph in report.captured if graph.waiver is not None),
        accounts=Accounts.of(report.captured),
        later=(report.served_reading.used - last[-1].used if report.served_reading and last else None),
        served_from=tuple(_served_from(report.plan, tally)),
        fallbacks=tuple(
            Fallback(
                role=role, reason=reason, num_reqs=num_reqs, num_tokens=num_tokens, query_len=query_len, forwards=count
            )
            for (role, reason, num_reqs, num_tokens, query_len), count in tally.fallbacks.most_common()
        ),
        graphs=tuple(sorted(used, key=lambda graph: -graph.forwards)),
        acceptance=None
        if report.plan.speculative is None
        else Acceptance(
            drafted=tally.drafted_tokens,
            accepted=tally.accepted_tokens,
            # Each decode with drafts has a first one.
            decodes=tally.drafted[0] if tally.drafted else 0,
            positions=tuple(
                PositionAcceptance(drafted=drafted, accepted=accepted)
                for drafted, accepted in zip(tally.drafted, tally.accepted, strict=True)
            ),
            synthetic=report.acceptance,
        ),
        latency=Latency(*map(Percentiles.of, kinds)),
        output_tokens=tally.output_tokens,
        tokens_per_second=tally.output_tokens / report.serve_seconds if report.serve_seconds > 0 else None,
        finished=tally.finished,
        cut_off=tally.requests - tally.finished,
    )


def entry_order(entry: Entry) -> tuple[int, int, int, int]:
    """Return what entries are ordered by where they are shown by size."""
    return entry.num_tokens, entry.num_reqs or 0, entry.active_loras, entry.draft_steps or 0


def _captured(graphs: Sequence[GraphCapture]) -> Iterable[CapturedKind]:
    for late, role, mode in product((False, True), Role, MODES):
        kind = [g for g in graphs if (g.step is not None, g.role, g.entry.mode) == (late, role, mode)]
        if kind:
            entries = sorted((graph.entry for graph in kind), key=entry_order)
            yield CapturedKind(
                role=role,
                mode=mode,
                graphs=len(kind),
                seconds=math.fsum(graph.seconds for graph in kind),
                memory=sum(graph.memory for graph in kind),
                alone=sum(graph.alone for graph in kind),
                driver=sum(graph.driver for graph in kind),
                largest=entries[-1],
                smallest=entries[0],
                on_first_use=late,
            )


def _served_from(plan: Plan, tally: Tally) -> Iterable[ServedRole]:
    vary = () if plan.speculative is None else plan.speculative.varying_decodes
    for role in Role:
        modes = {mode: tally.modes.get((role, mode), ModeTally()) for mode in MODES}
        total = sum(mode.forwards for mode in modes.values())
        if total or any(role_plan.role is role for role_plan in plan.roles):
            yield ServedRole(
                role=role,
                forwards=total,
                modes=tuple(
                    ServedMode(mode=mode, share=counts.forwards / total if total else 0.0, **attrs.asdict(counts))
                    for mode, counts in modes.items()
                ),
                decodes=tally.decodes[role],
                covered=tally.covered[role],
                varying=tally.varying[role] if role in vary else 0,
                varying_covered=tally.varying_covered[role] if role in vary else 0,
            )


def first_token_times(report: RunReport) -> list[float]:
    """Return each request's time to its first token, in seconds."""
    return [request.first_token for request in report.served if request.first_token is not None]


def per_token_times(report: RunReport) -> list[float]:
    """Return each finished request's mean time of a token after the first, in seconds."""
    return [request.per_token for request in report.served if request.per_token is not None]


def has_replicas(report: RunReport) -> bool:
    """Return whether several replicas ran. Forwards and steps are then counted on the first rank only."""
    return report.plan.parallel.data > 1


def of_first_rank(report: RunReport) -> str:
    """Return the suffix of a number that covers the first rank only; empty for one replica."""
    return " of rank 0" if has_replicas(report) else ""


def requests_told(report: RunReport) -> str:
    """Return the number of requests, with " of rank 0" while the report lacks the other ranks."""
    return counted(report.counts.requests, "request") + (of_first_rank(report) if report.ranks is None else "")


MANY = 0.5
"""The share of unused graphs from which the verdict says why."""

FEW = 0.05
"""The share of eager forwards, or of captures in the time of serving, from which the verdict says so."""

_CHANGES = {
    Reason.SIZES: "plan sizes for them (sizes in the spec)",
    Reason.MEMORY: "raise --graph-memory or budget.memory, or plan fewer graphs",
    Reason.BUDGET: "raise the budget in the spec",
    Reason.LAZY: "no graph that is captured at start serves them (CP047)",
    Reason.MODE: "plan a mode with graphs for them",
}
_NO_GRAPHS = "run without --eager"
_LATE_MEMORY = "raise capture.memory"
_EXPLAIN = "explain PLAN says why"


def verdict(report: RunReport, numbers: RunSummary) -> tuple[str, ...]:
    """Return the lines, the most important first."""
    return tuple(line for line in (_graphs(report, numbers), _waits(report), "; ".join(_remarks(report))) if line)


def _graphs(report: RunReport, numbers: RunSummary) -> str:
    total = sum(role.forwards for role in numbers.served_from)
    if not total:
        return "nothing ran"
    eager = sum(fallback.forwards for fallback in numbers.fallbacks)
    parts = [f"graphs served {percent(1 - eager / total)} of {counted(total, 'forward')}{of_first_rank(report)}"]
    if eager > FEW * total:
        most = numbers.fallbacks[0]
        parts.append(f"most eager ones: {most.role.value}, {_reason(report, most)}")
    graphs, unused = len(numbers.graphs), len(numbers.unused)
    if unused:
        parts.append(f"{unused:,} of {counted(graphs, 'graph')} served nothing" + _why_unused(report, unused, graphs))
    lazy = report.lazy
    if lazy is not None and lazy.asked and lazy.left <= 0:
        parts.append(f"{counted(lazy.asked, 'graph')} had no turn: raise capture.seconds_per_minute")
    return "; ".join(parts)


def _reason(report: RunReport, eager: Fallback) -> str:
    reason = eager.reason
    if reason is None:
        return "for a reason that is not known"
    return f"{reason.value}: {_change(report, eager.role, reason)}"


def _change(report: RunReport, role: Role, reason: Reason) -> str:
    """Return what gives forwards of a role a graph."""
    # The plan has graphs, and no capture was tried: the run was asked to be eager.
    if reason is Reason.MODE and report.plan.num_graphs and report.lazy is None and not report.captured:
        return _NO_GRAPHS
    # Graphs at start and on first use have budgets of their own: name the one that was too small.
    refused = (
        [
            done
            for done in report.captured
            if done.role is role and done.waiver is not None and done.waiver.reason is Reason.MEMORY
        ]
        if reason is Reason.MEMORY
        else []
    )
    if any(done.step is not None for done in refused):
        at_start = any(done.step is None for done in refused)
        return f"{_LATE_MEMORY}, and {_CHANGES[reason]}" if at_start else _LATE_MEMORY
    return _CHANGES.get(reason, _EXPLAIN)


def _why_unused(report: RunReport, unused: int, graphs: int) -> str:
    most, limit = report.counts.most_reqs, report.plan.limits.max_num_reqs
    # The limit of requests was reached, so a lack of requests is not the reason.
    if unused < MANY * graphs or most >= limit:
        return ""
    ran = f": at most {most:,} of {limit:,} requests{of_first_rank(report)} ran at once"
    if _lacks_tokens(report):
        return f"{ran}; raise limits.max_num_tokens, or plan fewer sizes"
    if report.counts.waited:
        return f"{ran}, and others waited"
    return f"{ran}; send more at once, or plan fewer sizes"


def _lacks_tokens(report: RunReport) -> bool:
    """Say whether a step had no more requests for want of tokens: all places were taken, or more decodes do not fit."""
    most, limit = report.counts.most_reqs, report.plan.limits.max_num_reqs
    fit = [family.requests.upto_count(limit) or 0 for family in decode_families(Role.TARGET, report.plan)]
    return most < limit and (report.counts.waited[Wait.PLACES] > 0 or max(fit, default=limit) <= most)


def _waits(report: RunReport) -> str:
    tally = report.counts
    waits = ", ".join(
        f"{count:,} of {requests_told(report)} waited for {_missing(report, wait)}"
        for wait, count in tally.waited.most_common(1)
    )
    others = tally.waited.total() - max(tally.waited.values(), default=0)
    return waits + (f"; {others:,} for other reasons" if others else "")


def _missing(report: RunReport, wait: Wait) -> str:
    """Return what was missing, and what to change."""
    plan = report.plan
    # Without the rows of other ranks, the counts are of this replica.
    replicas = 1 if report.ranks is None else plan.parallel.data
    each = " in each replica" if replicas > 1 else ""
    if wait is Wait.PAGES:
        is_share = report.cache_memory is not None and report.cache_memory.share is not None
        more = "raise --memory-utilization, or give --pages" if is_share else "raise --pages"
        return f"pages of the KV cache, which has {size(report.kv_cache)}{each}: {more}"
    if wait is Wait.PLACES:
        among = f" of {replicas} replicas" if replicas > 1 else ""
        limit = "max_num_tokens" if _lacks_tokens(report) else "max_num_reqs"
        slower = f", or {report.slower}" if report.slower else ""
        return f"one of {plan.limits.max_num_reqs * replicas:,} places{among}: raise limits.{limit}{slower}"
    if wait is Wait.STATES:
        return "a row of recurrent states: raise states.rows in the plan"
    most = 0 if plan.lora is None else plan.lora.max_active
    return f"one of {most:,} active adapters{each}: raise lora.max_active"


def _remarks(report: RunReport) -> Iterator[str]:
    if report.acceptance:
        rates = ", ".join(f"{rate:g}" for rate in report.acceptance)
        yield f"acceptance is synthetic ({rates}): the tokens are not the model's"
    if report.mismatched_requests:
        yield (
            f"{report.mismatched_requests:,} of {requests_told(report)} were answered differently than in the "
            "rehearsal, by rounding, and the drafter was wrong from there on: use --acceptance"
        )
    late = sum(done.step is not None for done in report.captured)
    if report.lazy is not None and report.lazy.seconds > FEW * report.serve_seconds:
        yield f"times include {seconds(report.lazy.seconds)} of {counted(late, 'capture')} on first use"
    if report.compiled:
        yield (
            f"times include {seconds(sum(report.compiled))} in which {counted(len(report.compiled), 'kernel')} "
            "compiled: run again, with what is compiled on disk"
        )
