"""Dispatch time: ours against vLLM 0.33's smallest-group rule.

Three dynamic schedules with max_num_reqs 256. Both dispatchers answer the same batches in the same
process, in turns; the ratio is the median over the repeats of one run. vLLM's rule is given the
uniform query length ready made, as its runner computes it beforehand; ours is given a Batch, which
the runner makes once a step, and tests uniformity in the call. What the rule misses is in
tests/engines/test_vllm_size_list.py.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from _bench import conclude, parser, print_table, shipped_environments, shipped_specs

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, Role
from capture_planner.planning import planner
from capture_planner.planning.sizing.engine_lists import vllm_tokens
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Budget, Limits, Spec
from capture_planner_vllm.emulation.table import TableManager

Tier = tuple[int, int, int]
MAX_NUM_REQS = 256
TARGET_RATIO = 0.8
REPEATS, ROUNDS = 15, 200
"""Times that each dispatcher is timed, and passes over all batches each time."""
SCHEDULES: dict[str, tuple[Tier, ...]] = {
    "k 2/1": ((1, 16, 2), (17, 256, 1)),
    "k 5/3/1": ((1, 16, 5), (17, 64, 3), (65, 256, 1)),
    "k 4/2/0": ((1, 16, 4), (17, 64, 2), (65, 256, 0)),
}
Call = tuple[Any, ...]


def time_calls(function: Callable[..., object], calls: Sequence[Call], rounds: int) -> float:
    """Return nanoseconds per call, the loop included."""
    start = time.perf_counter_ns()
    for _ in range(rounds):
        for call in calls:
            function(*call)
    return (time.perf_counter_ns() - start) / (rounds * len(calls))


def in_turns(functions: dict[str, tuple[Callable[..., object], Sequence[Call]]]) -> dict[str, list[float]]:
    """Time the functions one after the other, ``REPEATS`` times over."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    gc.collect()
    gc.disable()
    try:
        for _ in range(REPEATS):
            for name, (function, calls) in functions.items():
                times[name].append(time_calls(function, calls, ROUNDS))
    finally:
        gc.enable()
    return times


def decodes(tiers: Sequence[Tier]) -> list[tuple[int, int]]:
    """Return (requests, query length) of every scheduled decode batch."""
    return [(reqs, 1 + k) for first, last, k in tiers for reqs in range(first, last + 1)]


def mixed_batches(most_tokens: int) -> list[tuple[int, int]]:
    """Return (requests, tokens) of mixed batches: some decodes and a part of a prompt."""
    return [(1 + tokens % min(tokens, MAX_NUM_REQS), tokens) for tokens in range(1, most_tokens + 1, 2)]


def captured_by_vllm(spec: Spec, tiers: Sequence[Tier]) -> tuple[Entry, ...]:
    """Return what vLLM captures for the target of a spec with this schedule, by its default sizes."""
    limits = spec.limits
    query_lens = sorted({1 + k for *_, k in tiers})
    sizes = vllm_tokens(
        max_num_reqs=limits.max_num_reqs,
        max_num_tokens=limits.max_num_tokens,
        query_len=query_lens[-1],
        platform_max=512,
        tiers=[(1 + k, last) for _, last, k in tiers],
    )
    manager = TableManager(
        role=Role.TARGET,
        mode=GraphMode.FULL_AND_PIECEWISE,
        sizes=sizes,
        max_size=max(sizes),
        max_num_reqs=limits.max_num_reqs,
        query_len=query_lens[-1],
        query_lens=tuple(query_lens),
        lora_cases=(0,),
    )
    return tuple(graph.entry for graph in manager.graphs)


def plans(tiers: tuple[Tier, ...]) -> tuple[Plan, Plan]:
    """Return our plan of the schedule, and the same with vLLM's graphs of the target."""
    k = max(k for *_, k in tiers)
    spec = replace(
        shipped_specs()["qwen3-8b-eagle3"],
        limits=Limits(max_num_reqs=MAX_NUM_REQS, max_num_tokens=8192),
        speculative=Speculative(method=Method.EAGLE3, num_tokens=k, schedule=tiers),
        budget=Budget(),
    )
    own = planner.plan(spec, shipped_environments()["h100"], registry.load_backends())
    target, *drafters = own.roles
    return own, replace(own, roles=(replace(target, entries=captured_by_vllm(spec, tiers)), *drafters))


@attrs.frozen
class Descriptor:
    """One graph, or the shape of an eager batch, as the engine holds it."""

    mode: GraphMode
    num_tokens: int
    num_reqs: int | None
    uniform: int | None = None
    max_query_len: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1


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
    """The dispatcher of vLLM 0.33 over the graphs of one manager, without LoRA.

    The engine's layout is what takes its time: a list of candidates for each number of tokens and LoRA case, FULL
    before PIECEWISE, of which the first compatible one wins. Microbatches are left out of capture and kept in the key.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.candidates: dict[tuple[int, int], list[Descriptor]] = {}
        self.ready = True
        for mode in (GraphMode.FULL, GraphMode.PIECEWISE):
            groups: dict[int, list[Descriptor]] = {}
            for entry in entries:
                if entry.mode is mode:
                    graph = Descriptor(entry.mode, entry.num_tokens, entry.num_reqs, entry.query_len)
                    groups.setdefault(graph.num_tokens, []).append(graph)
            first = 0
            for tokens in sorted(groups):
                for count in range(first, tokens + 1):
                    self.candidates.setdefault((count, 0), []).extend(groups[tokens])
                first = tokens + 1

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
        key = (num_tokens, num_active_loras)
        if self.ready and num_tokens > 0 and key in self.candidates:
            for graph in self.candidates[key]:
                if serves(graph, num_reqs, num_tokens, uniform, num_active_loras, max_query_len, num_ubatches):
                    return graph
        return Descriptor(GraphMode.NONE, num_tokens, num_reqs, None, None, num_active_loras, num_ubatches)


def measure(tiers: tuple[Tier, ...]) -> dict[str, Any]:
    """Return the times of one schedule, by kind of batch and dispatcher."""
    own, same = plans(tiers)
    role, captured = Role.TARGET, same.roles[0].entries
    uniform, mixed = decodes(tiers), mixed_batches(max(entry.num_tokens for entry in captured))
    manager = Candidates(captured)
    calls: dict[str, tuple[list[Call], list[Call]]] = {
        "decode": (
            [(Batch.decode(role, reqs, query_len),) for reqs, query_len in uniform],
            [(reqs, reqs * q, q, 0, q) for reqs, q in uniform],
        ),
        "mixed": (
            [(Batch.mixed(role, reqs, tokens),) for reqs, tokens in mixed],
            [(reqs, tokens, None, 0, None) for reqs, tokens in mixed],
        ),
    }
    figures: dict[str, Any] = {}
    for kind, (ours, theirs) in calls.items():
        lookup = {call: Dispatcher(same).dispatch(*call) for call in ours}
        dispatchers = {"same graphs": Dispatcher(same), "own plan": Dispatcher(own)}
        cold = {label: time_calls(each.dispatch, ours, 1) for label, each in dispatchers.items()}
        functions: dict[str, tuple[Callable[..., object], Sequence[Call]]] = {
            "vllm": (manager.dispatch, theirs),
            **{label: (each.dispatch, ours) for label, each in dispatchers.items()},
            "dict lookup": (lookup.get, [(call,) for call in ours]),
        }
        times = in_turns(functions)
        figures[kind] = {
            label: {
                "best_ns": round(min(values), 1),
                "median_ns": round(statistics.median(values), 1),
                "ratio_to_vllm": round(statistics.median(v / w for v, w in zip(values, times["vllm"], strict=True)), 3),
                **({"first_call_ns": round(cold[label], 1)} if label in cold else {}),
            }
            for label, values in times.items()
        }
    return figures


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    arguments = parser(__doc__).parse_args()
    results = {name: measure(tiers) for name, tiers in SCHEDULES.items()}
    rows: list[tuple[str, ...]] = []
    ratios: list[float] = []
    for name, figures in results.items():
        for kind, times in figures.items():
            best = {label: f"{each['best_ns']:.0f}" for label, each in times.items()}
            ratio = {label: times[label]["ratio_to_vllm"] for label in ("same graphs", "own plan")}
            ratios += ratio.values()
            cells = (cell for label in ratio for cell in (best[label], f"{ratio[label]:.2f}"))
            first = f"{times['same graphs']['first_call_ns']:.0f}"
            rows.append((f"{name}, {kind}", best["vllm"], *cells, best["dict lookup"], first))
    columns = ("schedule, batches", "vllm", "same graphs", "ratio", "own plan", "ratio", "dict lookup", "first call")
    print_table("ns per call (best), ratio to vLLM's rule (median)", columns, rows)
    targets = {f"ratio at most {TARGET_RATIO} (worst {max(ratios):.2f})": max(ratios) <= TARGET_RATIO}
    return conclude(arguments, {"results": results}, targets)


if __name__ == "__main__":
    sys.exit(main())
