"""Capture of the whole plan, by the runner and by a bare ``torch.cuda.graph`` loop over the same graphs.

The bare loop has the same forwards, as many warm-ups, the same order and the same pools. It checks
nothing, and reads memory only before the first graph and after the last. Also one memory pool for all roles against
one per role.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.modes import Pool
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner.bench.record import CaptureCost, CaptureFigure, Pools
from capture_planner_runner.bench.rig import Absence, Rig
from capture_planner_runner.capture.sessions import begin
from capture_planner_runner.compilation.forwards import compiled_seconds
from capture_planner_runner.graphs.cuda import CudaGraph, CudaPool
from capture_planner_runner.graphs.graph import GraphPool
from capture_planner_runner.graphs.reading import Reading
from capture_planner_runner.ledger.rows import GraphCapture
from capture_planner_runner.runner import Runner


def capture(rig: Rig, advance: Callable[[str], None]) -> CaptureFigure:
    """Capture the plan, first once to load kernels, then alternately. Raises ``Absence`` without graphs."""
    if not rig.plan.num_graphs:
        raise Absence("the plan captures nothing")
    with compiled_seconds() as compiled:
        first, captured = _ours(rig, advance)
    ours, bare = [], []
    # Recorded graphs have no bare loop to be compared with, so one capture of them is enough.
    for _ in range(rig.effort.runs if rig.device.type == "cuda" else 0):
        cost, captured = _ours(rig, advance)
        ours.append(cost)
        bare.append(_bare_cost(rig, advance))
    return CaptureFigure(
        graphs=rig.plan.num_graphs,
        first_seconds=first.seconds,
        first_compiled=sum(compiled),
        first_driver=first.driver,
        ours=_median(ours) if ours else first,
        bare=_median(bare) if bare else None,
        captured=captured,
    )


def _median(costs: Sequence[CaptureCost]) -> CaptureCost:
    seconds, pool, driver = (statistics.median(each) for each in zip(*map(attrs.astuple, costs), strict=True))
    return CaptureCost(seconds=seconds, pool=int(pool), driver=int(driver))


def _unaccounted(rig: Rig) -> int:
    """Return the bytes in use on the device that its allocator does not hold; 0 on a CPU."""
    rig.settle()
    if rig.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def pools_of(runner: Runner) -> int:
    """Return the bytes that the pools of a runner hold, a shared one counted once."""
    pools = {id(role.graphs.pool): role.graphs.pool for role in runner.roles.values() if role.graphs.pool is not None}
    return sum(pool.memory for pool in pools.values())


def refuse_dropped(captured: Sequence[GraphCapture]) -> None:
    """Raise ``RunError`` if a graph did not fit, so that captures would not be comparable."""
    dropped = [graph for graph in captured if graph.waiver is not None]
    if dropped:
        raise RunError(
            f"{len(dropped)} of {counted(len(captured), 'graph')} did not fit into memory, so captures "
            "cannot be compared; make the KV cache smaller (--pages)"
        )


def _ours(rig: Rig, advance: Callable[[str], None]) -> tuple[CaptureCost, tuple[GraphCapture, ...]]:
    with rig.runner(rig.plan) as runner:
        before = _unaccounted(rig)
        runner.capture(progress=lambda graph: advance(f"{graph.role.value} {graph.entry}"))
        captured = tuple(runner.session.captured)
        refuse_dropped(captured)
        return _cost(rig, runner, runner.session.capture_seconds, before), captured


def _cost(rig: Rig, runner: Runner, seconds: float, before: int) -> CaptureCost:
    """Return the cost of a capture before which ``before`` bytes were unaccounted for."""
    # Negative if another process gave back memory meanwhile.
    driver = max(0, _unaccounted(rig) - before)
    return CaptureCost(seconds=seconds, pool=pools_of(runner), driver=driver)


def _bare_cost(rig: Rig, advance: Callable[[str], None]) -> CaptureCost:
    grapher = BareGraphs()
    with rig.runner(rig.plan, grapher=grapher) as runner:
        before = _unaccounted(rig)
        started = perf_counter()
        with torch.no_grad():
            for role, entry in begin(rig.plan, tuple(runner.roles.values()), grapher):
                role.warm_up(entry)
                role.capture(entry)
                advance(f"bare: {role.role.value} {entry}")
        torch.cuda.synchronize()
        return _cost(rig, runner, perf_counter() - started, before)


POOL_REQUESTS, POOL_PROMPT, POOL_OUTPUT = 16, 48, 24


def pool_lengths(plan: Plan) -> tuple[int, int]:
    """Return prompt and output tokens of the requests that are served with either kind of pool."""
    # A third each for prompt and output leaves one for the drafts.
    third = max(1, plan.model.max_model_len // 3)
    return min(POOL_PROMPT, third), min(POOL_OUTPUT, third)


def pools(rig: Rig, advance: Callable[[str], None]) -> Pools:
    """Capture and serve the same requests with either kind of pool. Raises ``Absence`` for one role."""
    if len(rig.plan.roles) < 2:
        raise Absence("the plan has no drafter: with one role, both kinds of pool are the same")
    if not rig.plan.num_graphs:
        raise Absence("the plan captures nothing")
    requests = rig.requests(POOL_REQUESTS, *pool_lengths(rig.plan))
    memory, tokens = {}, {}
    for pool in Pool:
        with rig.runner(replace(rig.plan, pool=pool)) as runner:
            runner.capture(progress=lambda graph: advance(f"{graph.role.value} {graph.entry}"))
            refuse_dropped(runner.session.captured)
            memory[pool] = pools_of(runner)
            tokens[pool] = {request.name: request.tokens for request in runner.serve(requests)}
    return Pools(
        shared=memory[Pool.SHARED],
        per_role=memory[Pool.PER_ROLE],
        requests=len(requests),
        differing=tuple(name for name, output in tokens[Pool.SHARED].items() if output != tokens[Pool.PER_ROLE][name]),
    )


class BareGraphs:
    """Captures with ``torch.cuda.graph`` and nothing else, on the current stream. What it captures is not replayed."""

    def reading(self) -> Reading | None:
        """Read nothing between captures."""
        return None

    def settle(self) -> None:
        """Do nothing: a capture waits for the device itself."""

    def pool(self, limit: int | None = None) -> CudaPool:
        """Make a pool without a limit, whose memory is read once, at the end."""
        return CudaPool(None)

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> CudaGraph:
        """Capture ``forward`` as one graph, or as pieces if it splits."""
        assert isinstance(pool, CudaPool), "pools are made here"
        self._graph, self._pool, self._piece = CudaGraph([]), pool, contextlib.ExitStack()
        self._begin()
        try:
            forward()
        except BaseException:
            # An open capture would make every later call of the device fail.
            with contextlib.suppress(RuntimeError):
                self._piece.close()
            raise
        self._piece.close()
        return self._graph

    def split(
        self, between: Callable[..., object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        self._piece.close()
        between(*reads, *writes)
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._graph.parts.append(graph)
        # The runner's stream: without one torch.cuda.graph captures on a stream of its own.
        stream = torch.cuda.current_stream()
        self._piece.enter_context(
            torch.cuda.graph(graph, pool=self._pool.handle, stream=stream, capture_error_mode="thread_local")
        )
