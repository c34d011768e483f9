"""The ranks of a run in its report: who waited for whom, and what ran otherwise because of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from capture_planner.codec import json_of, plain
from capture_planner.codec.plain import plain_some
from capture_planner.records.text import counted
from capture_planner.report.summary import Percentiles
from capture_planner.report.writing import Grid, Section, percent, seconds
from capture_planner.runtime.distribution import Distribution
from capture_planner.runtime.ranks.record import RankRecord, VectorCount
from capture_planner.runtime.session import RunReport

JOINT = frozenset({"run", "ranks", "acceptance", "latency"})
"""Sections whose numbers cover all replicas, once the report has the other ranks."""


def has_replicas(report: RunReport) -> bool:
    """Return whether several replicas ran. Forwards and steps are then counted on the first rank only."""
    return report.plan.parallel.data > 1


def of_first_rank(report: RunReport) -> str:
    """Return the suffix of a number that covers the first rank only; empty for one replica."""
    return " of rank 0" if has_replicas(report) else ""


def requests_told(report: RunReport) -> str:
    """Return the number of requests, with " of rank 0" while the report lacks the other ranks."""
    return counted(report.counts.requests, "request") + (of_first_rank(report) if report.ranks is None else "")


def labelled(report: RunReport, section: Section) -> Section:
    """Return the section, with "(rank 0)" in its title if its numbers cover the first rank only."""
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
    missing = size - len(record.rows)
    skew = Percentiles.of(Distribution.of(record.skews))
    lines = [f"{size} ranks: {counted(parallel.data, 'replica')} of {counted(parallel.tensor, 'tensor-parallel rank')}"]
    if skew is not None:
        lines.append(
            f"{counted(record.agreements, 'agreement')} of steps; from the first rank to the last, "
            f"p50 {seconds(skew.p50)}, p99 {seconds(skew.p99)}, max {seconds(skew.max)}"
        )
    rows = [
        (
            f"{row.rank}",
            row.host,
            f"{row.data}",
            f"{row.tensor}",
            f"{row.steps:,}",
            f"{row.idle_steps:,}",
            f"{row.output_tokens:,}",
            *(_agreed(row.waited, row.last, len(record.skews))),
            f"{row.eager_by_others:,}",
            f"{row.larger_by_others:,}",
        )
        for row in record.rows
    ]
    columns = ("rank", "host", "data", "tensor", "steps", "idle", "output tokens", "waited", "came last")
    yield Section(
        name="ranks",
        warnings=(f"{counted(missing, 'rank')} ended without a report",) if missing else (),
        lines=tuple(lines),
        grid=Grid(
            columns=(*columns, "eager by others", "larger by others"),
            right=frozenset((*columns[4:], "eager by others", "larger by others")),
            rows=tuple(rows),
        ),
        notes=()
        if record.agreements
        else ("tensor-parallel ranks wait for each other inside of their forwards, which is not measured",),
    )


def _agreed(waited: float, last: int, agreements: int) -> tuple[str, str]:
    return (seconds(waited), percent(last / agreements)) if agreements else ("", "")


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
        {**(plain(batch) if batch is not None else {}), **({} if captured else {"captured": False})} or None
        for batch, captured in pairs
    ]
    return {"role": vector.role.value, "steps": vector.steps, "ranks": ranks}
