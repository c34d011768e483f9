"""Traces of requests: arrivals and lengths, run through the model of a scheduler (``analysis.arrivals``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs

from capture_planner.analysis.arrivals import Pace, Simulation, for_role, latency_of, simulate
from capture_planner.analysis.trace import ALIASES, ParsedTrace, has_requests, trace_of
from capture_planner.errors import InvalidDocument, Problem
from capture_planner.measuring.traffic.source import RequestTrace, SourceCounts, SourceOptions
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import Deployment, decode_families, extra_slots
from capture_planner.records.model import Speculative
from capture_planner.records.spec import Limits, Lora, Parallel
from capture_planner.records.text import counted
from capture_planner.records.traffic import TrafficCount

DEFAULT_LIMITS = Limits(max_num_reqs=256, max_num_tokens=8192)

SCHEDULER = "batches are those of a simple scheduler"
"""How the note about the time of simulated steps begins."""

OVERLOADED_MS = 10_000
"""If half of the requests wait longer for their first token, more arrive than are served."""


@attrs.frozen(kw_only=True)
class TraceLimits:
    """A deployment of which only the limits are known."""

    limits: Limits = DEFAULT_LIMITS
    speculative: Speculative | None = None
    lora: Lora | None = None
    parallel: Parallel = attrs.field(factory=Parallel)


def is_trace(head: bytes) -> bool:
    """Say whether a text begins as a trace: with a header that has a column of each kind, or a request as JSON."""
    first = head.decode("utf-8", "replace").removeprefix("\ufeff").lstrip("\n\r").split("\n", 1)[0]
    cells = {cell.strip(' \t\r"').lower() for cell in first.split(",")}
    return all(cells & set(names) for names in ALIASES.values()) or has_requests(first)


def read_trace(text: str, name: str, options: SourceOptions) -> SourceCounts:
    """Return a scheduler's batches of a trace, or of a part with what runs by then; raises ``InvalidDocument``."""
    trace = trace_of(text, name)
    arrivals = tuple(sorted(trace.rows, key=lambda row: row.arrival))
    start, length = arrivals[0].arrival, arrivals[-1].arrival - arrivals[0].arrival
    first, last = (start + share * length for share in options.part)
    window = first, math.inf if options.part[1] >= 1 else last  # the last part goes on to the last token
    if not any(window[0] <= row.arrival < window[1] for row in trace.rows):
        message = f"no request arrives in the part from {options.part[0]:.4g} to {options.part[1]:.4g} of its time"
        raise InvalidDocument([Problem(file=name, message=message, remedy="read a larger part, or all")])
    deployment = options.deployment or TraceLimits()
    acceptance = acceptance_of(options)
    found = simulate(
        arrivals,
        deployment.limits,
        deployment.speculative,
        (options.pace or Pace.constant()).step_time,
        acceptance=acceptance,
        window=window,
    )
    # Batches with prompts have decodes too, whose number is not known. A schedule drafts fewer tokens in some batches.
    drafts = tuple(
        sum(count * each.num_reqs for each, count in found.counts.items() if (each.uniform_query_len or 1) > position)
        for position in range(1, len(acceptance) + 1)
    )
    return SourceCounts(
        format=f"trace of {len(trace.rows)} requests",
        batches=tuple(traffic_count(batch, count) for batch, count in found.counts.items()),
        blocks=tuple(tuple(traffic_count(*each) for each in block.items()) for block in found.blocks),
        trace=RequestTrace(arrivals, window),
        seconds=round(found.seconds, 6),
        drafted=drafts,
        accepted=tuple(round(share * number) for share, number in zip(acceptance, drafts, strict=True)),
        notes=tuple(_notes(trace, found, options, acceptance)),
    )


def acceptance_of(options: SourceOptions) -> tuple[float, ...]:
    """Return the share of steps in which the draft of each position is accepted; none where nothing says it."""
    speculative = None if options.deployment is None else options.deployment.speculative
    if speculative is None:
        return ()
    known = speculative.acceptance if options.acceptance is None else options.acceptance
    # The acceptance may have been measured with more drafts than the deployment makes.
    return tuple(known[: speculative.num_tokens])


def _notes(trace: ParsedTrace, found: Simulation, options: SourceOptions, acceptance: Sequence[float]) -> Iterator[str]:
    deployment = options.deployment or TraceLimits()
    limits, speculative = deployment.limits, deployment.speculative
    assumed = "" if options.deployment else "assumed limits, because none are given: "
    yield f"{assumed}{limits.max_num_reqs} requests and {limits.max_num_tokens} tokens in a batch"
    drafting = ""
    if acceptance:
        drafting = f", and a decode gets {sum(acceptance):.2f} drafts accepted"
    elif speculative is not None:
        drafting = ", and no draft is accepted, because nothing says how many are: give --acceptance"
    yield f"{SCHEDULER}: {(options.pace or Pace.constant()).words}{drafting}"
    if trace.failed:
        yield f"{counted(trace.failed, 'request')} that failed are left out"
    latency = latency_of([found])
    if latency is not None and latency.first_token_p50 > OVERLOADED_MS:
        yield (
            f"half of the requests wait {latency.first_token_p50 / 1000:,.0f} s and more for their first token: more "
            "arrive than such steps serve"
        )


def traffic_count(batch: Batch, count: int) -> TrafficCount:
    """Return how often a batch ran as a row of traffic."""
    return TrafficCount(
        role=batch.role,
        num_reqs=batch.num_reqs,
        num_tokens=batch.num_tokens,
        # Prompts that have the shape of a decode are none (law 5).
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
