"""The runner: execute a plan. Reserve, capture, serve a stream of requests, report.

Nothing is decided here: the plan says what is captured, the dispatcher which graph serves a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import attrs
import numpy as np
import torch

from capture_planner.dispatch import Dispatcher
from capture_planner.entry import Batch
from capture_planner.errors import RunError
from capture_planner.models.contract import Drafter, TargetModel
from capture_planner.modes import Role
from capture_planner.plan import Plan
from capture_planner.registry import Registry
from capture_planner.runtime.assembly import Parts, assemble
from capture_planner.runtime.capture import as_captured, capture_all, without_graphs
from capture_planner.runtime.fields import Extents
from capture_planner.runtime.graph import Grapher
from capture_planner.runtime.kv import PageFormat
from capture_planner.runtime.ledger import Captured, Forward, Served, Step
from capture_planner.runtime.role import Options, Ran
from capture_planner.runtime.scheduler import Live, Scheduled, Scheduler
from capture_planner.runtime.speculative import Settled, sampled_rows, settle
from capture_planner.runtime.step import (
    Made,
    draft_decode_values,
    draft_prefill_values,
    move_on,
    target_values,
)
from capture_planner.runtime.workload import Request

Answers = Mapping[str, tuple[int, ...]]
"""What the target says to each request, prompt included, by the request's name."""


@attrs.define(eq=False)
class Session:
    """What has happened so far; complete at every moment, so that an interruption loses nothing."""

    captured: list[Captured] = attrs.Factory(list)
    forwards: list[Forward] = attrs.Factory(list)
    steps: list[Step] = attrs.Factory(list)
    served: list[Served] = attrs.Factory(list)
    capture_seconds: float = 0.0
    serve_seconds: float = 0.0
    interrupted: bool = False


class Runner:
    """Executes one plan on one model. Use it as a context: leaving releases the backends."""

    def __init__(
        self,
        plan: Plan,
        model: TargetModel,
        drafter: Drafter | None,
        registry: Registry,
        grapher: Grapher,
        *,
        pages: PageFormat,
        device: torch.device | None = None,
        options: Options | None = None,
    ) -> None:
        if (plan.speculative is None) != (drafter is None):
            raise RunError(
                "the plan has a drafter and none was given"
                if drafter is None
                else "a drafter was given, and the plan has none"
            )
        self.plan, self.model, self.drafter = plan, model, drafter
        self.pages, self.options = pages, options or Options()
        self.session = Session()
        self._grapher, self.device = grapher, device or torch.device("cpu")
        self.parts: Parts = assemble(
            plan,
            model,
            drafter,
            registry,
            grapher,
            pages=pages,
            device=self.device,
            options=self.options,
        )
        self._dispatch_by(without_graphs(plan))

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as releases:
            for role in reversed(tuple(self.parts.roles.values())):
                releases.callback(role.release)

    def capture(
        self, *, memory: int | None = None, progress: Callable[[Captured], None] | None = None
    ) -> None:
        """Capture every entry; what does not fit into memory is waived from here on.

        ``memory`` bounds each pool, in bytes. Before this is called, everything runs eager.
        """
        started = perf_counter()
        try:
            with torch.no_grad():
                for done in capture_all(
                    self.plan,
                    tuple(self.parts.roles.values()),
                    self._grapher,
                    self.options,
                    memory=memory,
                ):
                    self.session.captured.append(done)
                    if progress is not None:
                        progress(done)
        finally:
            self.session.capture_seconds = perf_counter() - started
        self._dispatch_by(as_captured(self.plan, self.session.captured))

    def _dispatch_by(self, plan: Plan) -> None:
        dispatcher = Dispatcher(plan)
        for role in self.parts.roles.values():
            role.dispatcher = dispatcher

    def serve(
        self,
        requests: Sequence[Request],
        *,
        answers: Answers | None = None,
        step_seconds: float = 0.01,
        progress: Callable[[Served], None] | None = None,
    ) -> list[Served]:
        """Serve all requests and return them in the order in which they finished.

        Arrivals are on a clock of steps: each step takes ``step_seconds`` of it, and idle time is
        skipped, so that the same requests make the same batches on any machine. ``answers`` are for
        drafters that copy or miss the target.
        """
        serving = self.start(requests, answers=answers, progress=progress)
        scheduler = serving.scheduler
        started = perf_counter()
        now = 0.0
        try:
            while not scheduler.done:
                scheduler.arrive(now, perf_counter())
                if not serving.step() and scheduler.next_arrival is not None:
                    now = scheduler.next_arrival
                else:
                    now += step_seconds
        finally:
            self.session.serve_seconds += perf_counter() - started
            serving.cut_off()
        return serving.served

    def start(
        self,
        requests: Sequence[Request] = (),
        *,
        answers: Answers | None = None,
        progress: Callable[[Served], None] | None = None,
    ) -> Serving:
        """Begin to serve, for whoever steps by hand; ``serve`` does it to the end."""
        scheduler = Scheduler(
            requests,
            limits=self.plan.limits,
            speculative=self.plan.speculative,
            pages=self.pages,
            max_model_len=self.plan.model.max_model_len,
        )
        self._refuse_too_many_pages(scheduler, requests)
        return Serving(self, scheduler, answers or {}, progress)

    def _refuse_too_many_pages(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        most = self.pages.num_pages - 1
        for request in requests:
            needed = scheduler.pages_needed(request)
            if needed > most:
                raise RunError(
                    f"the request {request.name} needs {needed} pages of {self.pages.page_size} tokens, and "
                    f"the KV cache has {most}; give it more (--pages)"
                )


class Serving:
    """The requests of one call of ``serve``, step by step."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        answers: Answers,
        progress: Callable[[Served], None] | None,
    ) -> None:
        self._runner, self.scheduler = runner, scheduler
        self._answers, self._progress = answers, progress
        self._session = runner.session
        self.served: list[Served] = []

    @torch.no_grad()
    def step(self) -> bool:
        """Run one step; return False where there was nothing to run."""
        started = perf_counter()
        scheduled, admitted = self.scheduler.schedule()
        for live in admitted:
            if self._runner.drafter is not None:
                self._runner.drafter.learn(live.place, self._answers.get(live.request.name, ()))
        if scheduled is None:
            return False
        index, begun = len(self._session.steps), perf_counter()
        places = self.scheduler.places
        values = target_values(scheduled, places, self._runner.pages)
        settled = self._target(index, scheduled, values, begun)
        finished = self._finished(scheduled, settled)
        # A row that was filled up with any token is no draft of anybody.
        drafts = np.minimum(scheduled.drafts, places.proposed[scheduled.places])
        drafted, accepted = int(drafts.sum()), int(np.minimum(drafts, settled.accepted).sum())
        if self._runner.drafter is not None and len(finished) < scheduled.num_reqs:
            self._draft(index, scheduled, values, settled)
        done = [self._finish(live) for live in finished]
        self._session.steps.append(
            Step(
                index=index,
                num_reqs=scheduled.num_reqs,
                num_tokens=scheduled.num_tokens,
                prompts=scheduled.prompts,
                drafted=drafted,
                accepted=accepted,
                seconds=perf_counter() - started,
                waiting=self.scheduler.waiting,
            )
        )
        if self._progress is not None:
            for served in done:
                self._progress(served)
        return True

    def _target(self, index: int, scheduled: Scheduled, values: Made, begun: float) -> Settled:
        """Run the target, and verify."""
        role = self._runner.parts.roles[Role.TARGET]
        body, places = self._runner.parts.target, self.scheduler.places
        if body.embeddings is not None:
            tokens = scheduled.num_tokens
            body.embeddings[tokens:].zero_()
            body.embeddings[:tokens] = self._runner.model.embed(
                torch.from_numpy(values["input_ids"]).to(self._runner.device)
            )
        batch = _batch(Role.TARGET, scheduled)
        ran = role.run(batch, values, begun)
        self._note(index, batch, ran)
        rows = sampled_rows(scheduled, values["query_start_loc"], places)
        read = torch.from_numpy(rows).to(self._runner.device)
        sampled = body.sample(read, ran.dispatch.entry)
        settled = settle(scheduled, places, sampled.cpu().numpy())
        if scheduled.prompts:
            clock = perf_counter()
            for live, gained in zip(scheduled.live, settled.gained, strict=True):
                if gained and live.first_token is None:
                    live.first_token = clock
        return settled

    def _draft(self, index: int, scheduled: Scheduled, target: Made, settled: Settled) -> None:
        """Run the draft prefill on the target's batch, then k - 1 draft decodes."""
        places, parts = self.scheduler.places, self._runner.parts
        begun = perf_counter()
        values = draft_prefill_values(target, scheduled, settled.kept, places)
        batch = _batch(Role.DRAFT_PREFILL, scheduled)
        self._note(index, batch, parts.roles[Role.DRAFT_PREFILL].run(batch, values, begun))
        k = scheduled.draft_tokens
        if k > 1:
            self._draft_decodes(index, scheduled, k - 1)
        assert parts.state is not None, "a drafter has a state"
        proposed = parts.state.proposed.cpu().numpy()
        rows = scheduled.places[settled.gained > 0]
        places.proposed[scheduled.places] = np.where(settled.gained > 0, k, 0)
        places.tokens[rows[:, None], places.length[rows][:, None] + np.arange(k)] = proposed[rows, :k]

    def _draft_decodes(self, index: int, scheduled: Scheduled, steps: int) -> None:
        """Run the draft decodes: one fused chain, or one graph again and again."""
        places, pages = self.scheduler.places, self._runner.pages
        role = self._runner.parts.roles[Role.DRAFT_DECODE]
        begun = perf_counter()
        values = draft_decode_values(scheduled, places, pages)
        batch = Batch(
            role=Role.DRAFT_DECODE, num_reqs=scheduled.num_reqs, num_tokens=scheduled.num_reqs, query_len=1
        )
        ran = role.run(batch, values, begun)
        entry = ran.dispatch.entry
        if entry is not None and entry.draft_steps is not None:
            self._note(index, batch, ran)
            return
        host, seconds = ran.host_seconds, ran.seconds
        real = Extents(tokens=batch.num_tokens, reqs=batch.num_reqs, pages=role.fields.capacity.pages)
        for _ in range(steps - 1):
            started = perf_counter()
            move_on(values, pages.page_size, self._runner.plan.model.max_model_len)
            role.follow(values)
            role.prepare(entry, real, ran.extents, values)
            again = role.again(ran.dispatch, entry, ran.extents, started)
            host, seconds = host + again.host_seconds, seconds + again.seconds
        self._note(index, batch, attrs.evolve(ran, host_seconds=host, seconds=seconds), steps)

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
                host_seconds=ran.host_seconds,
                seconds=ran.seconds,
            )
        )

    def _output(self, live: Live) -> tuple[int, ...]:
        """Return what a request has been given."""
        places, start = self.scheduler.places, len(live.request.prompt)
        tokens = places.tokens[live.place, start : int(places.length[live.place])]
        return live.request.cut(tuple(tokens.tolist()))

    def _finished(self, scheduled: Scheduled, settled: Settled) -> list[Live]:
        """Return the requests that had their last token in this step."""
        places, rows = self.scheduler.places, scheduled.places
        length = places.length[rows]
        ended = (settled.gained > 0) & (length >= places.end[rows])
        for row in np.flatnonzero((settled.gained > 0) & places.stops[rows] & ~ended):
            new = places.tokens[rows[row], length[row] - settled.gained[row] : length[row]]
            ended[row] = not scheduled.live[row].request.stop.isdisjoint(new.tolist())
        return [scheduled.live[row] for row in np.flatnonzero(ended)]

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

    def cut_off(self) -> None:
        """Take down the requests that were not finished, where serving stopped early."""
        for live in self.scheduler.unfinished:
            self._finish(live, cut_off=True)


def _batch(role: Role, scheduled: Scheduled) -> Batch:
    return Batch(
        role=role,
        num_reqs=scheduled.num_reqs,
        num_tokens=scheduled.num_tokens,
        query_len=scheduled.query_len,
        past_prompt=scheduled.prompts == 0,
    )
