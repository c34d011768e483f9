"""Reports of ``launch --auto``: a start, and the journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner.report.writing import Grid, Report, Section, Tone, TonedText
from capture_planner_tuner.auto.decisions import StartDecision, short
from capture_planner_tuner.journal import Event, JournalRecord


def start_lines(decision: StartDecision, plan: Plan | None, observed_into: Path | None) -> Iterator[str]:
    """Yield what a start of ``launch --auto`` prints: what was observed, what was decided, and what runs.

    :param plan: the plan that runs; None: the engine by itself.
    """
    yield f"observed: {decision.observed}"
    yield f"decided: {decision.event.value}: {decision.says}"
    runs = "the engine by itself"
    if plan is not None and decision.plan is not None:
        runs = f"{short(decision.plan)}, {counted(plan.num_graphs, 'graph')}"
        if plan.promise is not None:
            after, before = plan.promise.after.mean_step_ms, plan.promise.before.mean_step_ms
            runs += f"; {after:.2f} ms a step promised, {before:.2f} without it"
    yield f"runs: {runs}" + ("" if observed_into is None else f", observed into {observed_into}")


_EVENT_TONES: dict[Event, Tone] = {Event.APPLY: "good", Event.KEEP: "good", Event.PUT_ASIDE: "bad"}


def journal_report(records: Sequence[JournalRecord]) -> Report:
    """Return the records of ``launch --auto`` in their order; without any, a sentence."""
    rows: list[tuple[str, ...]] = []
    for record in records:
        plan = "by itself" if record.plan is None else short(record.plan).removeprefix("plan ")
        decision = record.decision.value.replace("_", " ")
        tone = _EVENT_TONES.get(record.decision)
        decision = decision if tone is None else TonedText(decision, tone)
        rows.append((str(record.run), record.time, decision, plan, "; ".join(_reasons(record))))
    grid = Grid.of(("run", "time", "decision", "plan", "why"), rows, right=("run",))
    parts = (grid,) if rows else ("the journal is empty: nothing was started",)
    section = Section(name="journal", title="", parts=parts)
    return Report(kind="journal", title="The journal of launch --auto", sections=(section,))


def _reasons(record: JournalRecord) -> Iterator[str]:
    if record.verdict is not None:
        yield f"promise {record.verdict.value.replace('_', ' ')}"
    if record.reason:
        yield record.reason
    if record.after_ms is not None and record.before_ms is not None:
        yield f"promised {record.after_ms:.2f} ms a step, {record.before_ms:.2f} without it"
    if record.decision is Event.END:
        yield "it had captured its graphs" if record.captured else "before it had captured its graphs"
        yield "ended by a signal" if record.interrupted else f"exit code {record.exit_code}"
