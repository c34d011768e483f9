"""What a run showed, in three lines at most: what ran from graphs, who waited for what, and what times include."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.modes import Reason
from capture_planner.records.text import counted
from capture_planner.report.run_ranks import of_first_rank, requests_told
from capture_planner.report.summary import RunSummary
from capture_planner.report.writing import percent, seconds, size
from capture_planner.runtime.ledger import Wait
from capture_planner.runtime.session import RunReport

MANY = 0.5
"""The share of unused graphs from which the verdict says why."""

FEW = 0.05
"""The share of eager forwards from which the verdict says what to change."""

_MORE_PAGES = "raise --memory-utilization, or give --pages"
_CHANGES = {
    Reason.SIZES: "plan sizes for them (sizes in the spec)",
    Reason.MEMORY: "raise --graph-memory or budget.memory, or plan fewer graphs",
    Reason.BUDGET: "raise the budget in the spec",
    Reason.LAZY: "raise capture.seconds_per_minute or capture.memory, or plan with traffic, for more graphs at start",
    Reason.MODE: "plan a mode with graphs for them",
}
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
        parts.append(f"most eager ones: {most.role.value}, {_reason(most.reason)}")
    graphs, unused = len(numbers.graphs), len(numbers.unused)
    if unused:
        parts.append(f"{unused:,} of {counted(graphs, 'graph')} served nothing" + _why_unused(report, unused, graphs))
    return "; ".join(parts)


def _reason(reason: Reason | None) -> str:
    return "for a reason that is not known" if reason is None else f"{reason.value}: {_CHANGES.get(reason, _EXPLAIN)}"


def _why_unused(report: RunReport, unused: int, graphs: int) -> str:
    most, limit, waited = report.counts.most_reqs, report.plan.limits.max_num_reqs, report.counts.waited
    if unused < MANY * graphs or most >= limit:
        return ""
    at_once = f": at most {most:,} of {limit:,} requests{of_first_rank(report)} ran at once"
    if waited:
        return f"{at_once}, and others waited"
    return f"{at_once}; send more (--requests, --rate), or plan fewer sizes"


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
        return f"pages of the KV cache, which has {size(report.kv_cache)}{each}: {_MORE_PAGES}"
    if wait is Wait.PLACES:
        among = f" of {replicas} replicas" if replicas > 1 else ""
        places = f"{plan.limits.max_num_reqs * replicas:,} places{among}"
        return f"one of {places}: raise limits.max_num_reqs, or lower --rate"
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
    if report.otherwise:
        yield (
            f"{report.otherwise:,} of {requests_told(report)} were answered otherwise than in the "
            "rehearsal, by rounding, and the drafter was wrong from there on: use --acceptance"
        )
    if report.compiled:
        yield (
            f"times include {seconds(sum(report.compiled))} in which {counted(len(report.compiled), 'kernel')} "
            "compiled: run again, with what is compiled on disk"
        )
