"""What benchmarks read of observations: graphs, their costs, and the share of eager steps, role by role."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from capture_planner import codec
from capture_planner.records.observation import Observation, ObservedRole


def newest(folder: Path) -> list[Observation]:
    """Return the newest observation of each worker in a folder, by replica and rank."""
    files = sorted(folder.glob("*.rank*.yaml"), key=lambda path: path.stat().st_mtime_ns)
    found = {(each.replica, each.rank): each for each in map(codec.load_observation, files)}
    return [found[place] for place in sorted(found)]


def eager_share(role: ObservedRole) -> float | None:
    """Return the part of a role's steps that ran without a graph; None where none ran."""
    return role.eager_steps / role.steps if role.steps else None


def eager_reasons(role: ObservedRole) -> dict[str, int]:
    """Return how many of the listed eager steps had which reason, the most frequent first."""
    reasons: Counter[str] = Counter()
    for batch in role.batches:
        if batch.reason is not None:
            reasons[batch.reason.value] += batch.steps
    return dict(reasons.most_common())


def step_milliseconds(role: ObservedRole) -> float | None:
    """Return the mean time of a step over the batches that were timed, by how often each ran."""
    timed = [(batch.milliseconds, batch.steps) for batch in role.batches if batch.milliseconds is not None]
    steps = sum(count for _, count in timed)
    return sum(milliseconds * count for milliseconds, count in timed) / steps if steps else None


def tokens_per_step(observation: Observation) -> float | None:
    """Return the mean of tokens that a request gets from a verification: one, and its accepted drafts."""
    verified = observation.drafted[0] if observation.drafted else 0
    return 1 + sum(observation.accepted) / verified if verified else None


def figures(observation: Observation) -> dict[str, Any]:
    """Return an observation as a benchmark's JSON has it."""
    return {
        "graphs": {role.role.value: len(role.graphs) for role in observation.roles},
        "num_graphs": observation.num_graphs,
        "capture_seconds": observation.capture_seconds,
        "graph_mib": observation.graph_mib,
        "kv_blocks": observation.kv_blocks,
        "steps": {role.role.value: role.steps for role in observation.roles},
        "eager_share": {role.role.value: eager_share(role) for role in observation.roles},
        "eager_reasons": {role.role.value: eager_reasons(role) for role in observation.roles},
        "step_milliseconds": {role.role.value: step_milliseconds(role) for role in observation.roles},
        "tokens_per_step": tokens_per_step(observation),
        "plan": observation.plan,
        "notes": list(observation.notes),
    }
