"""Entry and Batch: one graph of a plan, and one batch to find a graph for."""

from __future__ import annotations

import enum
from functools import cached_property

import attrs

from capture_planner.errors import InvalidValue, Problem
from capture_planner.modes import GraphMode, Role
from capture_planner.records.text import counted


class Kind(enum.Enum):
    """The two kinds of batch."""

    DECODE = "decode"
    """A uniform decode at the query length that is scheduled for its number of requests; where decodes vary, any
    decode of up to that many tokens each."""
    MIXED = "mixed"
    """All other batches."""


@attrs.frozen(kw_only=True)
class Batch:
    """One step's batch of one role. All counts are real, without padding.

    ``query_len`` is the number of tokens that *every* request has, or None where they differ. ``max_query_len`` is the
    number that the longest has, where they differ; None: not known. ``past_prompt``: no request has prompt tokens left.
    ``active_loras`` counts the distinct adapters in the batch; the runner counts rows
    without one as one more if any row has one, since kernels have a slot for them (up to ``max_active + 1``). vLLM 0.33
    captures a case for that, and dispatches by the adapters alone (``get_num_active_loras_for_dispatch``).
    """

    role: Role
    num_reqs: int
    num_tokens: int
    query_len: int | None = None
    past_prompt: bool = True
    active_loras: int = 0
    max_query_len: int | None = None

    @classmethod
    def decode(cls, role: Role, num_reqs: int, query_len: int, active_loras: int = 0) -> Batch:
        """Return a uniform decode."""
        tokens = num_reqs * query_len
        return cls(role=role, num_reqs=num_reqs, num_tokens=tokens, query_len=query_len, active_loras=active_loras)

    @classmethod
    def varying(cls, role: Role, num_reqs: int, num_tokens: int, max_query_len: int, active_loras: int = 0) -> Batch:
        """Return a decode whose requests have 1 to ``max_query_len`` tokens each."""
        return cls(
            role=role, num_reqs=num_reqs, num_tokens=num_tokens, max_query_len=max_query_len, active_loras=active_loras
        )

    @classmethod
    def mixed(cls, role: Role, num_reqs: int, num_tokens: int, active_loras: int = 0) -> Batch:
        """Return a batch that contains prompts."""
        return cls(role=role, num_reqs=num_reqs, num_tokens=num_tokens, past_prompt=False, active_loras=active_loras)

    @property
    def kind(self) -> Kind:
        """The kind by shape alone; ``batch_space.kind_of`` takes the schedule into account too."""
        return Kind.MIXED if self.query_len is None else Kind.DECODE

    def extent(self, kind: Kind) -> int:
        """Return what batches of ``kind`` are counted by: requests of decodes, tokens of mixed ones."""
        return self.num_reqs if kind is Kind.DECODE else self.num_tokens

    @property
    def uniform_query_len(self) -> int | None:
        """The query length if this is a uniform decode batch, else None.

        Two things must hold: each request has exactly that many tokens, and all are past their
        prompt. A prompt of exactly 1 + K tokens has the shape of a decode and is not one.
        """
        uniform = self.query_len is not None and self.num_tokens == self.num_reqs * self.query_len
        return self.query_len if uniform and self.past_prompt else None

    @property
    def decode_query_len(self) -> int | None:
        """The tokens of the longest request of a decode, uniform or not; else None, also where they are not known."""
        # A batch with a query length answers by that alone.
        if self.query_len is not None or self.max_query_len is None or not self.past_prompt:
            return self.uniform_query_len
        longest = self.max_query_len
        # Other totals contradict the counts: the longest request has that many tokens, and none has more.
        return longest if longest <= self.num_tokens <= self.num_reqs * longest else None


def batch_text(batch: Batch) -> str:
    """Describe a batch by its requests and tokens: ``2 requests, 8 tokens, 4 each``."""
    text = f"{counted(batch.num_reqs, 'request')}, {counted(batch.num_tokens, 'token')}"
    if batch.query_len is not None:
        text += f", {batch.query_len} each"
    elif batch.decode_query_len is not None:
        text += f", up to {batch.decode_query_len} each"
    return text + ("" if batch.past_prompt else ", prompts among them")


class Rejection(enum.StrEnum):
    """Why an entry cannot serve a batch."""

    TOKENS = "tokens"
    REQUESTS = "requests"
    QUERY_LEN = "query_len"
    NOT_UNIFORM = "not_uniform"
    NOT_DECODE = "not_decode"
    """The batch does not say how many tokens its longest request has."""
    PROMPT = "prompt"
    LORAS = "loras"
    DRAFT_STEPS = "draft_steps"


@attrs.frozen(kw_only=True, cache_hash=True)
class Entry:
    """One captured graph: the same value is the key at capture, at dispatch and at replay.

    ``mode`` is PIECEWISE or FULL. ``num_tokens`` and ``num_reqs`` are padded extents; ``num_reqs`` is None for
    PIECEWISE, which runs attention outside the graph on unpadded requests. ``query_len`` is set for a uniform decode
    graph, where num_tokens == num_reqs * query_len; ``max_query_len`` for a varying one, which serves decodes of 1 to
    so many tokens each, where num_tokens == num_reqs * max_query_len. ``active_loras`` is the largest adapter count
    that it serves; ``draft_steps`` the length of a fused draft chain.

    Raises ``InvalidValue`` for a varying graph that is not FULL, is uniform too, or has other extents.
    """

    mode: GraphMode
    num_tokens: int
    num_reqs: int | None = None
    query_len: int | None = None
    active_loras: int = 0
    draft_steps: int | None = None
    max_query_len: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.max_query_len is None:
            return
        # A PIECEWISE graph has attention outside, so query lengths do not matter to it.
        is_full = self.mode is GraphMode.FULL and self.num_reqs is not None
        if not is_full or self.query_len is not None or self.num_tokens != (self.num_reqs or 0) * self.max_query_len:
            message = "a varying decode graph is FULL, without query_len, and has num_reqs times max_query_len tokens"
            raise InvalidValue([Problem(path=("max_query_len",), message=message, remedy="give num_reqs only")])

    @property
    def tokens_each(self) -> int | None:
        """The padded tokens of each request of a decode graph, uniform or varying; None: it is for any batch."""
        return self.max_query_len if self.query_len is None else self.query_len

    @cached_property
    def cost(self) -> tuple[int, int, int, int, int, int]:
        """The order of preference among compatible entries: least first, and total.

        FULL before PIECEWISE, then fewest padded tokens, requests and adapters; then the more specific
        graph: uniform before varying before any batch, fused chain before single step.
        """
        size = self.num_tokens, self.num_reqs or 0, self.active_loras
        # 0 for uniform, 1 for varying, 2 for any batch.
        generality = (self.query_len is None) + (self.tokens_each is None)
        # False sorts before True, so FULL comes first.
        return self.mode is not GraphMode.FULL, *size, generality, self.draft_steps is None

    @property
    def capture_order(self) -> tuple[int, ...]:
        """PIECEWISE first, then FULL, each largest first, so that later graphs fit the pool."""
        sizes = self.num_tokens, self.num_reqs, self.query_len, self.max_query_len, self.active_loras, self.draft_steps
        return self.mode is GraphMode.FULL, *(-(size or 0) for size in sizes)

    def rejection(self, batch: Batch, draft_steps: int | None = None) -> Rejection | None:
        """Return why this entry cannot serve ``batch``, or None if it can.

        This is the definition of compatibility; the dispatcher only makes it fast. An entry for more
        adapters serves fewer. A fused chain serves its own length only (in vLLM too, a missing length
        runs eager, never as a longer chain).

        :param draft_steps: how many draft decodes the schedule runs for this batch size.
        """
        if self.query_len is not None and batch.uniform_query_len != self.query_len:
            if batch.uniform_query_len is not None:
                return Rejection.QUERY_LEN
            return Rejection.NOT_UNIFORM if batch.past_prompt else Rejection.PROMPT
        if self.max_query_len is not None:
            longest = batch.decode_query_len
            if longest is None:
                return Rejection.NOT_DECODE if batch.past_prompt else Rejection.PROMPT
            if longest > self.max_query_len:
                return Rejection.QUERY_LEN
        # PIECEWISE has no bound on requests: attention runs outside the graph.
        if self.num_reqs is not None and self.num_reqs < batch.num_reqs:
            return Rejection.REQUESTS
        if self.num_tokens < batch.num_tokens:
            return Rejection.TOKENS
        if self.active_loras < batch.active_loras:
            return Rejection.LORAS
        if self.draft_steps is not None and self.draft_steps != draft_steps:
            return Rejection.DRAFT_STEPS
        return None

    def __str__(self) -> str:
        text = f"{self.mode.value} {counted(self.num_tokens, 'token')}"
        if self.num_reqs is not None:
            text += f", {counted(self.num_reqs, 'request')}"
        if self.query_len is not None:
            text += f" of {self.query_len}"
        if self.max_query_len is not None:
            text += f" of up to {self.max_query_len}"
        if self.active_loras:
            text += f", {self.active_loras} LoRA"
        if self.draft_steps is not None:
            text += f", chain of {self.draft_steps}"
        return text
