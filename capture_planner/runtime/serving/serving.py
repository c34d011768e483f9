"""Serving, step by step: a batch is scheduled and launched, and completed when its tokens are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Protocol

import attrs
import numpy as np
import torch

from capture_planner.errors import RunError
from capture_planner.runtime.execution.inputs import Array
from capture_planner.runtime.ledger import RequestResult, Step
from capture_planner.runtime.models.protocols import Drafter
from capture_planner.runtime.serving.acceptance import SyntheticAcceptance
from capture_planner.runtime.serving.agreement import StepRanks
from capture_planner.runtime.serving.launching import Asks, StepLauncher
from capture_planner.runtime.serving.pending import PendingStep
from capture_planner.runtime.serving.scheduler import Scheduler
from capture_planner.runtime.serving.speculative import Verification, fulfil, settle
from capture_planner.runtime.serving.states import AdmittedRequest, ScheduledBatch
from capture_planner.runtime.session import Session


class LateCaptures(Asks, Protocol):
    """What captures graphs between steps."""

    def is_due(self) -> bool:
        """Whether a graph is to be captured before the next step. Collective."""

    def capture(self) -> None:
        """Capture what is due. Collective."""


Answers = Mapping[str, tuple[int, ...]]
"""What the target says to each request, prompt included, by the request's name."""


@attrs.define(eq=False)
class Serving:
    """The requests of one call of ``serve``.

    :param session: where steps and finished requests are noted.
    :param answers: what drafters that copy the target are told.
    """

    scheduler: Scheduler
    _launcher: StepLauncher
    _ranks: StepRanks
    _session: Session
    _drafter: Drafter | None
    _answers: Answers
    _progress: Callable[[RequestResult], None] | None
    _runs_ahead: bool
    served: deque[RequestResult] = attrs.field()
    """The last requests that are finished or cut off, up to the session's bound; all of them without one."""
    _proposals: SyntheticAcceptance | None = None
    """Draws how many drafts are proposed; None: all that are made."""
    is_over: bool = False
    """Whether it was cut off."""
    _late: LateCaptures | None = None
    """Captures graphs between steps; None: all were captured at start."""
    _pending: PendingStep | None = None
    _last_end: float = attrs.Factory(perf_counter)

    @served.default
    def _served(self) -> deque[RequestResult]:
        return deque(maxlen=self._session.most)

    @property
    def done(self) -> bool:
        """Whether all requests are served, also those of other ranks, and nothing is under way."""
        return self._is_through and self._ranks.all_done

    @property
    def _is_through(self) -> bool:
        return self.scheduler.done and self._pending is None

    @torch.no_grad()
    def step(self) -> bool:
        """Launch a step, and complete it or, running ahead, the one before; False: there was nothing.

        A step that needs the tokens of the one before is scheduled when that one is completed. Raises ``RunError``
        after it was cut off.
        """
        if self.is_over:
            raise RunError("this serving was cut off; start another")
        if self._late is not None and self._late.is_due():
            self._capture(self._late)
        started = perf_counter()
        is_done, was_pending = self._is_through, self._pending is not None
        scheduled = self._schedule()
        if self._pending is not None and scheduled is not None and self._launcher.needs_tokens(scheduled):
            self._catch_up(None)
            scheduled = self._schedule()
        scheduled = self._ranks.begin(scheduled, is_done=is_done)
        try:
            now = None if scheduled is None else self._launcher.launch(scheduled, started)
        except Exception:
            # What the step wrote on the device may be what the next one would go on from, were this one not read.
            self._catch_up(None)
            raise
        if self._ranks.others_work:
            self._launcher.run_along()
        # The device has work now, so that reading the tokens of the step before costs it no pause.
        self._catch_up(now if self._runs_ahead else None)
        if now is not None and self._pending is not now:
            self._complete(now)
        return now is not None or was_pending or self._ranks.others_work

    def _schedule(self) -> ScheduledBatch | None:
        scheduled, admitted = self.scheduler.schedule()
        if self._drafter is not None:
            for live in admitted:
                self._drafter.learn(live.state_index, self._answers.get(live.request.name, ()))
        return scheduled

    def _catch_up(self, now: PendingStep | None) -> None:
        """Complete the step that is under way; ``now`` is under way from here on, if the next can be launched before it
        is read.
        """
        last, self._pending = self._pending, now if now is not None and now.is_on_device else None
        if self._drafter is not None:
            self.scheduler.states.count_ahead(None if self._pending is None else self._pending.scheduled)
        if last is not None:
            self._complete(last)

    def _capture(self, late: LateCaptures) -> None:
        """Complete the step that is under way, so that nothing is, and capture."""
        self._catch_up(None)
        self._launcher.fill_again()
        late.capture()

    def cut_off(self) -> None:
        """Take down the requests that were not finished, where serving stops early; nothing is run after."""
        self.is_over = True
        for live in self.scheduler.unfinished:
            self._finish(live, cut_off=True)

    # Completing.

    def _complete(self, step: PendingStep) -> None:
        """Store a step's tokens, finish the requests that are complete, and draft for the others."""
        scheduled, verification = step.scheduled, self._settled(step)
        # A request that was gone already was run in vain: what became of its drafts says nothing.
        drafts = np.where(verification.kept > 0, scheduled.proposed, 0)
        drafted_at, accepted_at = (
            _by_place(counts, scheduled.draft_tokens) for counts in (drafts, np.minimum(drafts, verification.accepted))
        )
        finished = self._finished(scheduled, verification)
        proposed = step.proposed
        if self._drafter is not None:
            # Replicas draft alike, also where all requests of one are finished.
            if proposed is None and (len(finished) < scheduled.num_reqs or not self._ranks.all_done):
                proposed = self._launcher.draft(step, verification)
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
                seconds=end - max(step.started, self._last_end),
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
        # These ended after this step was launched; their states may be other requests' now.
        gone = np.array([live.is_finished for live in scheduled.live])
        if step.promised is None:
            sampled = tokens[step.inputs.sampled_rows]
            verification = settle(scheduled, states, sampled, self._launcher.accepted(scheduled), gone)
        else:
            verification = step.promised
            if gone.any():
                verification = attrs.evolve(verification, gained=np.where(gone, 0, verification.gained))
            fulfil(scheduled, verification, states, step.inputs.query_start_loc, tokens)
        if scheduled.prompts:
            clock = perf_counter()
            for live, gained in zip(scheduled.live, verification.gained, strict=True):
                if gained:
                    live.answer(clock)
        return verification

    def _propose(self, scheduled: ScheduledBatch, verification: Verification, proposed: Array) -> None:
        """Put the drafts after what is settled, and tokens 0 after them: see ``unread_tokens``."""
        states, k = self.scheduler.states, scheduled.draft_tokens
        rows = scheduled.state_indices[verification.gained > 0]
        states.proposed[scheduled.state_indices] = 0
        states.proposed[rows] = k
        if self._proposals is not None:
            drawn = self._proposals.accepted(states.key[rows], states.length[rows], states.proposed[rows])
            states.proposed[rows] = drawn
        places = np.arange(proposed.shape[1])
        following = np.where(places < k, proposed[rows], 0)
        states.tokens[rows[:, None], states.length[rows][:, None] + places] = following

    def _finished(self, scheduled: ScheduledBatch, verification: Verification) -> list[AdmittedRequest]:
        """Return the requests that had their last token in this step."""
        states, rows = self.scheduler.states, scheduled.state_indices
        length = verification.at + verification.gained
        ended = (verification.gained > 0) & (length >= states.end[rows])
        for row in np.flatnonzero((verification.gained > 0) & states.stops[rows] & ~ended):
            new = states.tokens[rows[row], verification.at[row] : length[row]]
            ended[row] = not scheduled.live[row].request.stop.isdisjoint(new.tolist())
        return [scheduled.live[row] for row in np.flatnonzero(ended)]

    def _output(self, live: AdmittedRequest) -> tuple[int, ...]:
        """Return what a request has been given; a token that is on its way is negative."""
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
        if not cut_off:
            self.scheduler.finish(live)
        return served


def _by_place(counts: Array, places: int) -> tuple[int, ...]:
    """Return how many of the counts are above 0, above 1, and so on: tokens by their place in a request."""
    return tuple((counts[:, None] > np.arange(places)).sum(axis=0).tolist()) if places else ()
