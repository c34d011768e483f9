"""The report of a run: sections for a terminal and a page, and its JSON."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from capture_planner.codec import json_fields, json_of, plain
from capture_planner.codec.plain import plain_some
from capture_planner.report.writing import Report
from capture_planner_runner.ledger import Accounts, Forward, Wait
from capture_planner_runner.report.charts import charts
from capture_planner_runner.report.sections import alert, sections
from capture_planner_runner.report.summary import (
    Acceptance,
    GraphUse,
    PositionAcceptance,
    RunSummary,
    ServedMode,
    summary,
)
from capture_planner_runner.report.verdict import verdict
from capture_planner_runner.session import RunReport

__all__ = ["run_report", "summary"]


def run_report(report: RunReport) -> Report:
    """Return the report of a run for ``terminal.tables`` and ``page.page``."""
    numbers = summary(report)
    return Report(
        kind="run",
        title=report.model,
        alert=alert(report, numbers),
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
    one of ``every_step`` and ``every_request``.
    """
    numbers = summary(report)
    return {
        "verdict": list(verdict(report, numbers)),
        "model": report.model,
        "environment": report.plan.environment.name,
        "spec": report.plan.spec_digest,
        **plain_some(report, "backends", "adapters", "host", "interrupted", "stage", "fault"),
        "captured": _captured(report, numbers),
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


def _captured(report: RunReport, numbers: RunSummary) -> dict[str, Any]:
    dropped = (GraphUse(graph=graph, forwards=0) for graph in numbers.dropped)
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
