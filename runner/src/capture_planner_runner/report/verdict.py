"""What a run showed, in three lines at most: what ran from graphs, who waited for what, and what times include."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.modes import Reason, Role
from capture_planner.records.batch_space import decode_families
from capture_planner.records.text import counted
from capture_planner.report.writing import percent, seconds, size
from capture_planner_runner.ledger import GraphCapture, Wait
from capture_planner_runner.report.summary import Fallback, RunSummary, of_first_rank, requests_told
from capture_planner_runner.session import RunReport

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
    return tuple(line for line in (_graphs(report, numbers), _waits(report), _times(report)) if line)


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
    if reason is Reason.MODE and report.plan.num_graphs and report.lazy is None and not report.captured:
        return _NO_GRAPHS
    # Graphs at start and on first use have budgets of their own: name the one that was too small.
    refused = _refused(report, role) if reason is Reason.MEMORY else []
    if any(done.step is not None for done in refused):
        at_start = any(done.step is None for done in refused)
        return f"{_LATE_MEMORY}, and {_CHANGES[reason]}" if at_start else _LATE_MEMORY
    return _CHANGES.get(reason, _EXPLAIN)


def _refused(report: RunReport, role: Role) -> list[GraphCapture]:
    """Return the graphs of a role that did not fit into memory."""
    return [
        done
        for done in report.captured
        if done.role is role and done.waiver is not None and done.waiver.reason is Reason.MEMORY
    ]


def _why_unused(report: RunReport, unused: int, graphs: int) -> str:
    most, limit = report.counts.most_reqs, report.plan.limits.max_num_reqs
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


def _times(report: RunReport) -> str:
    return "; ".join(_remarks(report))


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
