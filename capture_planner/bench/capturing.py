"""Capture of the whole plan: the runner's against a bare ``torch.cuda.graph`` loop over the same graphs.

The bare loop has the same forwards, warmed up as often, in the same order and in the same pools. It
checks nothing, and counts memory before the first graph and after the last.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import attrs
import torch

from capture_planner.bench.record import Capturing, Cost
from capture_planner.bench.rig import Absence, Rig
from capture_planner.errors import RunError
from capture_planner.modes import Pool
from capture_planner.records.text import counted
from capture_planner.runtime.graphs.graph import GraphPool
from capture_planner.runtime.graphs.reading import Reading
from capture_planner.runtime.ledger import Captured
from capture_planner.runtime.runner import Runner


def capture(rig: Rig, advance: Callable[[str], None]) -> Capturing:
    """Capture all of the plan, first once to load kernels, then by turns. Raises ``Absence`` without graphs."""
    if not rig.plan.num_graphs:
        raise Absence("the plan captures nothing")
    first, captured = _ours(rig, advance)
    if rig.device.type != "cuda":
        return Capturing(
            graphs=rig.plan.num_graphs,
            first_seconds=first.seconds,
            ours=first,
            bare=None,
            captured=captured,
        )
    ours, bare = [], []
    for _ in range(rig.effort.runs):
        found, captured = _ours(rig, advance)
        ours.append(found)
        bare.append(_bare(rig, advance))
    return Capturing(
        graphs=rig.plan.num_graphs,
        first_seconds=first.seconds,
        ours=_median(ours),
        bare=_median(bare),
        captured=captured,
    )


def _median(costs: Sequence[Cost]) -> Cost:
    """Return the median of each number by itself."""
    return Cost(
        seconds=statistics.median(cost.seconds for cost in costs),
        pool=int(statistics.median(cost.pool for cost in costs)),
        driver=int(statistics.median(cost.driver for cost in costs)),
    )


@attrs.frozen
class _Device:
    """What the device has left, and what the allocator holds of the rest."""

    free: int
    reserved: int

    @classmethod
    def now(cls, rig: Rig) -> _Device:
        rig.settle()
        if rig.device.type != "cuda":
            return cls(0, 0)
        return cls(torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved())

    def lost_since(self, before: _Device) -> int:
        """Return the bytes that are gone beside what the allocator holds."""
        return max(0, before.free - self.free - (self.reserved - before.reserved))


def pools_of(runner: Runner) -> int:
    """Return the bytes that the pools of a runner hold, a shared one counted once."""
    pools = {id(role.pool): role.pool for role in runner.parts.roles.values() if role.pool is not None}
    return sum(pool.memory for pool in pools.values())


def refuse_dropped(captured: Sequence[Captured]) -> None:
    """Raise ``RunError`` where a graph did not fit: what is compared would not be the same."""
    dropped = [graph for graph in captured if graph.waiver is not None]
    if dropped:
        raise RunError(
            f"{len(dropped)} of {counted(len(captured), 'graph')} did not fit into memory, so captures "
            "cannot be compared; give less to the KV cache (--pages)"
        )


def _ours(rig: Rig, advance: Callable[[str], None]) -> tuple[Cost, tuple[Captured, ...]]:
    with rig.runner(rig.plan) as runner:
        before = _Device.now(rig)
        runner.capture(progress=lambda done: advance(f"{done.role.value} {done.entry}"))
        captured = tuple(runner.session.captured)
        refuse_dropped(captured)
        seconds = runner.session.capture_seconds
        cost = Cost(seconds=seconds, pool=pools_of(runner), driver=_Device.now(rig).lost_since(before))
    return cost, captured


def _bare(rig: Rig, advance: Callable[[str], None]) -> Cost:
    grapher = BareGraphs()
    with rig.runner(rig.plan, grapher=grapher) as runner:
        roles = tuple(runner.parts.roles.values())
        work = sorted(
            ((role, entry) for role in roles for entry in role.plan.entries),
            key=lambda item: item[1].capture_order,
        )
        before = _Device.now(rig)
        started = perf_counter()
        shared = grapher.pool()
        for role in roles:
            role.begin_capture(shared if rig.plan.pool is Pool.SHARED else grapher.pool())
        with torch.no_grad():
            for role, entry in work:
                role.warm_up(entry)
                role.capture(entry)
                advance(f"bare: {role.role.value} {entry}")
        torch.cuda.synchronize()
        seconds = perf_counter() - started
        return Cost(seconds=seconds, pool=pools_of(runner), driver=_Device.now(rig).lost_since(before))


class BarePool:
    """A pool's handle; what it holds is asked for once, at the end."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()

    @property
    def memory(self) -> int:
        """Bytes of the segments that the allocator holds for this pool."""
        found = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(
            part["total_size"] for part in found if tuple(part["segment_pool_id"]) == tuple(self.handle)
        )

    def poison(self) -> None:
        """Nothing: these graphs are never replayed."""


@attrs.define(eq=False)
class BareGraph:
    """The CUDA graphs of one forward, which are captured and never replayed."""

    parts: list[torch.cuda.CUDAGraph] = attrs.Factory(list)
    memory: int = 0
    alone: int = 0

    @property
    def pieces(self) -> int:
        """How many CUDA graphs it is made of."""
        return len(self.parts)

    def replay(self) -> None:
        """Nothing replays these; raises ``RunError``."""
        raise RunError("the graphs of a bare loop are captured to be compared, and never replayed")


class BareGraphs:
    """Captures with ``torch.cuda.graph`` and nothing else, on the current stream."""

    def __init__(self) -> None:
        self._open: BareGraph | None = None
        self._pool: BarePool | None = None
        self._context: AbstractContextManager[None] | None = None

    def reading(self) -> Reading | None:
        """Nothing is read between captures."""
        return None

    def pool(self, limit: int | None = None) -> BarePool:
        """Make a pool without a limit."""
        return BarePool()

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> BareGraph:
        """Capture ``forward`` as one graph, or as pieces where it splits."""
        assert isinstance(pool, BarePool), "pools are made here"
        self._open, self._pool = BareGraph(), pool
        self._begin()
        try:
            forward()
        except BaseException:
            # A capture that is left open would make every later call of the device fail.
            with contextlib.suppress(RuntimeError):
                self._end()
            raise
        self._end()
        return self._open

    def split(
        self,
        between: Callable[..., object],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """End a piece, run ``between``, and begin the next."""
        self._end()
        between(*reads, *writes)
        self._begin()

    def _begin(self) -> None:
        assert self._open is not None and self._pool is not None, "a capture is under way"
        graph = torch.cuda.CUDAGraph()
        self._open.parts.append(graph)
        self._context = torch.cuda.graph(
            graph,
            pool=self._pool.handle,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        )
        self._context.__enter__()

    def _end(self) -> None:
        assert self._context is not None, "a capture is under way"
        self._context.__exit__(None, None, None)
