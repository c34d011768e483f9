"""Warming up: steps of the shapes that a workload will have, before the clock starts.

The workload is scheduled as it will be, with made-up tokens. A step is run once for each shape that no FULL graph
serves, so that kernels are compiled and libraries have loaded what they load on first use; the others are counted as if
they had been run. The first step runs in any case, and so does the first that drafts several tokens: kernels outside of
the graphs prepare and verify it.
"""

from __future__ import annotations

import functools
from time import perf_counter

import attrs
import numpy as np

from capture_planner.modes import Role
from capture_planner_runner.execution.inputs import StepInputs
from capture_planner_runner.serving.launching import StepLauncher
from capture_planner_runner.serving.states import ScheduledBatch
from capture_planner_runner.serving.steps import PendingStep, PlannedStep

Shape = tuple[int, int, int | None, bool, int, int]
"""Requests, tokens, query length, whether all are past their prompts, active adapters, and k of a step."""


@attrs.define(eq=False, kw_only=True)
class WarmUpLauncher(StepLauncher):
    """Runs a step for each shape that needs it while there is time, and makes up the tokens of all others.

    :param deadline: of ``perf_counter``, after which nothing more is run.
    :param tokens: the target's answers and the drafts; different ones, so that no draft is kept.
    """

    _deadline: float
    _tokens: tuple[int, int] = (1, 0)
    shapes: set[Shape] = attrs.Factory(set)
    """Shapes that needed a step so far."""
    ran: int = 0
    """Steps that were run."""

    def launch(self, planned: PlannedStep, started: float) -> PendingStep:
        batch, k = planned.batches[Role.TARGET], planned.draft_tokens
        shape = batch.num_reqs, batch.num_tokens, batch.query_len, batch.past_prompt, batch.active_loras, k
        is_first = all((drafts > 1) is not (k > 1) for *_, drafts in self.shapes)
        if shape not in self.shapes and (is_first or not planned.is_full):
            self.shapes.add(shape)
            if perf_counter() < self._deadline:
                self.ran += 1
                return super().launch(planned, started)
        return self._made_up(planned, started)

    def _host_inputs(self, scheduled: ScheduledBatch) -> StepInputs:
        """Return the inputs, with any tokens where the real ones are on the device: steps that are made up leave none.

        Then no row is corrected by what an earlier request left there.
        """
        inputs = super()._host_inputs(scheduled)
        if self._drafting is None or self._drafting.outcome is None or inputs.input_ids is None:
            return inputs
        return attrs.evolve(inputs, input_ids=np.maximum(inputs.input_ids, 0))

    def _made_up(self, planned: PlannedStep, started: float) -> PendingStep:
        """Return a step that was not run, with made-up tokens."""
        scheduled, self._advanced = planned.scheduled, None
        assert scheduled is not None, "one replica warms up"
        self._count += 1
        answer, draft = self._tokens
        tokens, proposed = functools.partial(np.full, scheduled.num_tokens, answer, np.int64), None
        if self._drafting is not None:
            proposed = functools.partial(np.full, tuple(self._drafting.state.proposed.shape), draft, np.int64)
        return self._pending(planned, scheduled, self._host_inputs(scheduled), started, tokens, proposed)
