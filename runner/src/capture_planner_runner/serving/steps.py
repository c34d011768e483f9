"""One step: its batches and the graphs that serve them, planned before anything runs, and what is in flight after."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner_runner.execution.inputs import Array, StepInputs, query_lens
from capture_planner_runner.serving.inputs import DraftRows, active_adapters, own_prefill_counts
from capture_planner_runner.serving.speculative import Verification
from capture_planner_runner.serving.states import RequestStates, ScheduledBatch


# Without slots, since one is made at every step, and that is quicker.
@attrs.frozen(kw_only=True, eq=False, slots=False)
class PlannedStep:
    """One step as it is planned: each batch is made, and dispatched, here and nowhere else.

    Ranks, launch, warm-up and captures on first use read it. A step of no request on any rank has no batches.
    """

    scheduled: ScheduledBatch | None
    """The rows of the requests; None: this rank has none, and runs dummy batches where others have work."""
    batches: Mapping[Role, Batch]
    """The batch of each forward that runs; without draft decodes where k is less than 2."""
    dispatches: Mapping[Role, Dispatch]
    draft_tokens: int
    """k: tokens that are drafted for each request after this step."""
    drafts_on_device: bool = False
    """Whether verification and the drafter's fields are computed on the device."""
    needs_tokens: bool = False
    """Whether the host needs the tokens of the step in flight before it can launch this one."""
    is_steady: bool = True
    """Whether the target may run the graph of the step before, so that its fields can have advanced in it."""
    num_tokens_across_dp: Mapping[Role, Array] = attrs.field(factory=dict)
    """``int32[replicas]`` of each role: padded tokens of all replicas; empty for one replica."""
    joint: Mapping[Role, Batch] = attrs.field()
    """The batches that were dispatched: of replicas those that stand for all of them."""

    @joint.default
    def _own_batches(self) -> Mapping[Role, Batch]:
        return self.batches

    def across(self, role: Role, inputs: StepInputs) -> StepInputs:
        """Return a role's inputs with the tokens of all replicas, where there are several."""
        tokens = self.num_tokens_across_dp.get(role)
        return inputs if tokens is None else attrs.evolve(inputs, num_tokens_across_dp=tokens)

    @property
    def is_idle(self) -> bool:
        """Whether this rank runs dummy batches, because other ranks have requests."""
        return self.scheduled is None and bool(self.batches)

    @property
    def is_full(self) -> bool:
        """Whether FULL graphs serve all forwards."""
        return all(map(is_full, self.dispatches.values()))


def is_full(dispatch: Dispatch) -> bool:
    """Say whether a FULL graph serves a batch."""
    return dispatch.entry is not None and dispatch.entry.num_reqs is not None


def batch_of(role: Role, scheduled: ScheduledBatch, states: RequestStates, draft: DraftRows | None) -> Batch:
    """Return the batch of one role, which is known before anything of the step has run."""
    if role is Role.DRAFT_DECODE:
        return Batch.decode(role, scheduled.num_reqs, 1)
    num_tokens, loras = scheduled.num_tokens, 0
    query_len, max_query_len = scheduled.query_len, scheduled.max_query_len
    if role is Role.TARGET and states.has_adapters:
        loras = len(active_adapters(scheduled, states))
    elif role.is_drafter and draft is not None and draft.is_own:
        counts = own_prefill_counts(scheduled, states, draft)
        num_tokens = int(counts.sum())
        query_len, max_query_len = query_lens(counts, prompts=scheduled.prompts > 0)
    return Batch(
        role=role,
        num_reqs=scheduled.num_reqs,
        num_tokens=num_tokens,
        query_len=query_len,
        past_prompt=scheduled.prompts == 0,
        active_loras=loras,
        max_query_len=max_query_len,
    )


PendingTokens = Callable[[], Array]
"""Waits for values that the device still computes, and returns them."""


def copy_to_host(tensor: torch.Tensor) -> PendingTokens:
    """Start to copy a small tensor to the host, and return a function that waits for the copy."""
    if tensor.device.type == "cpu":
        here = tensor.numpy().copy()
        return lambda: here
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def arrived() -> Array:
        copied.synchronize()
        array: Array = pinned.numpy()
        return array

    return arrived


@attrs.frozen(kw_only=True, eq=False)
class PendingStep:
    """A step that is launched, whose tokens are not read yet."""

    index: int
    planned: PlannedStep
    scheduled: ScheduledBatch
    inputs: StepInputs
    started: float
    tokens: PendingTokens
    """``int64[T]``: the target's next token after each row that is read."""
    proposed: PendingTokens | None
    """``int64[states + 1, K]``: the drafts, where the drafter is launched too."""
    advanced: Verification | None
    """Advance of the states at launch, before the tokens; None: verification decides it."""
    is_on_device: bool
    """Whether the next step can be launched before the host has read anything of this one."""
