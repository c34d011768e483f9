"""Serving, step by step: a batch is scheduled, planned and launched, and completed when its tokens are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter

import attrs
import numpy as np
import torch

from capture_planner.errors import RunError
from capture_planner_runner.capture.first_use import FirstUse
from capture_planner_runner.execution.inputs import Array
from capture_planner_runner.ledger.rows import RequestResult, Step
from capture_planner_runner.ledger.session import Session
from capture_planner_runner.models.protocols import Drafter
from capture_planner_runner.serving.launching import StepLauncher
from capture_planner_runner.serving.scheduler import Scheduler
from capture_planner_runner.serving.speculative import SyntheticAcceptance, Verification, settle, store_tokens
from capture_planner_runner.serving.states import AdmittedRequest, ScheduledBatch
from capture_planner_runner.serving.steps import PendingStep, PlannedStep, StepPlanner

Answers = Mapping[str, tuple[int, ...]]
"""The target's tokens for each request, prompt included, by the request's name."""


@attrs.define(eq=False)
class Serving:
    """The requests of one call of ``serve``.

    :param session: where steps and finished requests are noted.
    :param answers: for drafters that copy the target.
    """

    scheduler: Scheduler
    launcher: StepLauncher
    _planner: StepPlanner
    _session: Session
    _drafter: Drafter | None
    _answers: Answers
    _progress: Callable[[RequestResult], None] | None
    _runs_ahead: bool
    served: deque[RequestResult] = attrs.Factory(lambda self: deque(maxlen=self._session.most), takes_self=True)
    """The last requests that are finished or cut off, up to the session's bound; all of them without one."""
    _proposals: SyntheticAcceptance | None = None
    """Draws the number of proposed drafts; None: all drafts are proposed."""
    is_over: bool = False
    """Whether it was cut off."""
    _first_use: FirstUse | None = None
    """Captures graphs between steps; None: all were captured at start."""
    _pending: PendingStep | None = None
    _last_end: float = attrs.Factory(perf_counter)

    @property
    def done(self) -> bool:
        """Whether all requests are served, also those of other ranks, and no step is in flight."""
        return self._is_through and self._planner.all_done

    @property
    def _is_through(self) -> bool:
        return self.scheduler.done and self._pending is None

    @torch.no_grad()
    def step(self) -> bool:
        """Launch a step, and complete it or, running ahead, the one before; False: there was nothing.

        A step that needs the tokens of the one before is scheduled after that one is completed. Raises ``RunError``
        after this serving was cut off.
        """
        if self.is_over:
            raise RunError("this serving was cut off; start another")
        if self._first_use is not None and self._first_use.is_due():
            # A capture writes into the fields, so no step may be in flight, and none may go on from them.
            self._catch_up(None)
            self.launcher.invalidate_fields()
            self._first_use.capture()
        started = perf_counter()
        was_pending, planned = self._pending is not None, self._plan()
        # The plan rests on upper bounds of lengths, and what serves the batch needs the true ones.
        if was_pending and planned.needs_tokens:
            self._catch_up(None)
            planned = self._plan()
        try:
            now = None if planned.scheduled is None else self.launcher.launch(planned, started)
        except Exception:
            # The next step must go on from what the host has read, since fields may be half written.
            self._catch_up(None)
            raise
        if planned.is_idle:
            self.launcher.launch_idle_step(planned)
        # The device has work now, so that reading the tokens of the step before costs it no pause.
        self._catch_up(now if self._runs_ahead else None)
        if now is not None and self._pending is not now:
            self._complete(now)
        return now is not None or was_pending or planned.is_idle

    def _plan(self) -> PlannedStep:
        """Schedule the next batch, and plan its step; with other replicas, which never need tokens, once a step."""
        is_done = self._is_through
        scheduled, admitted = self.scheduler.schedule()
        if self._drafter is not None:
            for live in admitted:
                # Before it drafts: another request's answer may still be there.
                self._drafter.set_answer(live.state_index, self._answers.get(live.request.name, ()))
        return self._planner.plan(scheduled, is_done=is_done)

    def _catch_up(self, now: PendingStep | None) -> None:
        """Complete the step in flight; from here on it is ``now``, if the next can be launched before that is read."""
        last, self._pending = self._pending, now if now is not None and now.is_on_device else None
        # Without a drafter, `advance` moved the counters when the step was launched.
        if self._drafter is not None:
            self.scheduler.states.count_ahead(None if self._pending is None else self._pending.scheduled)
        if last is not None:
            self._complete(last)

    def cut_off(self) -> None:
        """Note the requests that were not finished, where serving stops early; nothing is run after."""
        self.is_over = True
        for live in self.scheduler.unfinished:
            self._finish(live, cut_off=True)

    # Completing.

    def _complete(self, step: PendingStep) -> None:
        """Store a step's tokens, finish the requests that are complete, and draft for the others."""
        scheduled, verification = step.scheduled, self._settled(step)
        # The row of a request that was finished before this step is wasted, and so are its drafts.
        drafts = np.where(verification.kept > 0, scheduled.proposed, 0)
        # Not K, which the step before may have taken from another number of requests.
        places = int(drafts.max(initial=0))
        drafted_at, accepted_at = (
            _by_place(counts, places) for counts in (drafts, np.minimum(drafts, verification.accepted))
        )
        states, rows = self.scheduler.states, scheduled.state_indices
        length = verification.at + verification.gained
        ended = (verification.gained > 0) & (length >= states.end[rows])
        # Only requests with stop tokens are looked at one by one.
        for row in np.flatnonzero((verification.gained > 0) & states.stops[rows] & ~ended):
            new = states.tokens[rows[row], verification.at[row] : length[row]]
            ended[row] = not scheduled.live[row].request.stop.isdisjoint(new.tolist())
        finished = [scheduled.live[row] for row in np.flatnonzero(ended)]
        proposed = step.proposed
        if self._drafter is not None:
            # A replica drafts even where all its requests are finished: the forward is collective.
            if proposed is None and (len(finished) < scheduled.num_reqs or not self._planner.all_done):
                proposed = self.launcher.draft(step, verification)
            if proposed is not None:
                self._propose(scheduled, verification, proposed())
        done = [self._finish(live) for live in finished]
        end = perf_counter()
        self._session.add_step(
            Step(
                index=step.index,
                num_reqs=scheduled.num_reqs,
                num_tokens=scheduled.num_tokens,
                prompts=scheduled.prompts,
                drafted=sum(drafted_at),
                accepted=sum(accepted_at),
                drafted_at=drafted_at,
                accepted_at=accepted_at,
                # Steps that run ahead overlap: each begins at the end of the one before, so no time counts twice.
                seconds=end - max(step.started, self._last_end),
                ended=end,
                waiting=self.scheduler.waiting,
            )
        )
        self._last_end = end
        if self._progress is not None:
            for served in done:
                self._progress(served)

    def _settled(self, step: PendingStep) -> Verification:
        scheduled, states = step.scheduled, self.scheduler.states
        tokens = step.tokens()
        # These finished after this step was launched; their states may belong to other requests now.
        gone = np.array([live.is_finished for live in scheduled.live])
        if step.advanced is None:
            sampled = tokens[step.inputs.sampled_rows]
            verification = settle(scheduled, states, sampled, self.launcher.accepted(scheduled), gone)
        else:
            verification = step.advanced
            if gone.any():
                verification = attrs.evolve(verification, gained=np.where(gone, 0, verification.gained))
            store_tokens(scheduled, verification, states, step.inputs.query_start_loc, tokens)
        if scheduled.prompts:
            # Only a step with prompts can have the first token of a request.
            clock = perf_counter()
            for live, gained in zip(scheduled.live, verification.gained, strict=True):
                if gained:
                    live.answer(clock)
        return verification

    def _propose(self, scheduled: ScheduledBatch, verification: Verification, proposed: Array) -> None:
        """Store the drafts behind the known tokens, and tokens 0 behind them: see ``unread_tokens``."""
        states, k = self.scheduler.states, scheduled.draft_tokens
        rows = scheduled.state_indices[verification.gained > 0]
        # A row that ends inside its prompt gained nothing, and has no drafts to verify.
        states.proposed[scheduled.state_indices] = 0
        states.proposed[rows] = k
        if self._proposals is not None:
            drawn = self._proposals.accepted(states.key[rows], states.length[rows], states.proposed[rows])
            states.proposed[rows] = drawn
        places = np.arange(proposed.shape[1])
        following = np.where(places < k, proposed[rows], 0)
        states.tokens[rows[:, None], states.length[rows][:, None] + places] = following

    def _output(self, live: AdmittedRequest) -> tuple[int, ...]:
        """Return the output of a request; a token that is still on the device is negative, and left out."""
        states, start = self.scheduler.states, len(live.request.prompt)
        tokens = states.tokens[live.state_index, start : int(states.length[live.state_index])]
        return live.request.cut(tuple(tokens[tokens >= 0].tolist()))

    def _finish(self, live: AdmittedRequest, *, cut_off: bool = False) -> RequestResult:
        clock = perf_counter()
        output = self._output(live)
        served = RequestResult(
            name=live.request.name,
            prompt_tokens=len(live.request.prompt),
            output_tokens=len(output),
            first_token=None if live.first_token is None else live.first_token - live.entered,
            finished=None if cut_off else clock - live.entered,
            tokens=output,
            adapter=live.request.adapter,
            waited_for=live.waited_for,
        )
        self.served.append(served)
        self._session.add_request(served)
        if not cut_off:  # after a cut-off nothing is admitted, and the step in flight still writes these pages
            self.scheduler.finish(live)
        return served


def _by_place(counts: Array, places: int) -> tuple[int, ...]:
    """Return how many of the counts are above 0, above 1, and so on: tokens by their place in a request."""
    return tuple((counts[:, None] > np.arange(places)).sum(axis=0).tolist())
