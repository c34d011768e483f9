"""What the graphs of a vLLM that has just captured them cost, and what steps above the largest cost eager.

As vLLM's adaptive verification does (``spec_decode/adaptive_verification.py``): five runs of each size on dummy
inputs, timed by CUDA events. Of a graph the least counts, of an eager step the median. Dummy inputs write to no slot of
the KV cache, and the block tables of the drafter's own graphs name the null block.

Their rows are padding, as in a capture, except where the experts of a mixture would skip it (``DummyRows``): there a
graph is timed with all of its rows as tokens, and with half of them. The difference is what the experts take for the
other half, and the rest what padding costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs

from capture_planner.measuring.coarsening import Outcome
from capture_planner.measuring.recorder import Shape, StepSink, TimedShape
from capture_planner.modes import Role
from capture_planner.records.observation import EagerCost
from capture_planner_vllm.inside import device
from capture_planner_vllm.inside.dummy_rows import DummyRows
from capture_planner_vllm.inside.steps import Track
from capture_planner_vllm.inside.watch import StepWatch

REPLAYS = 5

MOST_SIZES = 4
"""Most eager sizes of mixed batches."""


@attrs.frozen
class Replay:
    """Least milliseconds of a graph's replay; None: it was not timed."""

    milliseconds: float | None = None
    half_milliseconds: float | None = None
    """The same with half of its rows as tokens, where the experts of a mixture skip the others."""


def replays(
    manager: Any, descriptors: Sequence[Any], create_forward: Callable[..., Any], rows: DummyRows | None
) -> list[Replay]:
    """Return what each graph's replay takes; graphs of microbatches are not timed.

    Other work of the host only makes a replay longer.

    The manager's own function prepares dummy inputs of the graph's size first, as it did for the capture.

    :param rows: those of the manager; None: they stay padding.
    """
    import torch

    timed: list[list[list[tuple[Any, Any]]]] = []
    # As vLLM captures: tensors made in this mode cannot be written outside of it.
    with torch.inference_mode(), nullcontext() if rows is None else rows.counting():
        for descriptor in descriptors:
            runs: list[list[tuple[Any, Any]]] = []
            timed.append(runs)
            # An observation has no graphs of microbatches.
            if getattr(descriptor, "num_ubatches", 1) > 1:
                continue
            forward = create_forward(descriptor, warmup=False)
            for tokens in (descriptor.num_tokens, descriptor.num_tokens // 2)[: 1 if rows is None else 2]:
                if rows is not None:
                    rows.fill(tokens)  # what it prepared is padding
                runs.append([_timed(manager, descriptor, forward) for _ in range(REPLAYS)])
        device.settle()
    return [Replay(*(round(min(a.elapsed_time(b) for a, b in each), 5) for each in runs)) for runs in timed]


def _timed(manager: Any, descriptor: Any, forward: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Replay a graph, and return the events around it."""
    start, end = device.event(), device.event()
    start.record()
    # A piecewise forward replays its graphs itself, between what runs eager.
    if descriptor.cg_mode.name == "FULL":
        manager.run_fullgraph(descriptor)
    else:
        forward(descriptor.cg_mode)
    end.record()
    return start, end


class DummyWatch(StepWatch):
    """Watches dummy runs, all of whose rows count as tokens."""

    def __init__(self, rows: DummyRows | None, most: int, tracks: Sequence[Track], sink: StepSink) -> None:
        """:param most: rows that there are."""
        super().__init__(tracks, sink, device.event, every=1, dummies=True)
        self._rows, self._most = rows, most

    def forward(self) -> None:
        """Start the time of the target's forward, on rows that count."""
        if self._rows is not None:
            self._rows.fill(self._most)
        super().forward()


class EagerSteps(StepSink):
    """Takes the steps of dummy runs, and keeps the times of eager ones; dummy runs verify no drafts."""

    def __init__(self) -> None:
        self._graphs: dict[Shape, int | None] = {}
        self._times: dict[Shape, list[float]] = {}

    def add(self, outcome: Outcome, steps: int) -> None:
        """Note whether such steps ran eager."""
        self._graphs[outcome[:6]] = outcome[6]

    def sample(self, *timed: *TimedShape) -> None:
        """Keep the time of an eager step."""
        # A dummy step that found a graph says nothing about eager ones.
        if self._graphs.get(timed[:6]) is None:
            self._times.setdefault(timed[:6], []).append(timed[6])

    def costs(self) -> dict[Role, tuple[EagerCost, ...]]:
        """Return the medians by role, ascending."""
        found: dict[Role, list[EagerCost]] = {}
        for (role, num_reqs, num_tokens, query_len, *_), times in self._times.items():
            milliseconds = round(statistics.median(times), 5)
            cost = EagerCost(num_reqs=num_reqs, num_tokens=num_tokens, query_len=query_len, milliseconds=milliseconds)
            found.setdefault(role, []).append(cost)
        return {role: tuple(sorted(costs, key=lambda cost: cost.num_tokens)) for role, costs in found.items()}


def eager_sizes(
    tracks: Sequence[Track], *, query_len: int, max_num_reqs: int, max_num_tokens: int
) -> Iterator[tuple[int, bool]]:
    """Yield (tokens, whether each request has ``query_len`` of them) of steps above the target's largest graphs."""
    graphs = [graph.entry for track in tracks if track.role is Role.TARGET for graph in track.graphs]
    served = [entry.num_reqs or entry.num_tokens // query_len for entry in graphs if entry.query_len == query_len]
    most = min(max_num_reqs, max_num_tokens // query_len)
    largest = max(served, default=0)
    # Decodes above the largest graph: the fewest, half-way, and all.
    if largest < most:
        for num_reqs in sorted({largest + 1, (largest + most + 1) // 2, most}):
            yield num_reqs * query_len, True
    size = max((entry.num_tokens for entry in graphs if entry.query_len is None), default=0)
    # Without graphs of mixed batches, everything above the decodes' graphs is eager.
    size = size or max((entry.num_tokens for entry in graphs), default=max_num_reqs)
    # As vLLM's adaptive verification: half as much again, and then doubles.
    sizes = [size + size // 2]
    while size < max_num_tokens:
        size *= 2
        sizes.append(size)
    for num_tokens in sorted({min(size, max_num_tokens) for size in sizes})[:MOST_SIZES]:
        yield num_tokens, False


def eager_costs(
    runner: Any,
    tracks: Sequence[Track],
    watching: Callable[[StepWatch], AbstractContextManager[None]],
    rows: DummyRows | None,
) -> Mapping[Role, tuple[EagerCost, ...]]:
    """Run dummy steps above the largest graphs, and return what each role took, where it ran eager.

    :param watching: lets a watch follow the steps for a while.
    :param rows: those of the target; None: they stay padding.
    """
    steps = EagerSteps()
    watch = DummyWatch(rows, runner.max_num_tokens, tracks, steps)
    sizes = eager_sizes(
        tracks,
        query_len=runner.decode_query_len,
        max_num_reqs=runner.max_num_reqs,
        max_num_tokens=runner.max_num_tokens,
    )
    with watching(watch), nullcontext() if rows is None else rows.counting():
        for num_tokens, uniform in sizes:
            for _ in range(REPLAYS):
                # Dummy tokens would count in the statistics by which vLLM moves experts between ranks.
                runner._dummy_run(num_tokens, uniform_decode=uniform, skip_eplb=True)
                # A dummy run drafts but samples nothing, so that no wrapper ends its last pass.
                watch.end()
            device.settle()
            watch.flush()
            watch.read()
    return steps.costs()


def restore(runner: Any) -> None:
    """Bring back what a dummy run that failed may have left, as its end does."""
    runner.kv_connector.set_disabled(False)
    runner.execute_model_state = None
