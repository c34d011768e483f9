"""Draft decodes: one fused chain, or one graph again and again, its fields moved on in between."""

from __future__ import annotations

from time import perf_counter

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.records.batch import Batch
from capture_planner.runtime.execution.fields import Extents
from capture_planner.runtime.execution.role import Ran, RoleRun
from capture_planner.runtime.execution.step import Made, move_on


def run_chain(
    role: RoleRun,
    batch: Batch,
    values: Made,
    steps: int,
    *,
    max_model_len: int,
    filled: bool = False,
    answer: Dispatch | None = None,
) -> tuple[Ran, int]:
    """Run ``steps`` draft decodes of a batch from the values of the first.

    Returns what they were in all, times summed up, and how many forwards there were: 1 of a fused chain.
    ``filled``: the fields on the device hold the values already. ``answer`` overrides the dispatcher.
    """
    ran = role.run(batch, values, perf_counter(), filled=filled, answer=answer)
    entry = ran.dispatch.entry
    if entry is not None and entry.draft_steps is not None:
        return ran, 1
    made, host, seconds = ran.preparation, ran.host_seconds, ran.seconds
    real = Extents(tokens=batch.num_tokens, reqs=batch.num_reqs, pages=role.fields.capacity.pages)
    for _ in range(steps - 1):
        started = perf_counter()
        move_on(values, role.page_size, max_model_len)
        if not filled:
            role.follow(values)
        role.prepare(entry, real, ran.extents, values)
        again = role.again(ran.dispatch, entry, ran.extents, started)
        made, host = made + again.preparation, host + again.host_seconds
        seconds += again.seconds
    return attrs.evolve(ran, preparation=made, host_seconds=host, seconds=seconds), steps
