"""Continuous batching with chunked prefill: which requests run in a step, with how many tokens.

Simple on purpose: it exists to send a plan every batch that its limits admit. A request is admitted
when a request state, a row of recurrent states and all the pages that it can ever need are free, so nothing is
preempted. Requests past their prompt come first, then prompts in chunks, in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.plugins.backend import NULL_STATE
from capture_planner.records.model import Speculative
from capture_planner.records.spec import Limits, Lora
from capture_planner_runner.ledger.rows import Wait
from capture_planner_runner.serving.speculative import request_key
from capture_planner_runner.serving.states import (
    AdmittedRequest,
    Integers,
    PageFormat,
    PagePool,
    RequestStates,
    ScheduledBatch,
)
from capture_planner_runner.serving.workload import Request


class Scheduler:
    """Hands out batches until all requests are served."""

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        limits: Limits,
        speculative: Speculative | None,
        pages: PageFormat,
        max_model_len: int,
        lora: Lora | None = None,
        num_adapters: int = 0,
        pool_rows: int | None = None,
        is_sampled: bool = False,
    ) -> None:
        """:param pool_rows: rows of recurrent states, including the null state; None: no layer is recurrent."""
        self._max_adapters, self._num_adapters = 0 if lora is None else lora.max_active, num_adapters
        self._limits, self._speculative = limits, speculative
        self._pages, self._max_model_len = pages, max_model_len
        self._slots = 0 if speculative is None else speculative.extra_slots
        self._lookahead = 0 if speculative is None else speculative.num_tokens + self._slots
        self._pool = PagePool(pages.num_pages)
        self._pool_rows = None if pool_rows is None else PagePool(pool_rows)
        self._arriving = deque(sorted(map(self._admissible, requests), key=lambda each: each.arrival))
        self._waiting: deque[tuple[Request, float]] = deque()
        self._free = list(range(limits.max_num_reqs - 1, -1, -1))  # taken from the end: state 0 first
        self._stalled, self._missing = 0, Wait.PLACES
        """Number of waiting requests that could not be admitted before, and the resource that was missing then."""
        self._running: list[AdmittedRequest] = []
        self._leaving: list[AdmittedRequest] = []
        self._turn = 0
        self.states = RequestStates(
            limits.max_num_reqs,
            max_model_len,
            self._lookahead,
            pages,
            has_adapters=lora is not None,
            is_sampled=is_sampled,
        )

    @property
    def waiting(self) -> int:
        """Requests that have arrived and are not admitted."""
        return len(self._waiting)

    @property
    def unadmitted(self) -> Iterator[tuple[Request, Wait | None]]:
        """The requests that are not admitted, with what those that have arrived wait for."""
        for place, (request, _) in enumerate(self._waiting):
            yield request, self._missing if place < self._stalled else None
        for request in self._arriving:
            yield request, None

    @property
    def unfinished(self) -> tuple[AdmittedRequest, ...]:
        """Requests that are admitted now."""
        return (*self._running, *self._leaving)

    @property
    def next_arrival(self) -> float | None:
        """When the next request comes; None where all have."""
        return self._arriving[0].arrival if self._arriving else None

    @property
    def done(self) -> bool:
        return not (self._arriving or self._waiting or self._running or self._leaving)

    def arrive(self, now: float, clock: float) -> None:
        """Queue the requests that have arrived by ``now``; ``clock`` is the wall clock for latencies."""
        while self._arriving and self._arriving[0].arrival <= now:
            self._waiting.append((self._arriving.popleft(), clock))

    def submit(self, request: Request, clock: float) -> None:
        """Queue a request now; raises ``RunError`` for one that can never be served."""
        self._waiting.append((self._admissible(request), clock))

    def _admissible(self, request: Request) -> Request:
        """Return a request, or refuse one that would block the queue forever."""
        length, longest, most = request.length, self._max_model_len, self._pages.num_pages - 1  # less the null page
        if not request.prompt or length > longest:
            raise RunError(
                f"the request {request.name} has {len(request.prompt)} tokens and asks for "
                f"{request.max_new_tokens}; the plan's model has room for {longest}, and needs one to begin with"
            )
        if not 0 <= request.adapter <= self._num_adapters:
            raise RunError(
                f"the request {request.name} has adapter {request.adapter}, and the run has {self._num_adapters}; "
                "give the runner more, or plan with lora"
            )
        needed = self.pages_needed(request)
        if needed > most:
            raise RunError(
                f"the request {request.name} needs {needed} pages of {self._pages.page_size} tokens, and "
                f"the KV cache has {most}; give it more (--pages)"
            )
        return request

    def pages_needed(self, request: Request) -> int:
        """Return the pages that a request can ever need, drafts after its last token included."""
        return self._pages.pages(min(request.length + self._lookahead, self._max_model_len))

    def schedule(self) -> tuple[ScheduledBatch | None, tuple[AdmittedRequest, ...]]:
        """Return the next batch and the requests that were admitted for it."""
        admitted = self._admit()
        ready = self._ready()
        if not ready:
            return None, admitted
        running = np.array([live.state_index for live in ready], dtype=np.int64)
        # As if the step in flight keeps all its drafts. Where it does not, the device moves the rows back
        # (`Updates.correct`).
        computed = self.states.computed_at_most(running)
        prompt_left = (self.states.prompt[running] - computed).tolist()
        room = dict(zip(running.tolist(), self._room(running).tolist(), strict=True))
        decoding = [live for live, left in zip(ready, prompt_left, strict=True) if left <= 0]
        prompting = [(live, left) for live, left in zip(ready, prompt_left, strict=True) if left > 0]
        left, k = self._limits.max_num_tokens, self._k(len(ready))
        # Each row takes its tokens and what the first draft pass has beyond them, as in vLLM 0.33 (``draft_slots``).
        slots = self._slots
        if not prompting or (decoding and len(decoding) * (1 + k + slots) + slots >= left):
            # Only decodes, and no more than have room for all their drafts: so the batch stays uniform and has a graph.
            prompting, decoding = [], self._rotate(decoding)
            k = self._k(len(decoding))
        rows: list[tuple[AdmittedRequest, int, int]] = []
        for live in decoding:
            # At least its own token; drafts as far as there is room in the step.
            drafts = min(k, room[live.state_index], left - 1 - slots)
            if drafts < 0:
                # The step has no room for another row.
                break
            rows.append((live, 1 + drafts, drafts))
            left -= 1 + drafts + slots
        decodes = len(rows)
        for live, of_prompt in prompting:
            # A prompt that does not fit is split: its next chunk is in a later step.
            if left < 1 + slots:
                break
            rows.append((live, min(left - slots, of_prompt), 0))
            left -= rows[-1][1] + slots
        return self._scheduled(rows, len(rows) - decodes), admitted

    def _ready(self) -> list[AdmittedRequest]:
        """Return the running requests that a step can have, whatever verification keeps of the step in flight.

        A request whose last token is certainly in flight is excluded. One that may lack room for all drafts, in the
        model or in its pages, waits for its tokens.
        """
        states = self.states
        running = np.array([live.state_index for live in self._running], dtype=np.int64)
        unread = states.is_unread(running)
        if not unread.any():
            return list(self._running)
        drafts = 0 if self._speculative is None else self._speculative.num_tokens
        ends = states.length[running] + 1 >= states.end[running]  # a step gives each request one token at least
        ends |= states.computed_at_most(running) + 1 + drafts > states.room[running]
        return [live for live, waits in zip(self._running, unread & ends, strict=True) if not waits]

    def _room(self, running: Integers) -> Integers:
        """Return how many drafts each request can verify, ``int64[R]``: within the model's length, and where decodes
        vary, only those that it has and that it has tokens left for.
        """
        states = self.states
        room: Integers = self._max_model_len - 1 - states.computed_at_most(running)  # 1: the token before the drafts
        if self._speculative is None or Role.TARGET not in self._speculative.varying_decodes:
            return room
        wanted = states.end[running] - states.length[running] - 1
        useful: Integers = np.minimum(np.minimum(room, states.proposed[running]), np.maximum(wanted, 0))
        return useful

    def _admit(self) -> tuple[AdmittedRequest, ...]:
        admitted: list[AdmittedRequest] = []
        while self._waiting:
            request, entered = self._waiting[0]
            if (missing := self._missing_for(request)) is not None:
                # In order of arrival: a request that must wait holds back those behind it.
                self._missing = missing
                break
            self._waiting.popleft()
            # Those behind the ones that were refused last have arrived since, and have waited for nothing yet.
            waited_for = self._missing if len(admitted) < self._stalled else None
            row = NULL_STATE if self._pool_rows is None else self._pool_rows.take(1)[0]
            pages = self._pool.take(self.pages_needed(request))
            live = AdmittedRequest(request, self._free.pop(), pages, entered, row, waited_for)
            self._settle(live)
            self._running.append(live)
            admitted.append(live)
        self._stalled = len(self._waiting)
        return tuple(admitted)

    def _missing_for(self, request: Request) -> Wait | None:
        """Return what a request cannot be admitted without, and is not free."""
        if not self._free:
            return Wait.PLACES
        if self.pages_needed(request) > self._pool.free:
            return Wait.PAGES
        if self._pool_rows is not None and not self._pool_rows.free:
            return Wait.STATES
        return None if self._has_lane(request.adapter) else Wait.ADAPTERS

    def _has_lane(self, adapter: int) -> bool:
        """Say whether a request with this adapter leaves no more active ones than the plan has graphs for."""
        active = {live.request.adapter for live in self.unfinished} - {0}
        return not adapter or adapter in active or len(active) < self._max_adapters

    def _settle(self, live: AdmittedRequest) -> None:
        index, prompt = live.state_index, live.request.prompt
        # The state had another request: rows of rejected drafts read tokens behind those that are known.
        self.states.tokens[index] = 0
        self.states.tokens[index, : len(prompt)] = prompt
        self.states.length[index] = self.states.prompt[index] = len(prompt)
        self.states.computed[index] = self.states.proposed[index] = self.states.ahead[index] = 0
        self.states.end[index] = live.request.length
        self.states.stops[index] = bool(live.request.stop)
        self.states.key[index] = request_key(live.request.name)
        self.states.adapter[index] = live.request.adapter
        # Page 0 is the null page: a position past a request's pages must not reach another request's.
        self.states.table[index] = 0
        self.states.table[index, : len(live.pages)] = live.pages
        self.states.room[index] = min(len(live.pages) * self._pages.page_size, self._max_model_len)
        self.states.pool_row[index] = live.pool_row

    def _k(self, num_reqs: int) -> int:
        return 0 if self._speculative is None else self._speculative.draft_tokens(num_reqs)

    def _rotate(self, decoding: Sequence[AdmittedRequest]) -> list[AdmittedRequest]:
        """Return the decodes that have room for all their drafts, taking turns where not all have."""
        count = len(decoding)
        # Not a division: a schedule may raise k as the batch shrinks, so fewer requests can need more tokens.
        while count > 1 and count * (1 + self._k(count) + self._slots) > self._limits.max_num_tokens:
            count -= 1
        if count == len(decoding):
            return list(decoding)
        # The turn moves on by the requests that had one, so that each runs equally often.
        start = self._turn % len(decoding)
        self._turn += count
        return [decoding[(start + i) % len(decoding)] for i in range(count)]

    def _scheduled(self, rows: Sequence[tuple[AdmittedRequest, int, int]], prompts: int) -> ScheduledBatch:
        live, counts, wanted = zip(*rows, strict=True)
        indices, drafts = np.array([each.state_index for each in live], dtype=np.int64), np.array(wanted, np.int64)
        unread = self.states.is_unread(indices)
        scheduled = ScheduledBatch(
            live=live,
            state_indices=indices,
            base=self.states.computed_at_most(indices),
            counts=np.array(counts, dtype=np.int64),
            drafts=drafts,
            prompts=prompts,
            draft_tokens=self._k(len(rows)),
            # While a step is in flight, the host's count of proposed drafts is one step old.
            proposed=np.minimum(drafts, np.where(unread, self.states.coming[indices], self.states.proposed[indices])),
            unread=unread,
        )
        self._fill_up(scheduled)
        return scheduled

    def _fill_up(self, scheduled: ScheduledBatch) -> None:
        """Fill rows that have too few drafts with their last token, so that the batch stays uniform.

        That happens where a schedule raises k as the batch shrinks. Verification rejects wrong tokens, so any token
        will do. A row whose tokens are in flight gets tokens 0, see ``inputs.unread_tokens``.
        """
        missing = (scheduled.drafts > scheduled.proposed) & ~scheduled.unread
        for index, drafts in zip(scheduled.state_indices[missing], scheduled.drafts[missing], strict=True):
            start, row = int(self.states.length[index]), self.states.tokens[index]
            row[start + int(self.states.proposed[index]) : start + drafts] = row[start - 1]

    def leave(self, live: AdmittedRequest) -> None:
        """Stop scheduling a request; its last token is in flight."""
        self._running.remove(live)
        self._leaving.append(live)

    def finish(self, live: AdmittedRequest) -> None:
        """Free the state and the pages of a request."""
        # One that a stop token ended is still running: only lengths are known ahead, and `leave` follows from those.
        (self._leaving if live in self._leaving else self._running).remove(live)
        live.finish()
        self._free.append(live.state_index)
        self._pool.give_back(live.pages)
        if self._pool_rows is not None:
            self._pool_rows.give_back([live.pool_row])
