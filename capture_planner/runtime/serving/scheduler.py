"""Continuous batching with chunked prefill: which requests run in a step, with how many tokens.

Simple on purpose: it exists to send a plan every batch that its limits admit. A request is admitted
when a request state, a row of recurrent states and all the pages that it can ever need are free, so nothing is
preempted. Requests past their prompt come first, then prompts in chunks, in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from capture_planner.errors import RunError
from capture_planner.records.model import Speculative
from capture_planner.records.spec import Limits, Lora
from capture_planner.runtime.executor import NULL_STATE
from capture_planner.runtime.ledger import Wait
from capture_planner.runtime.serving.acceptance import request_key
from capture_planner.runtime.serving.kv import PageFormat, PagePool
from capture_planner.runtime.serving.workload import Request

Integers = np.ndarray[Any, np.dtype[np.int64]]


@attrs.define(eq=False)
class AdmittedRequest:
    """An admitted request."""

    request: Request
    state_index: int
    pages: list[int]
    entered: float
    """Wall clock when it entered the queue."""
    pool_row: int = NULL_STATE
    """Its row in the pool of recurrent states; the null state's without recurrent layers."""
    waited_for: Wait | None = None
    """What was missing when it, or one before it, could not be admitted; None: it did not wait."""
    first_token: float | None = None
    is_finished: bool = False

    def answer(self, clock: float) -> None:
        """Note the wall clock of its first token; later ones change nothing."""
        if self.first_token is None:
            self.first_token = clock

    def finish(self) -> None:
        self.is_finished = True


@attrs.frozen(kw_only=True, eq=False)
class ScheduledBatch:
    """One step's batch, a row a request."""

    live: tuple[AdmittedRequest, ...]
    state_indices: Integers
    """``[R]``: the row of each request in ``RequestStates``."""
    counts: Integers
    """``[R]``: tokens of each row, drafts included."""
    drafts: Integers
    """``[R]``: how many of them are drafts to verify; 0 in a prompt."""
    prompts: int
    """Rows that are still in their prompt."""
    draft_tokens: int
    """k for this number of requests."""

    num_reqs: int = attrs.field(init=False)
    num_tokens: int = attrs.field(init=False)
    query_len: int | None = attrs.field(init=False)
    """The tokens of each row, where all have the same number."""

    @num_reqs.default
    def _rows(self) -> int:
        return len(self.live)

    @num_tokens.default
    def _tokens(self) -> int:
        return int(self.counts.sum())

    @query_len.default
    def _uniform(self) -> int | None:
        first = int(self.counts[0])
        return first if (self.counts == first).all() else None


class RequestStates:
    """What is known of each admitted request: tokens, lengths and pages, in arrays that a step reads at once.

    A row of each array is a request's state; its index is given to another request when it is finished.
    """

    def __init__(
        self, count: int, max_model_len: int, most_drafts: int, pages: PageFormat, *, has_adapters: bool = False
    ) -> None:
        self.max_model_len = max_model_len
        width = max_model_len + most_drafts + 1
        self.tokens = np.zeros((count, width), dtype=np.int32)
        """``[state, position]``: prompt, output, and after them the drafts to verify."""
        self.length = np.zeros(count, dtype=np.int64)
        """Tokens that are settled: prompt and output."""
        self.computed = np.zeros(count, dtype=np.int64)
        """Tokens whose keys and values are in the cache; one less than ``length`` past the prompt."""
        self.prompt = np.zeros(count, dtype=np.int64)
        self.end = np.zeros(count, dtype=np.int64)
        """Tokens at which a request is finished, prompt and output."""
        self.stops = np.zeros(count, dtype=np.bool_)
        """Whether a token can finish it before."""
        self.proposed = np.zeros(count, dtype=np.int64)
        """Draft tokens that stand after the settled ones."""
        self.table = np.zeros((count, pages.pages(max_model_len)), dtype=np.int32)
        """``[state, page]``: the null page past the request's own."""
        self.pool_row = np.zeros(count, dtype=np.int32)
        """The row of each in the pool of recurrent states; 0 where no layer is recurrent."""
        self.adapter = np.zeros(count, dtype=np.int32)
        """LoRA adapter of each request, counted from 1; 0: none."""
        self.key = np.zeros(count, dtype=np.uint64)
        """What synthetic acceptance draws by, of each request's name."""
        self.has_adapters = has_adapters
        """Whether the plan has LoRA."""

    def proposed_drafts(self, scheduled: ScheduledBatch) -> Integers:
        """Return how many drafts of each row a drafter proposed, ``int64[R]``: a row is filled up with any token."""
        proposed: Integers = np.minimum(scheduled.drafts, self.proposed[scheduled.state_indices])
        return proposed


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
    ) -> None:
        """``pool_rows`` of the recurrent states, the null state's included; None: no layer is recurrent."""
        self._max_adapters, self._num_adapters = 0 if lora is None else lora.max_active, num_adapters
        self._limits, self._speculative = limits, speculative
        self._pages, self._max_model_len = pages, max_model_len
        self._slots = 0 if speculative is None else speculative.extra_slots
        self._lookahead = 0 if speculative is None else speculative.num_tokens + self._slots
        self._pool = PagePool(pages.num_pages)
        self._pool_rows = None if pool_rows is None else PagePool(pool_rows)
        self._arriving = deque(sorted(map(self._admissible, requests), key=lambda each: each.arrival))
        self._waiting: deque[tuple[Request, float]] = deque()
        self._free = list(range(limits.max_num_reqs - 1, -1, -1))
        self._stalled, self._missing = 0, Wait.PLACES
        """Of the waiting requests, those that could not be admitted before, and what was missing then."""
        self._running: list[AdmittedRequest] = []
        self._leaving: list[AdmittedRequest] = []
        self._turn = 0
        self.states = RequestStates(
            limits.max_num_reqs, max_model_len, self._lookahead, pages, has_adapters=lora is not None
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
        """Queue a request that is there now; raises ``RunError`` for one that can never be served."""
        self._waiting.append((self._admissible(request), clock))

    def _admissible(self, request: Request) -> Request:
        """Return a request, or refuse it: it would be in the way of all behind it for ever."""
        length, longest, most = request.length, self._max_model_len, self._pages.num_pages - 1
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
        if not self._running:
            return None, admitted
        running = np.array([live.state_index for live in self._running], dtype=np.int64)
        computed = self.states.computed[running]
        prompt_left = (self.states.prompt[running] - computed).tolist()
        room = dict(zip(running.tolist(), (self._max_model_len - 1 - computed).tolist(), strict=True))
        decoding = [live for live, left in zip(self._running, prompt_left, strict=True) if left <= 0]
        prompting = [(live, left) for live, left in zip(self._running, prompt_left, strict=True) if left > 0]
        left, k = self._limits.max_num_tokens, self._k(len(self._running))
        # Each row takes its tokens and what the first draft pass has beyond them, as in vLLM 0.33 (``draft_slots``).
        slots = self._slots
        if not prompting or (decoding and len(decoding) * (1 + k + slots) + slots >= left):
            # Decodes alone, and only so many that all have the query length of a uniform graph.
            prompting, decoding = [], self._rotate(decoding)
            k = self._k(len(decoding))
        rows: list[tuple[AdmittedRequest, int, int]] = []
        for live in decoding:
            drafts = min(k, room[live.state_index], left - 1 - slots)
            if drafts < 0:
                break
            rows.append((live, 1 + drafts, drafts))
            left -= 1 + drafts + slots
        decodes = len(rows)
        for live, of_prompt in prompting:
            if left < 1 + slots:
                break
            rows.append((live, min(left - slots, of_prompt), 0))
            left -= rows[-1][1] + slots
        return self._scheduled(rows, len(rows) - decodes), admitted

    def _admit(self) -> tuple[AdmittedRequest, ...]:
        admitted: list[AdmittedRequest] = []
        while self._waiting:
            request, entered = self._waiting[0]
            if (missing := self._missing_for(request)) is not None:
                self._missing = missing
                break
            self._waiting.popleft()
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
        self.states.tokens[index] = 0
        self.states.tokens[index, : len(prompt)] = prompt
        self.states.length[index] = self.states.prompt[index] = len(prompt)
        self.states.computed[index] = self.states.proposed[index] = 0
        self.states.end[index] = live.request.length
        self.states.stops[index] = bool(live.request.stop)
        self.states.key[index] = request_key(live.request.name)
        self.states.adapter[index] = live.request.adapter
        self.states.table[index] = 0
        self.states.table[index, : len(live.pages)] = live.pages
        self.states.pool_row[index] = live.pool_row

    def _k(self, num_reqs: int) -> int:
        return 0 if self._speculative is None else self._speculative.draft_tokens(num_reqs)

    def _rotate(self, decoding: Sequence[AdmittedRequest]) -> list[AdmittedRequest]:
        """Return the decodes that have room for all their drafts, taking turns where not all have."""
        count = len(decoding)
        while count > 1 and count * (1 + self._k(count) + self._slots) > self._limits.max_num_tokens:
            count -= 1
        if count == len(decoding):
            return list(decoding)
        start = self._turn % len(decoding)
        self._turn += count
        return [decoding[(start + i) % len(decoding)] for i in range(count)]

    def _scheduled(self, rows: Sequence[tuple[AdmittedRequest, int, int]], prompts: int) -> ScheduledBatch:
        live, counts, drafts = zip(*rows, strict=True)
        scheduled = ScheduledBatch(
            live=live,
            state_indices=np.array([each.state_index for each in live], dtype=np.int64),
            counts=np.array(counts, dtype=np.int64),
            drafts=np.array(drafts, dtype=np.int64),
            prompts=prompts,
            draft_tokens=self._k(len(rows)),
        )
        self._fill_up(scheduled)
        return scheduled

    def _fill_up(self, scheduled: ScheduledBatch) -> None:
        """Let a row that has too few drafts verify its last token again, so that all rows are alike.

        That happens where a schedule raises k as the batch shrinks. Verification refuses what the
        target would not say, so any token will do.
        """
        missing = scheduled.drafts > self.states.proposed[scheduled.state_indices]
        for index, drafts in zip(scheduled.state_indices[missing], scheduled.drafts[missing], strict=True):
            start, row = int(self.states.length[index]), self.states.tokens[index]
            row[start + int(self.states.proposed[index]) : start + drafts] = row[start - 1]

    def leave(self, live: AdmittedRequest) -> None:
        """Schedule a request no more; its last token is on the way."""
        self._running.remove(live)
        self._leaving.append(live)

    def finish(self, live: AdmittedRequest) -> None:
        """Let a request go: its state and its pages are free."""
        (self._leaving if live in self._leaving else self._running).remove(live)
        live.finish()
        self._free.append(live.state_index)
        self._pool.give_back(live.pages)
        if self._pool_rows is not None:
            self._pool_rows.give_back([live.pool_row])
