"""Warming up: steps of the shapes that a workload will have, before the clock starts.

The workload is scheduled as it will be, with tokens that are made up; a step is run once for each shape that no FULL
graph serves, and the others are counted as if they had been. One step is run in any case, and one that drafts: kernels
outside of the graphs prepare and verify it. So kernels are compiled, and libraries have loaded what they load on first
use.
"""

from __future__ import annotations

from time import perf_counter

import attrs
import numpy as np

from capture_planner.modes import Role
from capture_planner.runtime.execution.inputs import StepInputs
from capture_planner.runtime.serving.batches import draft_decode_batch, is_full, step_batch
from capture_planner.runtime.serving.launching import StepLauncher
from capture_planner.runtime.serving.pending import PendingStep
from capture_planner.runtime.serving.states import ScheduledBatch

Shape = tuple[int, int, int | None, bool, int, int]
"""Requests, tokens, query length, whether there are prompts, drafts, and active adapters of a step."""


@attrs.define(eq=False)
class WarmUpLauncher(StepLauncher):
    """Runs a step for each shape that needs it while there is time, and makes up the tokens of all others.

    :param deadline: of ``perf_counter``, after which nothing more is run.
    :param tokens: what the target says, and what is drafted; different ones, so that no draft is kept.
    """

    _deadline: float = attrs.field(kw_only=True)
    _tokens: tuple[int, int] = attrs.field(kw_only=True, default=(1, 0))
    shapes: set[Shape] = attrs.Factory(set)
    """Those that needed it so far."""
    ran: int = 0

    def launch(self, scheduled: ScheduledBatch, started: float) -> PendingStep:
        inputs = self._host_inputs(scheduled)
        batch = step_batch(Role.TARGET, scheduled, inputs)
        shape = *batch_shape(scheduled), batch.active_loras
        if shape not in self.shapes and (self._is_first(scheduled) or not self._served_whole(scheduled, inputs)):
            self.shapes.add(shape)
            if perf_counter() < self._deadline:
                self.ran += 1
                return super().launch(scheduled, started)
        return self._made_up(scheduled, inputs, started)

    def _is_first(self, scheduled: ScheduledBatch) -> bool:
        """Say whether a step is the first with draft decodes, or the first without."""
        return all((drafts > 1) is not (scheduled.draft_tokens > 1) for *_, drafts, _ in self.shapes)

    def _host_inputs(self, scheduled: ScheduledBatch) -> StepInputs:
        """Return the inputs with any tokens where the real ones are on the device: steps that are made up leave none.

        Then no row is corrected by what an earlier request left there.
        """
        inputs = super()._host_inputs(scheduled)
        if self._parts.outcome is None or inputs.input_ids is None:
            return inputs
        return attrs.evolve(inputs, input_ids=np.maximum(inputs.input_ids, 0))

    def _served_whole(self, scheduled: ScheduledBatch, inputs: StepInputs) -> bool:
        """Say whether FULL graphs serve all forwards of a step, as far as that is known before it runs."""
        roles = [role for role in (Role.TARGET, Role.DRAFT_PREFILL) if role in self._parts.roles]
        found = [self._dispatcher.dispatch(step_batch(role, scheduled, inputs)) for role in roles]
        if scheduled.draft_tokens > 1 and Role.DRAFT_DECODE in self._parts.roles:
            found.append(self._dispatcher.dispatch(draft_decode_batch(scheduled)))
        return all(map(is_full, found))

    def _made_up(self, scheduled: ScheduledBatch, inputs: StepInputs, started: float) -> PendingStep:
        index, self._count, self._advanced = self._count, self._count + 1, None
        said, drafted = self._tokens
        state = self._parts.state
        return PendingStep(
            index=index,
            scheduled=scheduled,
            inputs=inputs,
            started=started,
            tokens=lambda: np.full(scheduled.num_tokens, said, dtype=np.int64),
            draft_decodes=None,
            proposed=None if state is None else lambda: np.full(tuple(state.proposed.shape), drafted, dtype=np.int64),
            promised=self._promised(scheduled, inputs) if state is None else None,
            is_on_device=state is None or self._drafts_on_device(self._draft_decodes(scheduled)),
        )


def batch_shape(scheduled: ScheduledBatch) -> tuple[int, int, int | None, bool, int]:
    """Return what decides which kernels a step runs, adapters apart."""
    has_prompts = scheduled.prompts > 0
    return scheduled.num_reqs, scheduled.num_tokens, scheduled.query_len, has_prompts, scheduled.draft_tokens
