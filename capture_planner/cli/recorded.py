"""Vectors of data-parallel ranks that a run or an engine has recorded, for the command ``ranks``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from capture_planner.analysis.data_parallel import Submission, Vector
from capture_planner.cli.jsonl import vector_of
from capture_planner.codec import Document
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import InvalidDocument, InvalidValue, Problem
from capture_planner.modes import Role
from capture_planner.records.observation import Observation, ObservedRole, ObservedVector
from capture_planner.records.text import counted

MOST_SHOWN = 20
"""Vectors that are explained, of those that occurred most often."""


def recorded_vectors(file: str, dispatcher: Dispatcher, role: Role) -> list[tuple[str, Vector]]:
    """Return the recorded vectors of a role, the most frequent first, each with how often it occurred.

    Raises ``InvalidDocument`` for a file that is neither a run's report as JSON nor an observation, or that has no
    vectors of the role.
    """
    found = [(steps, title, vector) for steps, title, vector in _vectors(file, dispatcher) if vector.role is role]
    if not found:
        says = f"no vectors of {role.value}: a run of one replica, or an observation without data-parallel ranks"
        raise InvalidDocument([Problem(file=file, message=says)])
    found.sort(key=lambda each: -each[0])
    return [(title, vector) for _, title, vector in found]


def _vectors(file: str, dispatcher: Dispatcher) -> Iterator[tuple[int, str, Vector]]:
    report = _report(file)
    if report is None:
        observation = Document.read(file).load(Observation)
        for at, observed in enumerate(observation.roles):
            for number, each in enumerate(observed.vectors):
                with _in(file, "roles", at, "vectors", number):
                    vector = _observed(observed.role, each)
                yield each.steps, _title(observation, observed, each), vector
        return
    for number, row in enumerate(report):
        with _in(file, "ranks", "vectors", number, "ranks"):
            vector = vector_of(row["ranks"], dispatcher)
        yield row["steps"], f"in {counted(row['steps'], 'step')}", vector


@contextmanager
def _in(file: str, *path: str | int) -> Iterator[None]:
    """Raise the problems of a value with the file and the place that it is from."""
    try:
        yield
    except InvalidValue as error:
        raise InvalidDocument(attrs.evolve(each.under(path), file=file) for each in error.problems) from None


def _report(file: str) -> list[dict[str, Any]] | None:
    """Return the vectors of a run's report; None for a file that is no such report."""
    try:
        record = json.loads(Path(file).read_bytes())["ranks"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    vectors = record["vectors"] if isinstance(record, dict) else []
    return [each for each in vectors if isinstance(each, dict) and {"steps", "ranks"} <= each.keys()]


def _observed(role: Role, observed: ObservedVector) -> Vector:
    batches = (observed.batch(role, rank) for rank in range(observed.num_ranks))
    return Vector(role=role, ranks=tuple(Submission(batch=batch) for batch in batches))


def _title(observation: Observation, role: ObservedRole, observed: ObservedVector) -> str:
    """Say how often, and what the observed rank ran."""
    graph = "ran eager" if observed.graph is None else f"replayed {role.graphs[observed.graph].entry}"
    why = f" ({observed.reason.value})" if observed.graph is None and observed.reason is not None else ""
    return f"in {counted(observed.steps, 'step')}, in which rank {observation.rank} of the engine {graph}{why}"
