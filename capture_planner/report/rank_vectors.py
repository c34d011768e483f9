"""What data-parallel ranks of an engine ran together, as an observation has it: tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from capture_planner.analysis.data_parallel import shape_text
from capture_planner.analysis.rank_vectors import explain_share
from capture_planner.codec import plain
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner.records.observation import Observation, ObservedRole, ObservedVector
from capture_planner.records.text import counted
from capture_planner.report.terminal import ran_text, table_of

NO_VECTORS = "no vector of several ranks is in this observation: one rank ran, or the engine's observer records none"


def _listed(observation: Observation, role: Role | None) -> Iterator[tuple[ObservedRole, ObservedVector, Entry | None]]:
    for each in observation.roles:
        for vector in each.vectors if role in (None, each.role) else ():
            yield each, vector, None if vector.graph is None else each.graphs[vector.graph].entry


def vectors_json(observation: Observation, role: Role | None = None) -> dict[str, Any]:
    """Return each vector with what all ranks ran and why, by rank; of one role, or of all."""
    vectors = [
        {
            "role": seen.role.value,
            "steps": vector.steps,
            "mode": (GraphMode.NONE if entry is None else entry.mode).value,
            "entry": plain(entry),
            "reason": plain(vector.reason),
            "ranks": [
                {
                    "num_reqs": vector.num_reqs[rank],
                    "num_tokens": vector.num_tokens[rank],
                    "query_len": vector.query_len[rank],
                    "past_prompt": vector.past_prompt[rank],
                    "alone": vector.modes[rank].value,
                    "says": explain_share(seen.role, vector, rank, entry),
                }
                for rank in range(vector.num_ranks)
            ],
        }
        for seen, vector, entry in _listed(observation, role)
    ]
    others = sum(each.other_vectors for each in observation.roles if role in (None, each.role))
    return {"vectors": vectors, "other_steps": others, "idle_steps": observation.idle_steps}


def vectors_table(observation: Observation, role: Role | None = None) -> RenderableType:
    """Each vector as a table by rank, the most frequent first; and how many steps are of others."""
    parts: list[RenderableType] = []
    for seen, vector, entry in _listed(observation, role):
        table = table_of("rank", "brings", "alone", "because")
        for rank in range(vector.num_ranks):
            batch = vector.batch(seen.role, rank)
            brings = "idle" if batch is None else shape_text(batch)
            alone = ran_text(vector.modes[rank])
            table.add_row(str(rank), brings, alone, explain_share(seen.role, vector, rank, entry))
        ran = ran_text(GraphMode.NONE) if entry is None else Text(str(entry), style=ran_text(entry.mode).style)
        title = Text.assemble(f"{seen.role}, {counted(vector.steps, 'step')} -> ", ran)
        parts += [Text("")] if parts else []
        parts += [title, Padding(table, (0, 0, 0, 2))]
    others = sum(each.other_vectors for each in observation.roles if role in (None, each.role))
    if not parts:
        return Text(NO_VECTORS)
    if others:
        parts.append(Text(f"and {counted(others, 'step')} of vectors that are not listed"))
    if observation.idle_steps:
        parts.append(Text(f"{counted(observation.idle_steps, 'step')} without work: a dummy batch ran along"))
    return Group(*parts)
