"""Host time of preparing a forward: fill, padding and backends, and the library's own call beside it.

First as the runner does it, in a decode that is served. Then each role is staged by itself, as the
runner stages it where nothing can be taken over from the step before, with the values of a decode that
grows by a token each time. The device is waited for after each, untimed: what is measured is the host's
work, not the queue.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from time import perf_counter

import attrs
import numpy as np
import torch

from capture_planner.bench.record import Preparation
from capture_planner.bench.rig import Absence, Rig, query_len, serving_entry, trimmed
from capture_planner.bench.watch import Watch
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.text import counted
from capture_planner.runtime.execution.inputs import StepInputs
from capture_planner.runtime.execution.role import RoleRun
from capture_planner.runtime.runner import Runner


def preparation(rig: Rig, advance: Callable[[str], None]) -> tuple[Preparation, ...]:
    """Measure each role at each number of requests that a graph of it serves."""
    watch = Watch()
    found = []
    with rig.runner(trimmed(rig.plan, rig.sizes), registry=watch.registry(rig.registry)) as runner:
        runner.capture()
        for size in rig.sizes:
            steps = min(
                rig.effort.prepared, rig.plan.model.max_model_len - rig.prompt - query_len(rig.plan, size)
            )
            if steps < 1:
                raise Absence(
                    f"a model of {counted(rig.plan.model.max_model_len, 'token')} has no room for a decode"
                )
            served: Mapping[Role, float] = {}
            with rig.trying("preparation"):
                served = _served(rig, runner, size, steps)
            for role in runner.parts.roles.values():
                entry = serving_entry(runner.dispatcher, rig.plan, role.role, size)
                query = 1 if role.role is Role.DRAFT_DECODE else query_len(rig.plan, size)
                if entry is not None and role.role in served:
                    with rig.trying("preparation"):
                        step = served[role.role]
                        found.append(_measured(rig, role, watch, entry, size, query, steps, step))
            advance(counted(size, "request"))
    return tuple(found)


def _served(rig: Rig, runner: Runner, size: int, steps: int) -> Mapping[Role, float]:
    """Return the mean preparation of each role over a decode as it is served."""
    decoding = rig.decoding(runner, size, steps)
    try:
        forwards = decoding.forwards(steps)
    finally:
        decoding.end()
    spent: dict[Role, list[float]] = {}
    for forward in forwards:
        spent.setdefault(forward.role, []).append(forward.preparation / forward.repeats)
    return {role: statistics.mean(times) for role, times in spent.items()}


def _measured(
    rig: Rig,
    role: RoleRun,
    watch: Watch,
    entry: Entry,
    size: int,
    query: int,
    steps: int,
    step_seconds: float,
) -> Preparation:
    first = rig.prompt + query
    batch = Batch.decode(role.role, size, query)
    stages: list[float] = []
    prepares: list[float] = []
    stocks: list[float] = []
    # The step before the first is not counted: it fills what the largest graph left, and a library's own
    # call allocates and compiles.
    for step in range(-1, steps):
        inputs = inputs_at(rig, role, size, query, first + max(step, 0))
        watch.clear()
        _wait(rig)
        started = perf_counter()
        forward = role.step(batch, entry, inputs)
        role.stage_inputs(forward)
        role.prepare_backends(forward)
        ended = perf_counter()
        stock = watch.stock()
        if step >= 0:
            stages.append(ended - started)
            prepares.append(watch.prepare)
            stocks += () if stock is None else (stock,)
    _wait(rig)
    return Preparation(
        num_reqs=size,
        role=role.role,
        backends=tuple(group.plan.backend for group in role.groups),
        steps=steps,
        step=step_seconds,
        stage=statistics.median(stages),
        prepare=statistics.median(prepares),
        stock=statistics.median(stocks) if stocks else None,
    )


def _wait(rig: Rig) -> None:
    if rig.device.type == "cuda":
        torch.cuda.synchronize()


def inputs_at(rig: Rig, role: RoleRun, size: int, query: int, length: int) -> StepInputs:
    """Return the inputs of a decode of ``size`` requests of ``query`` tokens, each ``length`` long by then.

    Every request has its own pages, as far as the cache has so many; nothing reads what is in them.
    """
    shape = Entry(mode=GraphMode.FULL, num_tokens=size * query, num_reqs=size, query_len=query)
    pages = rig.pages
    each, width = pages.pages(rig.plan.model.max_model_len), pages.pages(length)
    table = 1 + (np.arange(size)[:, None] * each + np.arange(width)) % (pages.num_pages - 1)
    positions = np.tile(np.arange(length - query, length), size)
    page, offset = np.divmod(positions, pages.page_size)
    return attrs.evolve(
        role.warm_up_inputs(shape),
        positions=positions,
        seq_lens=np.full(size, length, dtype=np.int32),
        block_table=table.astype(np.int32),
        slot_mapping=table[np.repeat(np.arange(size), query), page] * pages.page_size + offset,
    )
