"""Files of ours: observations, and traffic that was read before."""

from __future__ import annotations

from capture_planner.codec import Document
from capture_planner.measuring.traffic.source import SourceCounts, SourceOptions
from capture_planner.measuring.workers import speaker
from capture_planner.modes import Role
from capture_planner.records.observation import Observation
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount


def read_document(document: Document, options: SourceOptions) -> SourceCounts:
    """Return the counts of an observation or of a traffic file; raises ``InvalidDocument``."""
    if document.is_traffic:
        traffic = document.load(Traffic)
        return SourceCounts(
            format="traffic file",
            batches=traffic.batches,
            lines=traffic.lines,
            seconds=traffic.seconds,
            skipped=traffic.skipped,
            drafted=traffic.drafted,
            accepted=traffic.accepted,
            notes=traffic.notes,
        )
    return observed_counts(document.load(Observation))


def observed_counts(observation: Observation) -> SourceCounts:
    """Return the counts of an observation."""
    others = sum(role.other_batches for role in observation.roles)
    rounded = sum(role.rounded_batches for role in observation.roles)
    notes = {
        f"{counted(rounded, 'step')} of rare shapes are listed as larger ones: an observation is bounded": rounded,
        f"{counted(others, 'step')} of shapes that the observation does not list are not counted": others,
    }
    return SourceCounts(
        format="observation",
        batches=tuple(
            TrafficCount(
                role=role.role,
                num_reqs=batch.num_reqs,
                num_tokens=batch.num_tokens,
                query_len=batch.query_len if batch.past_prompt else None,
                past_prompt=batch.past_prompt,
                active_loras=batch.active_loras,
                count=batch.steps,
            )
            for role in observation.roles
            for batch in role.batches
            if batch.steps and batch.num_reqs and batch.num_tokens
        ),
        seconds=observation.seconds or None,
        drafted=observation.drafted,
        accepted=observation.accepted,
        notes=tuple(note for note, steps in notes.items() if steps),
        worker=(
            (observation.engine, observation.model, observation.world_size, *speaker(observation)),
            observation.rank,
        ),
    )


def read_run_report(data: dict[str, object], options: SourceOptions) -> SourceCounts:
    """Return the counts of what ``capture-planner run --format json`` printed: its forwards.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` where it is no such report.
    """
    forwards, steps = data["forwards"], data["steps"]
    assert isinstance(forwards, list) and isinstance(steps, list)
    first, last = (round(share * len(steps)) for share in options.part)
    chosen = {step["index"] for step in steps[first:last]}
    batches = []
    for forward in forwards:
        if forward["step"] in chosen:
            query_len = forward["query_len"]
            batch = TrafficCount(
                role=Role(forward["role"]),
                num_reqs=int(forward["num_reqs"]),
                num_tokens=int(forward["num_tokens"]),
                query_len=query_len,
                past_prompt=query_len is not None,
                count=int(forward["repeats"]),
            )
            batches.append(batch)
    seconds = sum(float(step["seconds"]) for step in steps[first:last])
    return SourceCounts(
        format="run report",
        batches=tuple(batches),
        seconds=round(seconds, 6) or None,
        notes=("accepted drafts by position are not in a run report",) if any(s["drafted"] for s in steps) else (),
    )
