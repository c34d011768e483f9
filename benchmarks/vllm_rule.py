"""vLLM 0.33 for a spec: what it captures, and its dispatcher as the engine holds it, for timing.

Graphs and answers come from ``capture_planner.engines``. The engine's layout is what takes its time: a
list of candidates for each number of tokens and LoRA case, FULL before PIECEWISE, of which the first
compatible one wins. Microbatches are left out of capture and kept in the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from capture_planner.engines.emulation import Emulation
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.sizing.engine_lists import vllm_tokens
from capture_planner.records.batch import Entry
from capture_planner.records.spec import Spec
from capture_planner_vllm.table import TableManager


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

    @classmethod
    def of(cls, entry: Entry) -> Descriptor:
        """Return the same graph as the engine writes it."""
        return cls(entry.mode, entry.num_tokens, entry.num_reqs, entry.query_len, num_active_loras=entry.active_loras)


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
    return graph.num_tokens >= num_tokens and graph.num_active_loras == loras and graph.num_ubatches == num_ubatches


class Candidates:
    """The dispatcher of vLLM 0.33 over the graphs of one manager."""

    def __init__(self, entries: Sequence[Entry], cases: Sequence[int] = (0,)) -> None:
        self.candidates = _candidates([Descriptor.of(entry) for entry in entries], cases)
        adapters = [case for case in cases if case]
        self.most_loras = adapters[-1] if adapters else 0
        self.lora_case = {n: next(c for c in adapters if c >= n) for n in range(1, self.most_loras + 1)}
        self.ready = True

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


def emulate(spec: Spec, mode: GraphMode, platform_max: int) -> Emulation:
    """Return what vLLM captures for the target of ``spec`` by its default sizes."""
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
    target = TableManager(
        role=Role.TARGET,
        mode=mode,
        sizes=sizes,
        max_size=max(sizes, default=0),
        max_num_reqs=limits.max_num_reqs,
        query_len=1 + most,
        query_lens=tuple(sorted({1 + k for *_, k in tiers})),
        lora_cases=(0,) if spec.lora is None else spec.lora.cases(),
    )
    return Emulation(
        engine="vllm",
        version="0.33",
        command=(),
        settings=(),
        sizes=sizes,
        managers=(target,),
        decisions=(),
        limits=limits,
        speculative=speculative,
        lora=spec.lora,
        parallel=spec.parallel,
    )


def _candidates(captured: Sequence[Descriptor], cases: Sequence[int]) -> dict[tuple[int, int], list[Descriptor]]:
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
