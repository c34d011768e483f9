"""The batches of a step, as they are dispatched."""

from __future__ import annotations

import attrs
import numpy as np

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.runtime.execution.inputs import StepInputs, query_lens
from capture_planner.runtime.serving.inputs import active_loras
from capture_planner.runtime.serving.states import ScheduledBatch


def step_batch(role: Role, scheduled: ScheduledBatch, inputs: StepInputs) -> Batch:
    """Return the batch of the target or the draft prefill, as it is dispatched."""
    batch = target_batch(role, scheduled, 0 if role.is_drafter else active_loras(inputs))
    if inputs.num_tokens == scheduled.num_tokens:
        return batch
    query_len, longest = query_lens(np.diff(inputs.query_start_loc), prompts=scheduled.prompts > 0)
    return attrs.evolve(batch, num_tokens=inputs.num_tokens, query_len=query_len, max_query_len=longest)


def target_batch(role: Role, scheduled: ScheduledBatch, active_loras: int) -> Batch:
    """Return the batch of a role that runs the target's rows."""
    return Batch(
        role=role,
        num_reqs=scheduled.num_reqs,
        num_tokens=scheduled.num_tokens,
        query_len=scheduled.query_len,
        past_prompt=scheduled.prompts == 0,
        active_loras=active_loras,
        max_query_len=scheduled.max_query_len,
    )


def draft_decode_batch(scheduled: ScheduledBatch) -> Batch:
    return Batch.decode(Role.DRAFT_DECODE, scheduled.num_reqs, 1)


def is_full(dispatch: Dispatch) -> bool:
    """Say whether a FULL graph serves a batch."""
    return dispatch.entry is not None and dispatch.entry.num_reqs is not None
