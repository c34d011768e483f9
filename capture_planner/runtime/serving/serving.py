"""Serving, step by step: what is launched for a batch, and what is done when its tokens are there.

Without a drafter, lengths are known before tokens are: so a step can be launched before the tokens of
the one before it are read, and a GPU has no pause in between. Where the batch is the same, the graph
itself has brought its fields to the next token, and nothing is copied at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.runtime.execution.chain import run_chain
from capture_planner.runtime.execution.fields import SAMPLED_COUNTS, SAMPLED_ROWS
from capture_planner.runtime.execution.role import Ran
from capture_planner.runtime.execution.step import (
    Array,
    Made,
    draft_decode_values,
    draft_prefill_values,
    go_on,
    target_values,
)
from capture_planner.runtime.execution.transfer import OnItsWay, on_its_way
from capture_planner.runtime.execution.updates import Verified
from capture_planner.runtime.ledger import Forward, Served, Step
from capture_planner.runtime.serving.scheduler import Live, Scheduled, Scheduler
from capture_planner.runtime.serving.speculative import Settled, fulfil, promise, settle

if TYPE_CHECKING:
    from capture_planner.runtime.runner import Runner

Answers = Mapping[str, tuple[int, ...]]
"""What the target says to each request, prompt included, by the request's name."""


@attrs.frozen(kw_only=True, eq=False)
class Launched:
    """A step that is under way."""

    index: int
    scheduled: Scheduled
    values: Made
    started: float
    tokens: OnItsWay
    """``int64[T]``: what the target says after each row that is read."""
    proposed: OnItsWay | None
    """``int64[places + 1, K]``, where the drafter is under way too."""
    promised: Settled | None
    """What the step counts, where that is known before its tokens are."""


class Serving:
    """The requests of one call of ``serve``."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        answers: Answers,
        progress: Callable[[Served], None] | None,
    ) -> None:
        self._runner, self.scheduler = runner, scheduler
        self._answers, self._progress = answers, progress
        self._session, self._parts = runner.session, runner.parts
        self._under_way: Launched | None = None
        self._goes_on: tuple[Array, Made, int] | None = None
        """Whose decodes the last graph brought to their next token, with what values, and for how many more
        tokens the block table on the device has pages."""
        self._count = len(self._session.steps)
        self._last_end = perf_counter()
        self.served: list[Served] = []
        self.is_over = False
        """Whether it was cut off."""

    @property
    def done(self) -> bool:
        """Whether all requests are served and nothing is under way."""
        return self.scheduler.done and self._under_way is None

    @torch.no_grad()
    def step(self) -> bool:
        """Launch a step, and complete it or, running ahead, the one before; False: there was nothing.

        Raises ``RunError`` after it was cut off.
        """
        if self.is_over:
            raise RunError("this serving was cut off; start another")
        started = perf_counter()
        scheduled, admitted = self.scheduler.schedule()
        for live in admitted:
            if self._runner.drafter is not None:
                self._runner.drafter.learn(live.place, self._answers.get(live.request.name, ()))
        now = None if scheduled is None else self._launch(scheduled, started)
        if self._parts.target.ahead:
            now, self._under_way = self._under_way, now
        if now is not None:
            self._complete(now)
        return now is not None or self._under_way is not None

    def cut_off(self) -> None:
        """Take down the requests that were not finished, where serving stops early; nothing is run after."""
        self.is_over = True
        for live in self.scheduler.unfinished:
            self._finish(live, cut_off=True)

    # Launching.

    def _launch(self, scheduled: Scheduled, started: float) -> Launched:
        index, self._count = self._count, self._count + 1
        if self._parts.findings is not None:
            self._parts.findings.begin(index, scheduled.live, self.scheduler.unfinished)
        begun, batch = perf_counter(), _batch(Role.TARGET, scheduled)
        values, goes_on = self._values(scheduled)
        proposed = None
        if self._drafts_on_device(scheduled):
            proposed = self._all_on_device(index, scheduled, batch, values, begun)
        else:
            entry = self._target(index, batch, values, begun, filled=goes_on)
            if not goes_on and self._parts.target.goes_on and entry is not None and entry.query_len == 1:
                room = values["block_table"].shape[1] * self._runner.pages.page_size
                self._goes_on = scheduled.places, values, room - int(values["seq_lens"].max())
        return Launched(
            index=index,
            scheduled=scheduled,
            values=values,
            started=started,
            tokens=on_its_way(self._parts.target.tokens[: scheduled.num_tokens]),
            proposed=proposed,
            promised=self._promised(scheduled, values) if self._runner.drafter is None else None,
        )

    def _values(self, scheduled: Scheduled) -> tuple[Made, bool]:
        """Return a step's values, and whether the graph of the last one brought the fields to them."""
        last, self._goes_on = self._goes_on, None
        if last is not None and not scheduled.prompts and scheduled.query_len == 1:
            places, values, room = last
            if room and np.array_equal(places, scheduled.places):
                go_on(values)
                self._goes_on = places, values, room - 1
                return values, True
        return target_values(scheduled, self.scheduler.places, self._runner.pages), False

    def _promised(self, scheduled: Scheduled, values: Made) -> Settled:
        """Count the step before its tokens are there; whoever has all of theirs then is scheduled no more."""
        places, rows = self.scheduler.places, scheduled.places
        settled = promise(scheduled, places, values["query_start_loc"])
        for row in np.flatnonzero((settled.gained > 0) & (places.length[rows] >= places.end[rows])):
            self.scheduler.leave(scheduled.live[row])
        return settled

    def _target(self, index: int, batch: Batch, values: Made, begun: float, *, filled: bool) -> Entry | None:
        """Run the target."""
        role, body = self._parts.roles[Role.TARGET], self._parts.target
        if body.embeddings is not None:
            body.embeddings[batch.num_tokens :].zero_()
            body.embeddings[: batch.num_tokens] = self._runner.model.embed(
                torch.from_numpy(values["input_ids"]).to(self._runner.device)
            )
        ran = role.run(batch, values, begun, filled=filled)
        self._note(index, batch, ran)
        entry = ran.dispatch.entry
        if len(values[SAMPLED_ROWS]):
            body.sample(entry, len(values[SAMPLED_ROWS]))
        return entry

    def _drafts_on_device(self, scheduled: Scheduled) -> bool:
        """Say whether the drafter's fields can be worked out without the host.

        Not where a backend needs the lengths there for its draft decodes, nor where these run eager.
        """
        if self._runner.drafter is None or not self._parts.drafts_on_device:
            return False
        if scheduled.draft_tokens < 2:
            return True
        role = self._parts.roles[Role.DRAFT_DECODE]
        return role.goes_on_alone and role.dispatch(_decodes(scheduled)).entry is not None

    def _all_on_device(
        self, index: int, scheduled: Scheduled, batch: Batch, values: Made, begun: float
    ) -> OnItsWay:
        """Fill the fields of all roles at once, and run target, verification and drafter in a row."""
        parts, places = self._parts, self.scheduler.places
        roles = [parts.roles[Role.TARGET], parts.roles[Role.DRAFT_PREFILL]]
        # As if all drafts were kept; what was kept is put in on the device.
        longest = places.computed[scheduled.places] + scheduled.counts
        made = [values, draft_prefill_values(values, scheduled, scheduled.counts, places)]
        if scheduled.draft_tokens > 1:
            roles.append(parts.roles[Role.DRAFT_DECODE])
            made.append(draft_decode_values(scheduled, longest, places, self._runner.pages))
        if self._runner.options.poison:
            for role in roles:
                role.poison()
        parts.apply([write for role, mine in zip(roles, made, strict=True) for write in role.fill(mine)])
        self._target(index, batch, values, begun, filled=True)
        begun = perf_counter()
        self._prepare_drafts(scheduled)
        prefill = _batch(Role.DRAFT_PREFILL, scheduled)
        self._note(index, prefill, roles[1].run(prefill, made[1], begun, filled=True))
        if scheduled.draft_tokens > 1:
            self._draft_decodes(index, scheduled, made[2], filled=True)
        assert parts.state is not None, "a drafter has a state"
        return on_its_way(parts.state.proposed)

    def _prepare_drafts(self, scheduled: Scheduled) -> None:
        """Let the device verify, and put what was kept into the drafter's fields."""
        parts, rows = self._parts, scheduled.num_reqs
        target = parts.roles[Role.TARGET].fields
        parts.updates.prepare_drafts(
            Verified(
                fields=parts.moving[Role.TARGET],
                starts=target["query_start_loc"][: rows + 1],
                counts=target[SAMPLED_COUNTS][:rows],
                answers=parts.target.tokens[: scheduled.num_tokens],
                most=1 + int(scheduled.drafts.max()),
            ),
            parts.moving[Role.DRAFT_PREFILL],
            parts.roles[Role.DRAFT_PREFILL].fields["last_token_indices"],
            parts.moving[Role.DRAFT_DECODE] if scheduled.draft_tokens > 1 else None,
        )

    def _draft(self, index: int, scheduled: Scheduled, target: Made, settled: Settled) -> OnItsWay:
        """Run the draft prefill on the target's batch, then k - 1 draft decodes, from what was settled."""
        places, parts = self.scheduler.places, self._parts
        begun = perf_counter()
        values = draft_prefill_values(target, scheduled, settled.kept, places)
        batch = _batch(Role.DRAFT_PREFILL, scheduled)
        self._note(index, batch, parts.roles[Role.DRAFT_PREFILL].run(batch, values, begun))
        if scheduled.draft_tokens > 1:
            wanted = places.computed[scheduled.places]
            values = draft_decode_values(scheduled, wanted, places, self._runner.pages)
            self._draft_decodes(index, scheduled, values, filled=False)
        assert parts.state is not None, "a drafter has a state"
        return on_its_way(parts.state.proposed)

    def _draft_decodes(self, index: int, scheduled: Scheduled, values: Made, *, filled: bool) -> None:
        """Run the draft decodes: one fused chain, or one graph again and again."""
        steps = scheduled.draft_tokens - 1
        role = self._parts.roles[Role.DRAFT_DECODE]
        batch = _decodes(scheduled)
        longest = self._runner.plan.model.max_model_len
        ran, forwards = run_chain(role, batch, values, steps, max_model_len=longest, filled=filled)
        self._note(index, batch, ran, forwards)

    def _note(self, index: int, batch: Batch, ran: Ran, repeats: int = 1) -> None:
        answer = ran.dispatch
        self._session.forwards.append(
            Forward(
                step=index,
                role=batch.role,
                num_reqs=batch.num_reqs,
                num_tokens=batch.num_tokens,
                query_len=batch.uniform_query_len,
                entry=answer.entry,
                reason=answer.reason,
                padded_tokens=answer.padded_tokens,
                padded_reqs=answer.padded_reqs,
                repeats=repeats,
                preparation=ran.preparation,
                host_seconds=ran.host_seconds,
                seconds=ran.seconds,
            )
        )

    # Completing.

    def _complete(self, step: Launched) -> None:
        """Put a step's tokens in their places, finish who has all of theirs, and draft for the others."""
        scheduled, places = step.scheduled, self.scheduler.places
        settled = self._settled(step)
        # A row that was filled up with any token is no draft of anybody.
        drafts = np.minimum(scheduled.drafts, places.proposed[scheduled.places])
        drafted, accepted = int(drafts.sum()), int(np.minimum(drafts, settled.accepted).sum())
        finished = self._finished(scheduled, settled)
        proposed = step.proposed
        if self._runner.drafter is not None:
            if proposed is None and len(finished) < scheduled.num_reqs:
                proposed = self._draft(step.index, scheduled, step.values, settled)
            if proposed is not None:
                self._propose(scheduled, settled, proposed())
        done = [self._finish(live) for live in finished]
        end = perf_counter()
        self._session.steps.append(
            Step(
                index=step.index,
                num_reqs=scheduled.num_reqs,
                num_tokens=scheduled.num_tokens,
                prompts=scheduled.prompts,
                drafted=drafted,
                accepted=accepted,
                seconds=end - max(step.started, self._last_end),
                waiting=self.scheduler.waiting,
            )
        )
        self._last_end = end
        if self._progress is not None:
            for served in done:
                self._progress(served)

    def _settled(self, step: Launched) -> Settled:
        scheduled, places = step.scheduled, self.scheduler.places
        said = step.tokens()
        if step.promised is None:
            settled = settle(scheduled, places, said[step.values[SAMPLED_ROWS]])
        else:
            settled = step.promised
            gone = [live.is_finished for live in scheduled.live]
            if any(gone):
                # A stop token ended them when this step was under way; their places may be others' now.
                settled = attrs.evolve(settled, gained=np.where(gone, 0, settled.gained))
            fulfil(scheduled, settled, places, step.values["query_start_loc"], said)
        if scheduled.prompts:
            clock = perf_counter()
            for live, gained in zip(scheduled.live, settled.gained, strict=True):
                if gained and live.first_token is None:
                    live.first_token = clock
        return settled

    def _propose(self, scheduled: Scheduled, settled: Settled, proposed: Array) -> None:
        """Put the drafts after what is settled."""
        places, k = self.scheduler.places, scheduled.draft_tokens
        rows = scheduled.places[settled.gained > 0]
        places.proposed[scheduled.places] = np.where(settled.gained > 0, k, 0)
        places.tokens[rows[:, None], places.length[rows][:, None] + np.arange(k)] = proposed[rows, :k]

    def _finished(self, scheduled: Scheduled, settled: Settled) -> list[Live]:
        """Return the requests that had their last token in this step."""
        places, rows = self.scheduler.places, scheduled.places
        length = settled.at + settled.gained
        ended = (settled.gained > 0) & (length >= places.end[rows])
        for row in np.flatnonzero((settled.gained > 0) & places.stops[rows] & ~ended):
            new = places.tokens[rows[row], settled.at[row] : length[row]]
            ended[row] = not scheduled.live[row].request.stop.isdisjoint(new.tolist())
        return [scheduled.live[row] for row in np.flatnonzero(ended)]

    def _output(self, live: Live) -> tuple[int, ...]:
        """Return what a request has been given; a token that is on its way is negative."""
        places, start = self.scheduler.places, len(live.request.prompt)
        tokens = places.tokens[live.place, start : int(places.length[live.place])]
        return live.request.cut(tuple(tokens[tokens >= 0].tolist()))

    def _finish(self, live: Live, *, cut_off: bool = False) -> Served:
        clock = perf_counter()
        output = self._output(live)
        served = Served(
            name=live.request.name,
            prompt_tokens=len(live.request.prompt),
            output_tokens=len(output),
            first_token=None if live.first_token is None else live.first_token - live.entered,
            finished=None if cut_off else clock - live.entered,
            tokens=output,
        )
        self.served.append(served)
        self._session.served.append(served)
        if not cut_off:
            self.scheduler.finish(live)
        return served


def _batch(role: Role, scheduled: Scheduled) -> Batch:
    return Batch(
        role=role,
        num_reqs=scheduled.num_reqs,
        num_tokens=scheduled.num_tokens,
        query_len=scheduled.query_len,
        past_prompt=scheduled.prompts == 0,
    )


def _decodes(scheduled: Scheduled) -> Batch:
    return Batch.decode(Role.DRAFT_DECODE, scheduled.num_reqs, 1)
