"""The report of a run: sections for a terminal and a page, and its JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from capture_planner.codec import json_of, plain, plain_fields
from capture_planner.report.sections import alert, sections
from capture_planner.report.summary import Acceptance, GraphUse, RunSummary, ServedMode, summary
from capture_planner.report.writing import Chart, Report
from capture_planner.runtime.ledger import Accounts, Forward, RunReport

__all__ = ["run_report", "summary"]


def run_report(report: RunReport) -> Report:
    """Return the report of a run for ``terminal.tables`` and ``page.page``."""

    def drawn() -> tuple[Chart, ...]:
        from capture_planner.report.charts import charts

        return charts(report)

    numbers = summary(report)
    return Report(
        kind="run",
        title=report.model,
        alert=alert(report, numbers),
        alert_in_tables=True,
        sections=sections(report, numbers),
        charts=drawn,
        spec=report.plan.spec_digest,
    )


@json_of(RunReport)
def _run(report: RunReport) -> dict[str, Any]:
    """Return the JSON of a run. Seconds, bytes, shares from 0 to 1.

    ``model``, ``environment``, ``spec`` (digest), ``backends``, ``host``, ``interrupted``: what ran.
    ``captured``: totals, ``by`` role and mode, and all ``entries``, each with the forwards that it
    served; a graph that was dropped has ``reason`` and ``says``. ``memory``: what the run holds, and the
    device's ``accounts`` with their share ``apart``, null where graphs are recorded. ``served_from``: by
    role, with ``modes``. ``fallbacks``: eager forwards by role, reason and shape. ``acceptance``: null
    without a drafter. ``comparison``: what was compared with eager forwards, and the first ``difference``;
    null without a comparison. ``latency``: percentiles, each null where nothing was measured.
    ``throughput``. Then a row each in ``steps``, ``forwards`` and ``requests``, with the generated tokens.
    """
    numbers = summary(report)
    return {
        "model": report.model,
        "environment": report.plan.environment.name,
        "spec": report.plan.spec_digest,
        "backends": plain(report.backends),
        "host": plain(report.host),
        "interrupted": report.interrupted,
        "captured": _captured(report, numbers),
        "memory": {name: getattr(report, name) for name in ("weights", "kv_cache", "buffers", "workspaces")}
        | {"accounts": plain(numbers.accounts), "later": numbers.later},
        "served_from": plain(numbers.served_from),
        "fallbacks": plain(numbers.fallbacks),
        "acceptance": plain(numbers.acceptance),
        "latency": plain(numbers.latency),
        "throughput": {
            "seconds": report.serve_seconds,
            **{name: getattr(numbers, name) for name in ("output_tokens", "tokens_per_second", "finished", "cut_off")},
        },
        "comparison": plain(report.comparison),
        "steps": plain(report.steps),
        "forwards": plain(report.forwards),
        "requests": plain(report.served),
    }


@json_of(Accounts)
def _accounts(accounts: Accounts) -> dict[str, Any]:
    return plain_fields(accounts, "unexplained", "apart")


@json_of(ServedMode)
def _served_mode(served: ServedMode) -> dict[str, Any]:
    return plain_fields(served, "token_padding", "request_padding")


@json_of(Acceptance)
def _acceptance(acceptance: Acceptance) -> dict[str, Any]:
    return plain_fields(acceptance, "rate", "length")


@json_of(Forward)
def _forward(forward: Forward) -> dict[str, Any]:
    return plain_fields(forward, "mode")


@json_of(GraphUse)
def _used(used: GraphUse) -> dict[str, Any]:
    graph, waiver = used.graph, used.graph.waiver
    names = ("role", "entry", "seconds", "memory", "alone", "driver", "readings")
    return {name: plain(getattr(graph, name)) for name in names} | {
        "forwards": used.forwards,
        "reason": waiver and plain(waiver.reason),
        "says": waiver and waiver.message,
    }


def _captured(report: RunReport, numbers: RunSummary) -> dict[str, Any]:
    def total(name: str) -> int:
        return sum(getattr(kind, name) for kind in numbers.captured)

    dropped: Iterable[GraphUse] = (GraphUse(graph=graph, forwards=0) for graph in numbers.dropped)
    return {
        "planned": numbers.planned,
        "graphs": len(numbers.graphs),
        "dropped": len(numbers.dropped),
        "unused": len(numbers.unused),
        "seconds": report.capture_seconds,
        **{name: total(name) for name in ("memory", "alone", "driver")},
        "buffers": report.buffers,
        "kv_cache": report.kv_cache,
        "by": plain(numbers.captured),
        "entries": plain((*numbers.graphs, *dropped)),
    }
