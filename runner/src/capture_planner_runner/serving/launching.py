"""Launching a step: its forwards, in order, and the fields that their graphs leave for the next step.

Without a drafter, lengths are known before tokens are. So a step can be launched before the tokens of
the previous one are read; and where the batch is the same, the graph itself has advanced its fields to
the next token, and nothing is copied at all. With a drafter, the step is launched as if all drafts were
kept, and the device corrects it (vLLM 0.33 does so too: asynchronous scheduling with EAGLE).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from time import perf_counter

import attrs
import numpy as np
import torch

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner_runner.capture.first_use import FirstUse
from capture_planner_runner.execution.bodies import TargetBody
from capture_planner_runner.execution.fields import ACCEPTED_COUNTS, SAMPLED_COUNTS, Fields
from capture_planner_runner.execution.inputs import Array, StepInputs
from capture_planner_runner.execution.role import ForwardObserver, ForwardTimes, RoleRun, stage_together
from capture_planner_runner.execution.updates import (
    DraftState,
    StepAhead,
    TokenFields,
    Updates,
    VerificationInputs,
    VerificationOutcome,
)
from capture_planner_runner.ledger.rows import Forward
from capture_planner_runner.ledger.session import Session
from capture_planner_runner.numerics.record import ComparisonLog
from capture_planner_runner.serving.inputs import (
    DraftRows,
    draft_decode_inputs,
    draft_prefill_inputs,
    own_prefill_inputs,
    proposal_rows,
    target_inputs,
)
from capture_planner_runner.serving.scheduler import Scheduler
from capture_planner_runner.serving.speculative import SyntheticAcceptance, Verification, advance
from capture_planner_runner.serving.states import PageFormat, ScheduledBatch
from capture_planner_runner.serving.steps import PendingStep, PendingTokens, PlannedStep, copy_to_host


@attrs.frozen(kw_only=True, eq=False)
class DraftPasses:
    """The device's part of speculation, around the forwards of target and drafter."""

    rows: DraftRows
    """The rows of the first draft pass."""
    state: DraftState
    outcome: VerificationOutcome | None
    """Result of verification, for a next step that is launched before the host reads it; None: none is."""
    target: TargetBody
    prefill: Fields
    """Fields of the draft prefill."""
    token_fields: Mapping[Role, TokenFields]
    """Each role's fields that advance by a token."""
    updates: Updates
    places: int
    """Numbers of synthetic acceptance that each request has, see ``fields.accepted_field``."""

    def correct(self, num_reqs: int, most: int, *, is_synthetic: bool) -> None:
        """Bring the rows whose tokens the host has not read to what verification kept of the step before.

        :param most: the most rows of a request that is past its prompt.
        :param is_synthetic: acceptance is drawn, and is in the target's fields.
        """
        if self.outcome is None:
            return
        step = StepAhead(
            target=self.token_fields[Role.TARGET],
            prefill=self.token_fields[Role.DRAFT_PREFILL],
            starts=self.target.fields["query_start_loc"][: num_reqs + 1],
            most=most,
            accepted=self._accepted_counts(num_reqs) if is_synthetic else None,
        )
        self.updates.correct(step, self.state, self.outcome)

    def verify(self, num_reqs: int, num_tokens: int, most: int, *, is_synthetic: bool, has_decodes: bool) -> None:
        """Verify the drafts of a step, and put what was kept into the fields of the drafter's forwards."""
        fields = self.target.fields
        self.updates.prepare_drafts(
            VerificationInputs(
                fields=self.token_fields[Role.TARGET],
                starts=fields["query_start_loc"][: num_reqs + 1],
                counts=fields[SAMPLED_COUNTS][:num_reqs],
                answers=self.target.tokens[:num_tokens],
                most=most,
                accepted=self._accepted_counts(num_reqs) if is_synthetic else None,
            ),
            self.token_fields[Role.DRAFT_PREFILL],
            self.prefill["last_token_indices"],
            self.token_fields[Role.DRAFT_DECODE] if has_decodes else None,
            self.outcome,
        )

    def _accepted_counts(self, num_reqs: int) -> torch.Tensor:
        """Return how many drafts synthetic acceptance accepts, ``int32[num_reqs, places]``."""
        return self.target.fields[ACCEPTED_COUNTS].view(-1, self.places)[:num_reqs]


@attrs.frozen(eq=False)
class _NextDecodes:
    """Decodes whose last graph filled the fields of the next step."""

    state_indices: Array
    """``int64[R]``: the requests of the batch."""
    inputs: StepInputs
    room: int
    """Tokens for which the block table on the device still has pages."""


@attrs.define(eq=False, kw_only=True)
class StepLauncher:
    """Launches the forwards of planned steps, and notes each in the session."""

    _scheduler: Scheduler
    _roles: Mapping[Role, RoleRun]
    _target: TargetBody
    _drafting: DraftPasses | None
    """None without a drafter."""
    _pages: PageFormat
    _session: Session
    _observer: ForwardObserver
    _comparison: ComparisonLog | None
    """Notes comparisons of graphs with eager forwards; None: nothing is compared."""
    _acceptance: SyntheticAcceptance | None
    """Draws the drafts that are accepted; None: greedy verification."""
    _first_use: FirstUse | None
    """Gets a request for a better graph after each forward; None: no graph is captured between steps."""
    _count: int
    """Steps that were launched, also by launchers before this one."""
    _advanced: _NextDecodes | None = None

    def launch(self, planned: PlannedStep, started: float) -> PendingStep:
        """Launch all forwards of a step that do not wait for its tokens on the host."""
        scheduled = planned.scheduled
        assert scheduled is not None, "an idle rank has no requests to launch"
        self._begin(scheduled)
        begun = perf_counter()
        inputs, filled = self._target_inputs(planned, scheduled)
        proposed = None
        if planned.drafts_on_device:
            # Verification and drafter need nothing from the host: everything is launched now.
            proposed = self._launch_all(planned, scheduled, inputs, begun)
        else:
            self._run_target(planned, inputs, begun, filled=filled)
            entry = planned.dispatches[Role.TARGET].entry
            # Its graph ends with the fields of the next step, which so needs no copy if the batch stays the same.
            if not filled and self._target.advances and entry is not None and entry.query_len == 1:
                room = inputs.block_table.shape[1] * inputs.page_size - int(inputs.seq_lens.max())
                self._advanced = _NextDecodes(scheduled.state_indices, inputs, room)
        # Queued behind the forwards: nothing waits here.
        tokens = copy_to_host(self._target.tokens[: scheduled.num_tokens])
        return self._pending(planned, scheduled, inputs, started, tokens, proposed)

    def launch_idle_step(self, planned: PlannedStep) -> None:
        """Run the forwards of a step on dummy batches, where other ranks have requests and this one has none."""
        self._begin(None)
        # Dummy batches overwrite fields that an earlier graph has left for the next step.
        self._advanced = None
        # The forwards of other ranks hold collectives that wait for this one's.
        for role, batch in planned.batches.items():
            inputs = self._roles[role].dummy_inputs(batch, planned.draft_tokens)
            self._run(role, planned, inputs, perf_counter())

    def draft(self, step: PendingStep, verification: Verification) -> PendingTokens:
        """Run the drafter of a step that the host has verified: the first pass, and then the draft decodes."""
        states, scheduled, drafting = self._scheduler.states, step.scheduled, self._drafting
        assert drafting is not None, "a drafter has rows"
        begun = perf_counter()
        if drafting.rows.is_own:
            prefill = own_prefill_inputs(step.inputs, scheduled, verification.kept, states, self._pages, drafting.rows)
        else:
            prefill = draft_prefill_inputs(step.inputs, scheduled, verification.kept, states)
        self._run(Role.DRAFT_PREFILL, step.planned, prefill, begun)
        if Role.DRAFT_DECODE in step.planned.batches:
            after = states.computed[scheduled.state_indices] + 1 - drafting.rows.shift
            decode = draft_decode_inputs(scheduled, after, states, self._pages)
            self._run(Role.DRAFT_DECODE, step.planned, decode, perf_counter())
        return copy_to_host(drafting.state.proposed)

    def accepted(self, scheduled: ScheduledBatch) -> Array | None:
        """Return how many drafts of each row synthetic acceptance accepts, ``int32[R]``; None: the target decides."""
        states, rows = self._scheduler.states, scheduled.state_indices
        if self._acceptance is None:
            return None
        return self._acceptance.accepted(states.key[rows], states.length[rows], scheduled.proposed)

    def invalidate_fields(self) -> None:
        """Let the next step fill its fields on the host: a capture has written into them."""
        self._advanced = None

    def _begin(self, scheduled: ScheduledBatch | None) -> None:
        """Count a step, and tell observers its requests."""
        index, self._count = self._count, self._count + 1
        names = () if scheduled is None else [live.request.name for live in scheduled.live]
        self._observer.batch(names)
        if self._comparison is not None:
            pages = {live.request.name: live.pages for live in self._scheduler.unfinished} if names else {}
            self._comparison.begin(index, names, pages)

    def _pending(
        self,
        planned: PlannedStep,
        scheduled: ScheduledBatch,
        inputs: StepInputs,
        started: float,
        tokens: PendingTokens,
        proposed: PendingTokens | None,
    ) -> PendingStep:
        """Return the step as it is in flight."""
        advanced = None
        if self._drafting is None:
            # Advance counters before the tokens arrive; stop scheduling requests that then have all of them.
            states, rows = self._scheduler.states, scheduled.state_indices
            advanced = advance(scheduled, states, inputs.query_start_loc)
            for row in np.flatnonzero((advanced.gained > 0) & (states.length[rows] >= states.end[rows])):
                self._scheduler.leave(scheduled.live[row])
        return PendingStep(
            index=self._count - 1,
            planned=planned,
            scheduled=scheduled,
            inputs=inputs,
            started=started,
            tokens=tokens,
            proposed=proposed,
            advanced=advanced,
            is_on_device=self._drafting is None or planned.drafts_on_device,
        )

    def _target_inputs(self, planned: PlannedStep, scheduled: ScheduledBatch) -> tuple[StepInputs, bool]:
        """Return the target's inputs, and whether its fields hold them already."""
        last, self._advanced = self._advanced, None
        is_decode = not scheduled.prompts and scheduled.query_len == 1
        is_steady = planned.is_steady and is_decode
        # Without room, the next token's page is not in the device's table, which only the host can widen.
        if last and last.room and is_steady and np.array_equal(last.state_indices, scheduled.state_indices):
            # The same requests in the same rows of the same graph, which ended with the fields of this step.
            inputs = last.inputs.next_decode()
            self._advanced = _NextDecodes(last.state_indices, inputs, last.room - 1)
            return inputs, True
        return self._host_inputs(scheduled), False

    def _host_inputs(self, scheduled: ScheduledBatch) -> StepInputs:
        """Return the target's inputs as the host makes them, with draws of synthetic acceptance."""
        states, rows, sampler = self._scheduler.states, scheduled.state_indices, self._target.sampler
        inputs = target_inputs(scheduled, states, self._pages)
        if sampler is not None and sampler.proposed is not None:
            of_drafts = proposal_rows(scheduled, inputs.query_start_loc, *sampler.proposed.shape[:2])
            inputs = attrs.evolve(inputs, proposal_rows=of_drafts)
        if self._acceptance is None or self._drafting is None:
            return inputs
        # The host knows only an upper bound of the position, so draw for every candidate.
        places = self._drafting.places
        lengths = np.maximum(states.length[rows], scheduled.base + 1)
        accepted = self._acceptance.accepted(
            np.repeat(states.key[rows], places),
            (lengths[:, None] - np.arange(places)).ravel(),
            np.repeat(scheduled.proposed, places),
        )
        return attrs.evolve(inputs, accepted_counts=accepted)

    def _launch_all(
        self, planned: PlannedStep, scheduled: ScheduledBatch, inputs: StepInputs, begun: float
    ) -> PendingTokens:
        """Fill the fields of all roles at once, and run target, verification and drafter without the host."""
        states, drafting = self._scheduler.states, self._drafting
        assert drafting is not None, "a drafter is launched"
        # As if all drafts were kept; the device corrects what verification rejects.
        by_role = {
            Role.TARGET: inputs,
            Role.DRAFT_PREFILL: draft_prefill_inputs(inputs, scheduled, scheduled.counts, states),
        }
        if Role.DRAFT_DECODE in planned.batches:
            longest = scheduled.base + scheduled.counts
            by_role[Role.DRAFT_DECODE] = draft_decode_inputs(scheduled, longest, states, self._pages)
        # The drafter's fields too: once the target is launched, nothing waits for the host.
        stage_together([(self._roles[role], planned.across(role, each)) for role, each in by_role.items()])
        most, is_synthetic = 1 + int(scheduled.drafts.max()), self._acceptance is not None
        drafting.correct(scheduled.num_reqs, most, is_synthetic=is_synthetic)
        self._run_target(planned, inputs, begun, filled=True)
        begun = perf_counter()
        drafting.verify(
            scheduled.num_reqs,
            scheduled.num_tokens,
            most,
            is_synthetic=is_synthetic,
            has_decodes=Role.DRAFT_DECODE in by_role,
        )
        self._run(Role.DRAFT_PREFILL, planned, by_role[Role.DRAFT_PREFILL], begun, filled=True)
        if Role.DRAFT_DECODE in by_role:
            self._run(Role.DRAFT_DECODE, planned, by_role[Role.DRAFT_DECODE], perf_counter(), filled=True)
        return copy_to_host(drafting.state.proposed)

    def _run_target(self, planned: PlannedStep, inputs: StepInputs, begun: float, *, filled: bool) -> None:
        """Run the target, and sample the tokens that its graph has not sampled."""
        if inputs.input_ids is not None:
            self._target.embed(inputs.input_ids)
        self._run(Role.TARGET, planned, inputs, begun, filled=filled)
        if inputs.sampled_rows is not None and len(inputs.sampled_rows):
            self._target.sample(planned.dispatches[Role.TARGET].entry, len(inputs.sampled_rows))

    def _run(self, role: Role, planned: PlannedStep, inputs: StepInputs, begun: float, *, filled: bool = False) -> None:
        """Run the forward of a role, or its chain of draft decodes, as planned; note it, and request a better graph."""
        run, batch, dispatch = self._roles[role], planned.batches[role], planned.dispatches[role]
        inputs, forwards = planned.across(role, inputs), 1
        if role is Role.DRAFT_DECODE:
            # The draft prefill has made the first draft.
            steps = planned.draft_tokens - 1
            times, forwards = run.run_chain(batch, dispatch, inputs, steps, begun, filled=filled)
        else:
            times = run.run(batch, dispatch, inputs, begun, filled=filled)
        if not planned.is_idle:  # dummy batches are no traffic
            self._note(batch, dispatch, times, forwards)
        if self._first_use is not None:
            # Replicas request a graph for the joint batch, and so all request the same one.
            self._first_use.request_capture(planned.joint[role], forwards)

    def _note(self, batch: Batch, dispatch: Dispatch, times: ForwardTimes, repeats: int = 1) -> None:
        """Note a forward of the step that was launched last."""
        self._session.add_forward(
            Forward(
                step=self._count - 1,
                role=batch.role,
                num_reqs=batch.num_reqs,
                num_tokens=batch.num_tokens,
                query_len=batch.uniform_query_len,
                max_query_len=batch.max_query_len,
                active_loras=batch.active_loras,
                entry=dispatch.entry,
                reason=dispatch.reason,
                padded_tokens=dispatch.padded_tokens,
                padded_reqs=dispatch.padded_reqs,
                repeats=repeats,
                preparation=times.preparation,
                host_seconds=times.host_seconds,
                seconds=times.seconds,
                ended=perf_counter(),
            )
        )


Shape = tuple[int, int, int | None, bool, int, int]
"""Requests, tokens, query length, whether all are past their prompts, active adapters, and k of a step."""


@attrs.define(eq=False, kw_only=True)
class WarmUpLauncher(StepLauncher):
    """Runs a step for each shape that needs it while there is time, and makes up the tokens of all others.

    The workload is scheduled as it will be. A step is run once for each shape that no FULL graph serves, so that
    kernels are compiled and libraries have loaded what they load on first use; the others are counted as if they had
    been run. The first step runs in any case, and so does the first that drafts several tokens: kernels outside of the
    graphs prepare and verify it.

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
        # Nothing ran, so no graph has filled the fields of the next step.
        scheduled, self._advanced = planned.scheduled, None
        assert scheduled is not None, "one replica warms up"
        self._count += 1
        answer, draft = self._tokens
        tokens, proposed = functools.partial(np.full, scheduled.num_tokens, answer, np.int64), None
        if self._drafting is not None:
            proposed = functools.partial(np.full, tuple(self._drafting.state.proposed.shape), draft, np.int64)
        return self._pending(planned, scheduled, self._host_inputs(scheduled), started, tokens, proposed)

    def _host_inputs(self, scheduled: ScheduledBatch) -> StepInputs:
        """Return the inputs, with any tokens where the real ones are on the device: steps that are made up leave none.

        Then no row is corrected by what an earlier request left there.
        """
        inputs = super()._host_inputs(scheduled)
        if self._drafting is None or self._drafting.outcome is None or inputs.input_ids is None:
            return inputs
        return attrs.evolve(inputs, input_ids=np.maximum(inputs.input_ids, 0))
