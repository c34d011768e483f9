"""vLLM 0.33's capture and dispatch rule, restated from its description, without torch.

For a number of tokens and a LoRA case, each mode keeps the graphs of its *smallest* captured size
that holds them, FULL before PIECEWISE; the first compatible one wins, otherwise the batch is eager.
Microbatches are left out of capture and kept in the key, as in an engine that does not use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capture_planner.entry import Entry
from capture_planner.modes import GraphMode
from capture_planner.sizing.engines import vllm_tokens
from capture_planner.spec import Spec

Tier = tuple[int, int, int]


@dataclass(frozen=True)
class Descriptor:
    """One graph, or the shape of an eager batch."""

    mode: GraphMode
    num_tokens: int
    num_reqs: int | None
    uniform: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1

    def entry(self) -> Entry:
        """Return the same graph as the plan writes it."""
        return Entry(
            mode=self.mode,
            num_tokens=self.num_tokens,
            num_reqs=self.num_reqs,
            query_len=self.uniform,
            active_loras=self.num_active_loras,
        )


def serves(
    graph: Descriptor,
    num_reqs: int,
    num_tokens: int,
    uniform: int | None,
    loras: int,
    max_query_len: int | None,
    num_ubatches: int,
) -> bool:
    """Say whether a graph can replay a batch."""
    if graph.uniform is not None and graph.uniform != uniform:
        return False
    if graph.max_query_len is not None and (max_query_len is None or graph.max_query_len < max_query_len):
        return False
    if graph.num_reqs is not None and graph.num_reqs < num_reqs:
        return False
    return (
        graph.num_tokens >= num_tokens
        and graph.num_active_loras == loras
        and graph.num_ubatches == num_ubatches
    )


class SmallestGroup:
    """The graphs that vLLM 0.33 captures for a target, and its dispatcher over them."""

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        mode: GraphMode,
        max_num_reqs: int,
        max_query_len: int,
        query_lens: Sequence[int],
        cases: Sequence[int] = (0,),
    ) -> None:
        self.captured = _captured(sizes, mode, max_num_reqs, max_query_len, query_lens, cases)
        self.candidates = _candidates(self.captured, cases)
        adapters = [case for case in cases if case]
        self.most_loras = adapters[-1] if adapters else 0
        self.lora_case = {n: next(c for c in adapters if c >= n) for n in range(1, self.most_loras + 1)}
        self.ready = True

    @property
    def full(self) -> tuple[Descriptor, ...]:
        return tuple(graph for graph in self.captured if graph.mode is GraphMode.FULL)

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> Descriptor:
        """Return the first compatible graph of the smallest sizes, or the eager shape."""
        loras = self._case(num_active_loras)
        key = (num_tokens, loras)
        if self.ready and num_tokens > 0 and key in self.candidates:
            for graph in self.candidates[key]:
                if serves(graph, num_reqs, num_tokens, uniform, loras, max_query_len, num_ubatches):
                    return graph
        return Descriptor(GraphMode.NONE, num_tokens, num_reqs, None, None, loras, num_ubatches)

    def _case(self, active: int) -> int:
        if active <= 0 or not self.lora_case:
            return active
        return self.lora_case.get(active, self.most_loras)

    def misses(self, num_reqs: int, query_len: int, loras: int = 0) -> bool:
        """Say whether a decode gets no FULL graph although a captured one could serve it."""
        tokens, case = num_reqs * query_len, self._case(loras)
        if self.dispatch(num_reqs, tokens, query_len, loras, query_len).mode is GraphMode.FULL:
            return False
        return any(serves(graph, num_reqs, tokens, query_len, case, query_len, 1) for graph in self.full)

    def reached(self, tiers: Sequence[Tier], max_num_tokens: int) -> frozenset[Descriptor]:
        """Return the graphs that some admissible batch, decode or mixed, is answered with.

        A decode of n requests is admissible at the query length scheduled for n; a batch has at
        most one adapter a request.
        """
        found = set()
        for first, last, k in tiers:
            for num_reqs in range(first, last + 1):
                tokens = num_reqs * (1 + k)
                if tokens > max_num_tokens:
                    break
                for loras in range(min(num_reqs, self.most_loras) + 1):
                    found.add(self.dispatch(num_reqs, tokens, 1 + k, loras, 1 + k))
        for tokens in range(1, max_num_tokens + 1):
            for loras in range(min(tokens, tiers[-1][1], self.most_loras) + 1):
                found.add(self.dispatch(max(loras, 1), tokens, None, loras))
        return frozenset(graph for graph in found if graph.mode is not GraphMode.NONE)


def emulate(spec: Spec, mode: GraphMode, platform_max: int) -> tuple[SmallestGroup, tuple[Tier, ...]]:
    """Return what vLLM captures for the target of ``spec`` by its default sizes, and the schedule's tiers."""
    limits, speculative = spec.limits, spec.speculative
    most = 0 if speculative is None else speculative.num_tokens
    tiers = ((1, limits.max_num_reqs, 0),) if speculative is None else speculative.tiers(limits.max_num_reqs)
    dynamic = speculative is not None and bool(speculative.schedule)
    sizes = vllm_tokens(
        max_num_reqs=limits.max_num_reqs,
        max_num_tokens=limits.max_num_tokens,
        query_len=1 + most,
        platform_max=platform_max,
        tiers=[(1 + k, last) for _, last, k in tiers] if dynamic else (),
    )
    manager = SmallestGroup(
        sizes=sizes,
        mode=mode,
        max_num_reqs=limits.max_num_reqs,
        max_query_len=1 + most,
        query_lens=sorted({1 + k for *_, k in tiers}),
        cases=(0,) if spec.lora is None else spec.lora.cases(),
    )
    return manager, tiers


def _captured(
    sizes: Sequence[int],
    mode: GraphMode,
    max_num_reqs: int,
    max_query_len: int,
    query_lens: Sequence[int],
    cases: Sequence[int],
) -> tuple[Descriptor, ...]:
    """Return every captured graph once, in the order of sizes."""
    graphs: dict[Descriptor, None] = {}
    top = max(sizes, default=0)
    for size in sorted(sizes):
        for case in cases:
            for query_len in query_lens if mode.is_separate else ():
                reqs = -(-size // query_len)
                tokens = reqs * query_len
                if tokens <= min(top, max_num_reqs * max_query_len) and reqs <= max_num_reqs:
                    graphs[Descriptor(mode.decode_mode, tokens, reqs, query_len, num_active_loras=case)] = (
                        None
                    )
            if mode.mixed_mode is not GraphMode.NONE:
                reqs_or_none = min(size, max_num_reqs) if mode.mixed_mode is GraphMode.FULL else None
                graphs[Descriptor(mode.mixed_mode, size, reqs_or_none, num_active_loras=case)] = None
    return tuple(graphs)


def _candidates(
    captured: Sequence[Descriptor], cases: Sequence[int]
) -> dict[tuple[int, int], list[Descriptor]]:
    """Lay out, by tokens and LoRA case, each mode's graphs of the smallest size that holds the tokens."""
    table: dict[tuple[int, int], list[Descriptor]] = {}
    for mode in (GraphMode.FULL, GraphMode.PIECEWISE):
        for case in cases:
            groups: dict[int, list[Descriptor]] = {}
            for graph in captured:
                if graph.mode is mode and graph.num_active_loras == case:
                    groups.setdefault(graph.num_tokens, []).append(graph)
            first = 0
            for tokens in sorted(groups):
                for count in range(first, tokens + 1):
                    table.setdefault((count, case), []).extend(groups[tokens])
                first = tokens + 1
    return table
