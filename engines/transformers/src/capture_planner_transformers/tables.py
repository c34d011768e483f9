"""Which graphs a plan needs in transformers, and which of them serves a step. Needs no torch.

transformers pads two axes: the tokens of a step and, unless attention reads a block table, the tokens that it reads
from the KV cache. A plan says the first; the second has a short ladder of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import attrs

from capture_planner.dispatch import Dispatcher
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.plan import Plan

Key = tuple[int, ...]
"""What transformers keeps a graph under: (tokens, cache reads), or (tokens,) with a block table."""


@attrs.frozen(kw_only=True)
class EngineStep:
    """One batch of transformers' scheduler. All counts are real, without padding."""

    num_reqs: int
    num_tokens: int
    reads: int
    """Tokens that attention reads from the KV cache, over all requests."""
    past_prompt: bool
    """No request has prompt tokens left."""
    block_table: bool
    """transformers' decode fast path: one token a request, and attention reads pages through a block table."""

    @property
    def batch(self) -> Batch:
        """The step as a plan sees it; with a block table a prompt's last single token is a decode, as in its kernel."""
        if self.num_tokens == self.num_reqs and (self.past_prompt or self.block_table):
            return Batch.decode(Role.TARGET, self.num_reqs, 1)
        return Batch.mixed(Role.TARGET, self.num_reqs, self.num_tokens)


@attrs.frozen
class GraphAnswer:
    """The graph of a step, or the reason for none."""

    entry: Entry | None
    key: Key | None
    reason: Reason | None = None


@attrs.frozen
class GraphTable:
    """All graphs of a deployment, and the answer for each step."""

    dispatcher: Dispatcher
    reads: tuple[int, ...]
    """Padded cache reads, ascending."""
    keys: tuple[Key, ...]
    """The graphs in capture order, largest first, so that later ones fit the pool."""
    limit: int
    """Tokens that the KV cache holds: no step reads more."""

    def answer(self, step: EngineStep) -> GraphAnswer:
        """Return the graph of a step: the plan's entry, then the least cache reads that fit."""
        dispatch = self.dispatcher.dispatch(step.batch)
        entry = dispatch.entry
        if entry is None or entry.mode is not GraphMode.FULL:
            return GraphAnswer(entry, None, dispatch.reason or Reason.MODE)
        if step.block_table:
            return GraphAnswer(entry, (entry.num_tokens,))
        fits = fitting(self.reads_of(entry), step.reads)
        return GraphAnswer(entry, None, Reason.SIZES) if fits is None else GraphAnswer(entry, (entry.num_tokens, fits))

    def reads_of(self, entry: Entry) -> tuple[int, ...]:
        """Return the padded cache reads that steps of an entry need."""
        return reachable(self.reads, entry, self.dispatcher.plan, self.limit)


def fitting(sizes: Sequence[int], count: int) -> int | None:
    """Return the least of ascending ``sizes`` that holds ``count``, or None."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def most_reads(entry: Entry, plan: Plan, limit: int) -> int:
    """Return the most tokens that the requests of one step can read from a cache of ``limit`` tokens."""
    # A mixed entry states no requests: each may have one token.
    requests = min(entry.num_reqs or entry.num_tokens, plan.limits.max_num_reqs)
    return min(limit, requests * plan.model.max_model_len)


def reachable(reads: Sequence[int], entry: Entry, plan: Plan, limit: int) -> tuple[int, ...]:
    """Return the sizes that some step of ``entry`` needs; a decode always reads, a prompt may read nothing."""
    most = most_reads(entry, plan, limit)
    below = (-1, *reads)
    # The first size that holds the most reads is needed, larger ones are not.
    return tuple(
        size
        for before, size in zip(below, reads, strict=False)
        if before < most and (size > 0 or entry.query_len is None)
    )


def ladder(first: int, most: int) -> tuple[int, ...]:
    """Return 0, for prompts that read nothing, then ``first`` and its doubles up to ``most``."""
    sizes = [0, min(first, most)]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return tuple(sizes)


def thinned(reads: tuple[int, ...]) -> tuple[int, ...]:
    """Return about half of the sizes, the largest included; the 0 of prompts goes first."""
    return reads[1:] if reads[0] == 0 and len(reads) > 1 else reads[::-1][::2][::-1]


def table(
    plan: Plan, *, name: str, limit: int, reads: tuple[int, ...], block_table: bool, copies: int = 1
) -> tuple[GraphTable, tuple[str, ...]]:
    """Return the graphs of ``plan``, and a sentence where its budget made the ladder of cache reads shorter.

    :param limit: tokens that the KV cache holds.
    :param copies: graphs for each key: 2 where transformers prepares a batch while another runs.

    Raises ``RunError`` if the budget does not allow one graph for each entry.
    """
    dispatcher = Dispatcher(plan)
    entries = [entry for entry in plan.role(Role.TARGET).entries if entry.mode is GraphMode.FULL]
    most = max((most_reads(entry, plan, limit) for entry in entries), default=0)
    wanted = reads = tuple(size for before, size in zip((-1, *reads), reads, strict=False) if before < most)
    allowed = plan.allowed_graphs()
    while True:
        keys = tuple(sorted(set(_keys(dispatcher, entries, reads, limit, block_table)), reverse=True))
        count = copies * len(keys)
        if allowed is None or count <= allowed[0]:
            break
        if len(reads) == 1:
            raise RunError(
                f"{name}: its budget allows {allowed[0]} graphs ({allowed[1]}), and its entries need {count} in "
                "transformers; plan fewer sizes, or a larger budget"
            )
        reads = thinned(reads)
    notes: tuple[str, ...] = ()
    if reads != wanted:
        notes = (f"cache reads padded to {_listed(reads)} instead of {_listed(wanted)}: the plan's budget",)
    return GraphTable(dispatcher, reads, keys, limit), notes


def _keys(
    dispatcher: Dispatcher, entries: Sequence[Entry], reads: Sequence[int], limit: int, block_table: bool
) -> Iterator[Key]:
    plan = dispatcher.plan
    for entry in entries:
        for size in reachable(reads, entry, plan, limit):
            yield entry.num_tokens, size
    if block_table:
        # Only entries that decodes reach need a graph with a block table; the dispatcher says which.
        for requests in range(1, plan.limits.max_num_reqs + 1):
            found = dispatcher.dispatch(Batch.decode(Role.TARGET, requests, 1)).entry
            if found is not None and found.mode is GraphMode.FULL:
                yield (found.num_tokens,)


def _listed(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes))
