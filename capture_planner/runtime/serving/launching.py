"""Launching a step: the forwards that a batch needs, in order, and what their graphs leave for the next.

Without a drafter, lengths are known before tokens are. So a step can be launched before the tokens of
the previous one are read; and where the batch is the same, the graph itself has advanced its fields to
the next token, and nothing is copied at all. With a drafter, the step is launched as if all drafts were
kept, and the device corrects it (vLLM 0.33 does so too: asynchronous scheduling with EAGLE).
"""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

import attrs
import numpy as np
import torch

from capture_planner.dispatch.dispatcher import AnyDispatcher, Dispatch
from capture_planner.modes import Role
from capture_planner.records.batch import Batch
from capture_planner.runtime.execution.chains import run_chain
from capture_planner.runtime.execution.fields import ACCEPTED_COUNTS, SAMPLED_COUNTS
from capture_planner.runtime.execution.inputs import Array, StepInputs
from capture_planner.runtime.execution.role import ForwardTimes
from capture_planner.runtime.execution.updates import StepAhead, VerificationInputs
from capture_planner.runtime.ledger import Forward
from capture_planner.runtime.serving.acceptance import SyntheticAcceptance
from capture_planner.runtime.serving.agreement import Replicas, StepRanks
from capture_planner.runtime.serving.batches import draft_decode_batch, is_full, step_batch, target_batch
from capture_planner.runtime.serving.inputs import (
    adapter_lanes,
    draft_decode_inputs,
    draft_prefill_inputs,
    own_prefill_inputs,
    target_inputs,
)
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.parts import Parts
from capture_planner.runtime.serving.pending import OnItsWay, PendingStep, on_its_way
from capture_planner.runtime.serving.scheduler import Scheduler
from capture_planner.runtime.serving.speculative import Verification, promise
from capture_planner.runtime.serving.states import ScheduledBatch
from capture_planner.runtime.session import Session


class Asks(Protocol):
    """What is told of forwards, so that graphs are captured that would serve them better."""

    def ask(self, batch: Batch, forwards: int = 1) -> None:
        """Ask for the graph of a batch that so many forwards had, where it is not captured yet."""


@attrs.frozen(eq=False)
class _NextDecodes:
    """Decodes whose last graph filled the fields of the next step."""

    state_indices: Array
    """``int64[R]``: which requests are in the batch."""
    inputs: StepInputs
    room: int
    """For how many more tokens the block table on the device has pages."""


@attrs.define(eq=False)
class StepLauncher:
    """Launches the forwards of steps, and notes each in the session.

    :param dispatcher: says which graph serves a batch, as captured.
    """

    _scheduler: Scheduler
    _parts: Parts
    _dispatcher: AnyDispatcher | Replicas
    _ranks: StepRanks
    _pages: PageFormat
    _session: Session
    _count: int
    """Steps that were launched, also by launchers before it."""
    _acceptance: SyntheticAcceptance | None = None
    """Draws what is accepted; None: greedy verification."""
    _asks: Asks | None = None
    """Told of each forward; None: no graph is captured while requests are served."""
    _advanced: _NextDecodes | None = None

    def launch(self, scheduled: ScheduledBatch, started: float) -> PendingStep:
        """Launch all that can be launched of a step before its tokens are on the host."""
        index, self._count = self._count, self._count + 1
        parts = self._parts
        names = [live.request.name for live in scheduled.live]
        parts.observer.batch(names)
        if parts.comparison is not None:
            pages = {live.request.name: live.pages for live in self._scheduler.unfinished}
            parts.comparison.begin(index, names, pages)
        begun = perf_counter()
        inputs, filled = self._target_inputs(scheduled)
        decodes = self._draft_decodes(scheduled)
        proposed = None
        if self._drafts_on_device(decodes):
            proposed = self._launch_all(index, scheduled, inputs, decodes, begun)
        else:
            dispatch = self._run_target(index, scheduled, inputs, begun, filled=filled)
            entry = dispatch.entry
            if not filled and self._parts.policy.advance_in_graph and entry is not None and entry.query_len == 1:
                room = inputs.block_table.shape[1] * inputs.page_size - int(inputs.seq_lens.max())
                self._advanced = _NextDecodes(scheduled.state_indices, inputs, room)
        return PendingStep(
            index=index,
            scheduled=scheduled,
            inputs=inputs,
            started=started,
            tokens=on_its_way(parts.target.tokens[: scheduled.num_tokens]),
            draft_decodes=decodes,
            proposed=proposed,
            promised=self._promised(scheduled, inputs) if parts.state is None else None,
            is_on_device=parts.state is None or proposed is not None,
        )

    def needs_tokens(self, scheduled: ScheduledBatch) -> bool:
        """Say whether a step cannot be launched before the host has the tokens of the one that is under way.

        It cannot where its drafter waits for the host. Nor can it where the step under way verifies drafts of its
        requests, and no FULL graph serves it: attention is then prepared with real lengths, which depend on them.
        """
        parts, states, rows = self._parts, self._scheduler.states, scheduled.state_indices
        if parts.state is None:
            return False
        if not self._drafts_on_device(self._draft_decodes(scheduled)):
            return True
        if not states.is_verifying(rows).any():
            return False
        _, active = adapter_lanes(scheduled, states)
        loras = {Role.TARGET: 0 if active is None else len(active), Role.DRAFT_PREFILL: 0}
        found = [self._dispatcher.dispatch(target_batch(role, scheduled, count)) for role, count in loras.items()]
        return not all(map(is_full, found))

    def accepted(self, scheduled: ScheduledBatch) -> Array | None:
        """Return how many drafts of each row synthetic acceptance accepts, ``int32[R]``; None: the target decides."""
        states, rows = self._scheduler.states, scheduled.state_indices
        if self._acceptance is None:
            return None
        return self._acceptance.accepted(states.key[rows], states.length[rows], scheduled.proposed)

    def fill_again(self) -> None:
        """Let the next step fill its fields, whatever the last one left: a capture has written them."""
        self._advanced = None

    def run_along(self) -> None:
        """Run the forwards of a step on dummy batches, where other ranks have requests and this one has none."""
        self._count += 1
        self._advanced, parts, ranks = None, self._parts, self._ranks
        parts.observer.batch(())
        if parts.comparison is not None:
            parts.comparison.begin(self._count - 1, (), {})
        for role, answer in ranks.answers.items():
            batch, each = answer.batch, parts.roles[role]
            assert batch is not None, "an idle rank has a dummy batch"
            inputs = self._across(role, each.dummy_inputs(batch, ranks.draft_tokens))
            if role is not Role.DRAFT_DECODE:
                each.run(batch, answer.dispatch, inputs, perf_counter())
                self._ask(batch)
            elif ranks.draft_tokens > 1:
                longest = self._scheduler.states.max_model_len
                steps = ranks.draft_tokens - 1
                _, forwards = run_chain(each, batch, answer.dispatch, inputs, steps, max_model_len=longest)
                self._ask(batch, forwards)

    def _ask(self, batch: Batch, forwards: int = 1) -> None:
        """Ask for a better graph of a batch that has run. Replicas ask for the joint batch, and so all for the same."""
        if self._asks is not None:
            self._asks.ask(self._ranks.joint(batch), forwards)

    def _across(self, role: Role, inputs: StepInputs) -> StepInputs:
        """Return inputs with the tokens of all replicas, where there are several."""
        tokens = self._ranks.tokens(role)
        return inputs if tokens is None else attrs.evolve(inputs, num_tokens_across_dp=tokens)

    def _target_inputs(self, scheduled: ScheduledBatch) -> tuple[StepInputs, bool]:
        """Return a step's inputs, and whether the graph of the last one filled the fields with them."""
        last, self._advanced = self._advanced, None
        is_decode = not scheduled.prompts and scheduled.query_len == 1
        is_steady = self._ranks.is_steady and is_decode
        if last and last.room and is_steady and np.array_equal(last.state_indices, scheduled.state_indices):
            # The same requests in the same rows of the same graph: the fields on the device are this step's already.
            inputs = last.inputs.next_decode()
            self._advanced = _NextDecodes(last.state_indices, inputs, last.room - 1)
            return inputs, True
        return self._host_inputs(scheduled), False

    def _host_inputs(self, scheduled: ScheduledBatch) -> StepInputs:
        """Return a step's inputs as the host makes them, with what is accepted where that is drawn."""
        states, rows = self._scheduler.states, scheduled.state_indices
        inputs = target_inputs(scheduled, states, self._pages)
        if self._acceptance is None:
            return inputs
        # Draws go by position, of which the host knows the last that there can be: so one for each that there can be.
        places = self._parts.accepted_places
        lengths = np.maximum(states.length[rows], states.computed_at_most(rows) + 1)
        accepted = self._acceptance.accepted(
            np.repeat(states.key[rows], places),
            (lengths[:, None] - np.arange(places)).ravel(),
            np.repeat(scheduled.proposed, places),
        )
        return attrs.evolve(inputs, accepted_counts=accepted)

    def _promised(self, scheduled: ScheduledBatch, inputs: StepInputs) -> Verification:
        """Count the step before its tokens are there; a request that has all of its then is scheduled no more."""
        states, rows = self._scheduler.states, scheduled.state_indices
        verification = promise(scheduled, states, inputs.query_start_loc)
        for row in np.flatnonzero((verification.gained > 0) & (states.length[rows] >= states.end[rows])):
            self._scheduler.leave(scheduled.live[row])
        return verification

    def _run_target(
        self, index: int, scheduled: ScheduledBatch, inputs: StepInputs, begun: float, *, filled: bool
    ) -> Dispatch:
        """Run the target, and sample what its graph has not."""
        body = self._parts.target
        if inputs.input_ids is not None:
            body.embed(inputs.input_ids)
        dispatch = self._run(Role.TARGET, index, scheduled, inputs, begun, filled=filled)
        if inputs.sampled_rows is not None and len(inputs.sampled_rows):
            body.sample(dispatch.entry, len(inputs.sampled_rows))
        return dispatch

    def _draft_decodes(self, scheduled: ScheduledBatch) -> Dispatch | None:
        """Return what serves the draft decodes of a step; None where there are none."""
        if scheduled.draft_tokens > 1 and Role.DRAFT_DECODE in self._parts.roles:
            return self._dispatcher.dispatch(draft_decode_batch(scheduled))
        return None

    def _drafts_on_device(self, draft_decodes: Dispatch | None) -> bool:
        """Say whether the drafter's fields can be worked out without the host.

        Not where a backend needs the lengths there for its draft decodes, nor where these run eagerly:
        eager attention is prepared with the real lengths, which depend on what verification keeps.
        """
        if self._parts.state is None or not self._parts.policy.drafts_on_device:
            return False
        if draft_decodes is None:
            return True
        return not self._parts.policy.draft_decodes_need_host and draft_decodes.entry is not None

    def _launch_all(
        self, index: int, scheduled: ScheduledBatch, inputs: StepInputs, decodes: Dispatch | None, begun: float
    ) -> OnItsWay:
        """Fill the fields of all roles at once, and run target, verification and drafter in a row."""
        parts, states = self._parts, self._scheduler.states
        # As if all drafts were kept; the device corrects what verification rejects.
        prefill = draft_prefill_inputs(inputs, scheduled, scheduled.counts, states)
        by_role = {Role.TARGET: inputs, Role.DRAFT_PREFILL: prefill}
        if decodes is not None:
            longest = states.computed_at_most(scheduled.state_indices) + scheduled.counts
            by_role[Role.DRAFT_DECODE] = draft_decode_inputs(scheduled, longest, states, self._pages)
        by_role = {role: self._across(role, each) for role, each in by_role.items()}
        if self._parts.policy.options.poison:
            for role in by_role:
                parts.roles[role].poison()
        parts.apply([write for role, each in by_role.items() for write in parts.roles[role].writes(each)])
        self._correct(scheduled)
        self._run_target(index, scheduled, inputs, begun, filled=True)
        begun = perf_counter()
        self._prepare_drafts(scheduled)
        self._run(Role.DRAFT_PREFILL, index, scheduled, prefill, begun, filled=True)
        if decodes is not None:
            self._run_draft_decodes(index, scheduled, decodes, by_role[Role.DRAFT_DECODE], filled=True)
        return self._proposed()

    def _correct(self, scheduled: ScheduledBatch) -> None:
        """Let the device bring the rows whose tokens the host has not read to what was kept of the step before."""
        parts, rows = self._parts, scheduled.num_reqs
        if parts.outcome is None:
            return
        assert parts.state is not None, "there is an outcome with a drafter alone"
        target = parts.roles[Role.TARGET].fields
        step = StepAhead(
            target=parts.token_fields[Role.TARGET],
            prefill=parts.token_fields[Role.DRAFT_PREFILL],
            starts=target["query_start_loc"][: rows + 1],
            most=1 + int(scheduled.drafts.max()),
            accepted=self._accepted_counts(rows),
        )
        parts.updates.correct(step, parts.state, parts.outcome)

    def _accepted_counts(self, rows: int) -> torch.Tensor | None:
        """Return what synthetic acceptance accepts of each row, ``int32[rows, places]``; None: the target decides."""
        counts = self._parts.roles[Role.TARGET].fields[ACCEPTED_COUNTS] if self._acceptance is not None else None
        return None if counts is None else counts.view(-1, self._parts.accepted_places)[:rows]

    def _prepare_drafts(self, scheduled: ScheduledBatch) -> None:
        """Let the device verify, and put what was kept into the drafter's fields."""
        parts, rows = self._parts, scheduled.num_reqs
        has_decodes = scheduled.draft_tokens > 1 and Role.DRAFT_DECODE in parts.roles
        target = parts.roles[Role.TARGET].fields
        parts.updates.prepare_drafts(
            VerificationInputs(
                fields=parts.token_fields[Role.TARGET],
                starts=target["query_start_loc"][: rows + 1],
                counts=target[SAMPLED_COUNTS][:rows],
                answers=parts.target.tokens[: scheduled.num_tokens],
                most=1 + int(scheduled.drafts.max()),
                accepted=self._accepted_counts(rows),
            ),
            parts.token_fields[Role.DRAFT_PREFILL],
            parts.roles[Role.DRAFT_PREFILL].fields["last_token_indices"],
            parts.token_fields[Role.DRAFT_DECODE] if has_decodes else None,
            parts.outcome,
        )

    def draft(self, step: PendingStep, verification: Verification) -> OnItsWay:
        """Run the first draft pass, on the target's batch or rows of its own, then k - 1 draft decodes of a chain."""
        states, scheduled, draft = self._scheduler.states, step.scheduled, self._parts.draft_rows
        assert draft is not None, "a drafter has rows"
        begun = perf_counter()
        if draft.is_own:
            prefill = own_prefill_inputs(step.inputs, scheduled, verification.kept, states, self._pages, draft)
        else:
            prefill = draft_prefill_inputs(step.inputs, scheduled, verification.kept, states)
        self._run(Role.DRAFT_PREFILL, step.index, scheduled, prefill, begun, filled=False)
        if step.draft_decodes is not None:
            after = states.computed[scheduled.state_indices] + 1 - draft.shift
            decode = draft_decode_inputs(scheduled, after, states, self._pages)
            self._run_draft_decodes(step.index, scheduled, step.draft_decodes, decode, filled=False)
        return self._proposed()

    def _run(
        self, role: Role, index: int, scheduled: ScheduledBatch, inputs: StepInputs, begun: float, *, filled: bool
    ) -> Dispatch:
        """Run the target or the draft prefill on a step's batch, and note the forward."""
        batch = step_batch(role, scheduled, inputs)
        dispatch = self._dispatcher.dispatch(batch)
        inputs = self._across(role, inputs)
        times = self._parts.roles[role].run(batch, dispatch, inputs, begun, filled=filled)
        self._note(index, batch, dispatch, times)
        self._ask(batch)
        return dispatch

    def _run_draft_decodes(
        self, index: int, scheduled: ScheduledBatch, dispatch: Dispatch, inputs: StepInputs, *, filled: bool
    ) -> None:
        """Run the draft decodes: one fused chain, or one graph several times."""
        batch = draft_decode_batch(scheduled)
        times, forwards = run_chain(
            self._parts.roles[Role.DRAFT_DECODE],
            batch,
            dispatch,
            self._across(Role.DRAFT_DECODE, inputs),
            scheduled.draft_tokens - 1,
            max_model_len=self._scheduler.states.max_model_len,
            filled=filled,
        )
        self._note(index, batch, dispatch, times, forwards)
        self._ask(batch, forwards)

    def _proposed(self) -> OnItsWay:
        assert self._parts.state is not None, "a drafter has a state"
        return on_its_way(self._parts.state.proposed)

    def _note(self, index: int, batch: Batch, dispatch: Dispatch, times: ForwardTimes, repeats: int = 1) -> None:
        self._session.add_forward(
            Forward(
                step=index,
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
            )
        )
