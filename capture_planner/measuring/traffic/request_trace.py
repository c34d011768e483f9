"""Traces of requests: arrivals and lengths, run through the model of a scheduler (``analysis.arrivals``)."""

from __future__ import annotations

import attrs

from capture_planner.analysis.arrivals import batches_of, for_role
from capture_planner.analysis.trace import ALIASES, TraceRow, trace_rows
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.measuring.traffic.source import SourceCounts, SourceOptions
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import Deployment, decode_families, extra_slots
from capture_planner.records.model import Speculative
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner.records.traffic import TrafficCount

DEFAULT_LIMITS = Limits(max_num_reqs=256, max_num_tokens=8192)


@attrs.frozen(kw_only=True)
class TraceLimits:
    """A deployment of which only the limits are known."""

    limits: Limits = DEFAULT_LIMITS
    speculative: Speculative | None = None
    lora: Lora | None = None
    parallel: Parallel = attrs.field(factory=Parallel)


def is_trace(head: bytes) -> bool:
    """Say whether a text begins with the header of a trace: a column of each kind."""
    first = head.decode("utf-8", "replace").removeprefix("\ufeff").lstrip("\n\r").split("\n", 1)[0]
    cells = {cell.strip(' \t\r"').lower() for cell in first.split(",")}
    return all(cells & set(names) for names in ALIASES.values())


def part_of(rows: list[TraceRow], part: tuple[float, float]) -> list[TraceRow]:
    """Return the requests that arrive in a part of the time: ``(0, 2 / 3)`` is the first two thirds."""
    end = max(row.arrival for row in rows)
    first, last = (share * end for share in part)
    return [row for row in rows if first <= row.arrival and (row.arrival < last or part[1] >= 1)]


def read_trace(text: str, name: str, options: SourceOptions) -> SourceCounts:
    """Return the batches that the scheduler makes of a trace; raises ``InvalidDocument``."""
    rows = part_of(trace_rows(text, name), options.part)
    if not rows:
        message = f"no request arrives in the part from {options.part[0]:.4g} to {options.part[1]:.4g} of its time"
        raise InvalidDocument([Problem(file=name, message=message, remedy="read a larger part, or all")])
    deployment = options.deployment or TraceLimits()
    limits, speculative = deployment.limits, deployment.speculative
    met = batches_of(rows, deployment, step_seconds=options.step_seconds)
    assumed = "" if options.deployment else "assumed limits, because none are given: "
    notes = [
        f"{assumed}{limits.max_num_reqs} requests and {limits.max_num_tokens} tokens in a batch",
        f"batches are those of a simple scheduler: every step takes {options.step_seconds * 1000:g} ms"
        + ("" if speculative is None else ", and no draft is accepted"),
    ]
    counts = [traffic_count(batch, count) for batch, count in met.items()]
    arrivals = [row.arrival for row in rows]
    seconds = max(max(arrivals) - min(arrivals), sum(met.values()) * options.step_seconds)
    return SourceCounts(
        format=f"trace of {len(rows)} requests", batches=tuple(counts), seconds=round(seconds, 6), notes=tuple(notes)
    )


def traffic_count(batch: Batch, count: int) -> TrafficCount:
    """Return how often a batch ran as a row of traffic."""
    return TrafficCount(
        role=batch.role,
        num_reqs=batch.num_reqs,
        num_tokens=batch.num_tokens,
        query_len=batch.query_len if batch.past_prompt else None,
        past_prompt=batch.past_prompt,
        active_loras=batch.active_loras,
        count=count,
    )


def drafter_batches(target: list[TrafficCount], deployment: Deployment) -> list[TrafficCount]:
    """Return what the drafter runs where the target runs these batches; those of unknown shape are left out."""
    listed = []
    for role in (Role.DRAFT_PREFILL, Role.DRAFT_DECODE):
        families = decode_families(role, deployment)
        for count in target:
            if count.num_reqs is None or count.num_tokens is None or count.past_prompt is None:
                continue
            batch = Batch(
                role=Role.TARGET,
                num_reqs=count.num_reqs,
                num_tokens=count.num_tokens,
                query_len=count.query_len,
                past_prompt=count.past_prompt,
            )
            slots = extra_slots(deployment)
            passes = for_role({batch: count.count}, role, families, slots=slots)  # type: ignore[arg-type]
            listed += [traffic_count(each, number) for each, number in passes.items()]
    return listed
