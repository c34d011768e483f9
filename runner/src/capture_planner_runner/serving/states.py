"""The caches of requests by layer, their tokens and lengths, and the rows of one step's batch.

Page 0 of the cache is the null page, and row 0 of the recurrent states the null state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.errors import RunError
from capture_planner.plugins.backend import NULL_PAGE, NULL_STATE, LayerCache
from capture_planner.records.backend import Attention
from capture_planner.records.plan import Plan
from capture_planner_runner.execution.attention import StateCache
from capture_planner_runner.execution.inputs import query_lens
from capture_planner_runner.ledger.rows import Wait
from capture_planner_runner.serving.workload import Request


@attrs.frozen(kw_only=True)
class PageFormat:
    """Division of the KV cache into pages."""

    page_size: int
    """Tokens per page, over all ranks that share it."""
    num_pages: int
    """Pages, the null page included."""

    def pages(self, tokens: int) -> int:
        """Return the pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_size)

    @property
    def slots(self) -> int:
        """Slots in all, the null page's included."""
        return self.num_pages * self.page_size

    def tensor(self, page: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make what all pages hold, zeroed: ``[num_pages, *page]``. A subclass may lay pages apart from each other."""
        purpose = f"keys and values of {self.num_pages} pages (--pages)"
        return allocated((self.num_pages, *page), dtype, device, purpose)


def layer_cache(
    attention: Attention, pages: PageFormat, dtype: torch.dtype, device: torch.device, *, packed: bool = False
) -> LayerCache:
    """Make the cache of one layer, zeroed: ``[num_pages, page_size, num_kv_heads, head_dim]`` twice.

    Of several decode-context-parallel ranks each has its part of a page.

    :param packed: both are halves of one tensor, as vLLM 0.33 lays them out (LBNHC).
    """
    tokens, heads, dim = pages.page_size // attention.decode_context, attention.num_kv_heads, attention.head_dim
    if packed:
        both = pages.tensor((tokens, heads, 2 * dim), dtype, device)
        keys, values = both.chunk(2, dim=-1)
        return LayerCache(keys=keys, values=values, packed=both)
    keys, values = (pages.tensor((tokens, heads, dim), dtype, device) for _ in range(2))
    return LayerCache(keys=keys, values=values)


def state_caches(plan: Plan, widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> tuple[StateCache, ...]:
    """Make the pool of states of each recurrence, zeroed: ``[rows, positions, width]``, of float32 at least."""
    if plan.states is None:
        return ()
    shape, purpose = (plan.states.rows, plan.states.positions), f"the states of {plan.states.rows} requests"
    # A state sums up its whole request: in bfloat16 it would lose what each further token adds.
    kind = torch.promote_types(dtype, torch.float32)
    return tuple(StateCache(states=allocated((*shape, width), kind, device, purpose)) for width in widths)


def allocated(shape: Sequence[int], dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
    """Return zeros; raises ``RunError`` that says what they are for where there is no memory for them."""
    try:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        size = math.prod(shape) * dtype.itemsize
        raise RunError(f"there is no memory for {what}: {size:,} bytes; give it less") from error


class PagePool:
    """The free pages, or the free rows of a pool of states; number 0 is never free.

    The last page returned is handed out first, so that bugs of reuse show early.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, NULL_PAGE, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return ``count`` pages; the caller has checked ``free``."""
        assert count <= len(self._free), "more pages asked for than are free"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: list[int]) -> None:
        self._free += pages


Integers = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


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
    """The resource that it, or a request before it, waited for; None: it did not wait."""
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
    base: Integers
    """``[R]``: the position of each row's first token; as if the step in flight kept all its drafts."""
    counts: Integers
    """``[R]``: tokens of each row, drafts included."""
    drafts: Integers
    """``[R]``: how many of them are drafts to verify; 0 in a prompt."""
    prompts: int
    """Rows that are still in their prompt."""
    draft_tokens: int
    """k for this number of requests."""
    proposed: Integers = attrs.Factory(lambda self: self.drafts, takes_self=True)
    """``[R]``: how many of ``drafts`` a drafter proposed; a row that has too few is filled up with any token."""
    unread: Flags = attrs.Factory(lambda self: np.zeros(len(self.live), dtype=np.bool_), takes_self=True)
    """``[R]``: whether the step in flight gives the request tokens, which the host has not read."""

    num_reqs: int = attrs.field(init=False)
    num_tokens: int = attrs.field(init=False)
    query_len: int | None = attrs.field(init=False)
    """The tokens of each row, where all have the same number."""
    max_query_len: int | None = attrs.field(init=False)
    """The tokens of the longest row, where rows differ and none is in its prompt."""

    def __attrs_post_init__(self) -> None:
        query_len, max_query_len = query_lens(self.counts, prompts=self.prompts > 0)
        # Computed once: each is read several times in a step.
        for name, value in (
            ("num_reqs", len(self.live)),
            ("num_tokens", int(self.counts.sum())),
            ("query_len", query_len),
            ("max_query_len", max_query_len),
        ):
            object.__setattr__(self, name, value)


class RequestStates:
    """Tokens, lengths and pages of each admitted request, in arrays that a step reads at once.

    A row of each array is a request's state; its index is given to another request when it is finished.
    """

    def __init__(
        self,
        count: int,
        max_model_len: int,
        most_drafts: int,
        pages: PageFormat,
        *,
        has_adapters: bool = False,
        is_sampled: bool = False,
    ) -> None:
        self.max_model_len = max_model_len
        # Drafts lie behind the known tokens, and the draft prefill reads one token behind its last row.
        width = max_model_len + most_drafts + 1
        self.tokens = np.zeros((count, width), dtype=np.int32)
        """``[state, position]``: prompt, output, and after them the drafts to verify."""
        self.length = np.zeros(count, dtype=np.int64)
        """Known tokens: prompt and output."""
        self.computed = np.zeros(count, dtype=np.int64)
        """Tokens whose keys and values are in the cache; one less than ``length`` past the prompt."""
        self.prompt = np.zeros(count, dtype=np.int64)
        self.end = np.zeros(count, dtype=np.int64)
        """Tokens at which a request is finished, prompt and output."""
        self.stops = np.zeros(count, dtype=np.bool_)
        """Whether a stop token can finish it earlier."""
        self.proposed = np.zeros(count, dtype=np.int64)
        """Draft tokens behind the known ones."""
        self.ahead = np.zeros(count, dtype=np.int64)
        """Tokens that the step in flight adds to ``computed`` if all its drafts are kept; 0: none is in flight."""
        self.coming = np.zeros(count, dtype=np.int64)
        """Draft tokens that the step in flight proposes."""
        self.table = np.zeros((count, pages.pages(max_model_len)), dtype=np.int32)
        """``[state, page]``: the null page past the request's own."""
        self.room = np.zeros(count, dtype=np.int64)
        """Tokens that each request's pages and the model have room for."""
        self.pool_row = np.zeros(count, dtype=np.int32)
        """The row of each in the pool of recurrent states; 0 where no layer is recurrent."""
        self.adapter = np.zeros(count, dtype=np.int32)
        """LoRA adapter of each request, counted from 1; 0: none."""
        self.key = np.zeros(count, dtype=np.uint64)
        """Seed of sampling and of synthetic acceptance, from each request's name."""
        self.has_adapters = has_adapters
        """Whether the plan has LoRA."""
        self.is_sampled = is_sampled
        """Whether tokens are sampled."""

    def computed_at_most(self, rows: Integers) -> Integers:
        """Return how many tokens of each request are computed when the next step begins, ``int64[R]``, at most.

        It is the exact number where no step is in flight, or none of its drafts is verified.
        """
        most: Integers = self.computed[rows] + self.ahead[rows]
        return most

    def is_unread(self, rows: Integers) -> Flags:
        """Say of each request whether the step in flight gives it tokens, which the host has not read, ``bool[R]``."""
        # A chunk that ends inside its prompt gives no token.
        unread: Flags = (self.ahead[rows] > 0) & (self.computed_at_most(rows) >= self.length[rows])
        return unread

    def is_verifying(self, rows: Integers) -> Flags:
        """Say of each request whether the step in flight verifies drafts of it, ``bool[R]``."""
        # One token is no draft, and of a prompt all tokens are kept: in both cases the length is exact.
        verifying: Flags = (self.ahead[rows] > 1) & (self.computed[rows] >= self.prompt[rows])
        return verifying

    def count_ahead(self, scheduled: ScheduledBatch | None) -> None:
        """Note the step that is in flight when the next one is scheduled; None: all are read."""
        self.ahead[:] = 0
        if scheduled is not None:
            self.ahead[scheduled.state_indices] = scheduled.counts
            self.coming[scheduled.state_indices] = scheduled.draft_tokens
