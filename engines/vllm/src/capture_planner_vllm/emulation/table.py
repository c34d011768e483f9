"""vLLM 0.33's graph manager, model runner V2: the graphs that one manager captures, and its candidate table.

The rules of ``CudaGraphManager`` in ``vllm/v1/worker/gpu/cudagraph_utils.py``. The narrower mixed sizes of
recoverSSM are not emulated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.emulation import CapturedGraph
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner_vllm.emulation.overlap import Overlap


@attrs.frozen(kw_only=True)
class Query:
    """A lookup by the engine's dispatcher; all counts include the padding that comes before it."""

    num_reqs: int
    num_tokens: int
    uniform: int | None
    """Tokens of every request, where the batch is a uniform decode."""
    max_query_len: int | None
    """Most tokens of a request; None if there are prompts among the rows, or it is unknown."""
    loras: int = 0
    microbatches: int = 1

    @classmethod
    def of(cls, batch: Batch, widest: int) -> Query:
        """Return the lookup for a batch; ``widest`` is the largest decode, 1 + K.

        A prompt of one token over existing context runs as a decode (``Batch.past_prompt``). Where query
        lengths differ, decodes have at most ``widest`` tokens.
        """
        most = batch.query_len if batch.query_len is not None else widest
        return cls(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            uniform=batch.uniform_query_len if batch.num_reqs > 0 else None,
            max_query_len=most if batch.past_prompt else None,
            loras=batch.active_loras,
        )


def serves(graph: CapturedGraph, query: Query, loras: int) -> bool:
    """Say whether a captured graph can replay the batch at that LoRA case."""
    entry = graph.entry
    if graph.microbatches != query.microbatches:
        return False
    if graph.max_query_len is not None:
        if query.max_query_len is None or graph.max_query_len < query.max_query_len:  # None: unknown, which never fits
            return False
    elif entry.query_len not in (None, query.uniform):
        return False
    enough_rows = entry.num_reqs is None or entry.num_reqs >= query.num_reqs
    return enough_rows and entry.num_tokens >= query.num_tokens and entry.active_loras == loras


def answered(graph: CapturedGraph | None, batch: Batch, reason: Reason | None, *, tokens: int = 0) -> Dispatch:
    """Return the answer in terms of the real batch; an eager batch is padded to ``tokens``."""
    if graph is None:
        return Dispatch(None, padded_tokens=max(tokens - batch.num_tokens, 0), reason=reason)
    entry = graph.entry
    reqs = 0 if entry.num_reqs is None else entry.num_reqs - batch.num_reqs
    return Dispatch(entry, padded_tokens=entry.num_tokens - batch.num_tokens, padded_reqs=reqs)


@attrs.frozen(kw_only=True)
class TableManager:
    """One role's captured graphs, and the table in which they are looked up.

    For a number of tokens, the candidates are each mode's graphs of its smallest size that holds them, FULL
    before PIECEWISE; the first that can replay the batch wins. Larger sizes are not tried.
    """

    role: Role
    mode: GraphMode
    """As resolved."""
    sizes: tuple[int, ...]
    """The capture sizes in tokens, ascending."""
    max_size: int
    """Decodes that are rounded up above it are not captured."""
    max_num_reqs: int
    query_len: int
    """The largest decode, 1 + K."""
    query_lens: tuple[int, ...]
    """The decodes of a dynamic schedule, ascending; (query_len,) without one."""
    lora_cases: tuple[int, ...] = (0,)
    """The adapter counts captured for, ascending, 0 first."""
    varlen: bool = False
    """Whether decode graphs serve any mix of 1 to query_len tokens (adaptive verification)."""
    overlap: Overlap | None = None
    """How batches are split into microbatches; None: none is."""
    graphs: tuple[CapturedGraph, ...] = attrs.field(init=False, repr=False, eq=False)
    """In the order of capture: PIECEWISE before FULL, each largest first."""
    _groups: dict[int, list[tuple[list[int], dict[int, list[CapturedGraph]]]]] = attrs.field(
        init=False, repr=False, eq=False
    )
    """By adapters: the graphs of each mode by tokens, FULL before PIECEWISE."""

    def __attrs_post_init__(self) -> None:
        graphs = tuple(sorted(self._captured(), key=_order))
        groups: dict[tuple[int, bool], dict[int, list[CapturedGraph]]] = {}
        # vLLM reverses its lists for the look-up: of equal sizes the last captured is tried first.
        for graph in reversed(graphs):
            entry = graph.entry
            key = entry.active_loras, entry.mode is not GraphMode.FULL
            groups.setdefault(key, {}).setdefault(entry.num_tokens, []).append(graph)
        object.__setattr__(self, "graphs", graphs)
        object.__setattr__(self, "_groups", {loras: [] for loras, _ in groups})
        for (loras, _), sizes in sorted(groups.items(), key=lambda item: item[0]):
            self._groups[loras].append((sorted(sizes), sizes))

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the engine's answer once everything is captured."""
        query = self.query(batch)
        if self.overlap is not None and self.overlap.splits(query.num_tokens, decode=query.uniform == self.query_len):
            query = attrs.evolve(query, microbatches=self.overlap.microbatches, max_query_len=None)
        graph = self.find(query)
        if graph is not None and graph.microbatches > 1 and graph.entry.num_tokens > 2 * query.num_tokens:
            graph = None  # The second half would be padding alone.
        return answered(graph, batch, None if graph is not None else self.reason(query))

    def query(self, batch: Batch) -> Query:
        """Return the lookup in the target's manager for a batch."""
        return Query.of(batch, self.query_len)

    def find(self, query: Query) -> CapturedGraph | None:
        """Return the graph that the table gives, or None."""
        if query.num_tokens <= 0:
            return None
        # Other cases are not tried: vLLM keys its table by tokens and case.
        loras = self._case(query.loras)
        for sizes, groups in self._groups.get(loras, ()):
            # Of each mode only the nearest captured count: what is behind it is shadowed (vllm#53407, #56136).
            index = bisect_left(sizes, query.num_tokens)
            for graph in groups[sizes[index]] if index < len(sizes) else ():
                if serves(graph, query, loras):
                    return graph
        return None

    def compatible(self, query: Query) -> Iterator[CapturedGraph]:
        """Yield every captured graph that could replay the batch, in the table's reach or not."""
        loras = self._case(query.loras)
        for sizes, groups in self._groups.get(loras, ()):
            for size in sizes[bisect_left(sizes, query.num_tokens) :]:
                yield from (graph for graph in groups[size] if serves(graph, query, loras))

    def reason(self, query: Query) -> Reason:
        """Return the reason why the table gives no graph."""
        if query.num_tokens <= 0 or not 0 < query.num_reqs <= self.max_num_reqs:
            return Reason.NOT_ADMISSIBLE
        if self.mode is not GraphMode.NONE and self._case(query.loras) not in self.lora_cases:
            return Reason.NOT_ADMISSIBLE
        if query.microbatches > 1:
            return Reason.SPLIT
        if any(self.compatible(query)):
            return Reason.SHADOWED
        return Reason.SIZES if self._has_kind(query) else Reason.MODE

    def _has_kind(self, query: Query) -> bool:
        """Say whether the mode has graphs for such a batch at any size."""
        if self.mode.mixed_mode is not GraphMode.NONE:
            return True
        if not self.mode.is_separate:
            return False
        if self.varlen:
            return query.max_query_len is not None and query.max_query_len <= self.query_len
        return query.uniform in self.query_lens

    def _case(self, active: int) -> int:
        """Return the captured adapter count for an actual one: the next larger, at most the largest."""
        if active <= 0 or not (cases := [case for case in self.lora_cases if case > 0]):
            return active
        return next((case for case in cases if case >= active), cases[-1])

    def _captured(self) -> list[CapturedGraph]:
        """Return every graph once, in the engine's order of creation."""
        # Sizes that round up to the same multiple of a query length are one graph.
        graphs: dict[CapturedGraph | None, None] = {}
        twin = self.overlap.twin if self.overlap is not None else lambda graph: None
        mixed = self.mode.mixed_mode
        for size in self.sizes if self.mode is not GraphMode.NONE else ():
            for case in self.lora_cases:
                if self.mode.is_separate:
                    graphs |= dict.fromkeys(each for one in self._decodes(size, case) for each in (one, twin(one)))
                if mixed is not GraphMode.NONE:
                    reqs = min(size, self.max_num_reqs) if mixed is GraphMode.FULL else None
                    graph = self._graph(mode=mixed, num_tokens=size, num_reqs=reqs, active_loras=case)
                    graphs |= dict.fromkeys((graph, twin(graph)))
        return [graph for graph in graphs if graph is not None]

    def _decodes(self, size: int, case: int) -> Iterable[CapturedGraph]:
        common = {"mode": self.mode.decode_mode, "active_loras": case}
        if self.varlen:
            if size <= self.max_num_reqs * self.query_len:
                # Any mix of lengths, so there may be a request for each token.
                graph = self._graph(num_tokens=size, num_reqs=min(size, self.max_num_reqs), **common)
                yield attrs.evolve(graph, max_query_len=self.query_len)
            return
        for query_len in self.query_lens:
            reqs = -(-size // query_len)
            tokens = reqs * query_len
            # What rounds up beyond the largest size is dropped: a list cut to 40 has no decode of
            # 6 requests with 7 tokens (vllm#54933).
            if tokens <= self.max_size and reqs <= self.max_num_reqs:
                yield self._graph(num_tokens=tokens, num_reqs=reqs, query_len=query_len, **common)

    def _graph(self, **entry: Any) -> CapturedGraph:
        return CapturedGraph(role=self.role, entry=Entry(**entry))


def _order(graph: CapturedGraph) -> tuple[bool, int]:
    # vLLM allocates its buffers of hidden states in the first capture, so the largest
    # PIECEWISE graph must hold all others.
    return graph.entry.mode is GraphMode.FULL, -graph.entry.num_tokens
