"""Chains of draft decodes: one fused graph, or one graph several times."""

from __future__ import annotations

from time import perf_counter

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.records.batch import Batch
from capture_planner.runtime.execution.inputs import StepInputs
from capture_planner.runtime.execution.role import ForwardTimes, RoleRun


def run_chain(
    role: RoleRun,
    batch: Batch,
    dispatch: Dispatch,
    inputs: StepInputs,
    steps: int,
    *,
    max_model_len: int,
    filled: bool = False,
) -> tuple[ForwardTimes, int]:
    """Run ``steps`` draft decodes of a batch from the inputs of the first.

    Returns the sum of their times, and how many forwards there were: 1 of a fused chain.

    :param filled: the fields on the device hold the inputs already.
    """
    times = role.run(batch, dispatch, inputs, perf_counter(), filled=filled)
    if dispatch.entry is not None and dispatch.entry.draft_steps is not None:
        return times, 1
    preparation, host, seconds = times.preparation, times.host_seconds, times.seconds
    step = role.step(batch, dispatch.entry, inputs)
    for _ in range(steps - 1):
        started = perf_counter()
        # Each forward ends with the common fields of the next one, on the device; the host follows.
        step = attrs.evolve(step, inputs=step.inputs.next_draft(max_model_len))
        if not filled:
            role.stage_derived(step)
        role.prepare_backends(step)
        times = role.replay_or_run(step, started)
        preparation += times.preparation
        host += times.host_seconds
        seconds += times.seconds
    return ForwardTimes(preparation, host, seconds), steps
