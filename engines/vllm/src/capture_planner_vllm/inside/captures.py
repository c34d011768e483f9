"""What vLLM's graph managers capture, graph by graph: time and memory of each, and the time of its replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from capture_planner_vllm.inside import device, profile
from capture_planner_vllm.inside.buffers import CreateForward
from capture_planner_vllm.inside.dummy_rows import DummyRows
from capture_planner_vllm.inside.observe_seams import is_target
from capture_planner_vllm.inside.profile import Replay
from capture_planner_vllm.inside.trials import TrialGraph, Trials

MIB = 1 << 20


@attrs.frozen
class Capture:
    """One graph that was captured."""

    descriptor: Any
    seconds: float
    """Seconds of its warm-up and capture."""
    mib: float
    """MiB that were free before its warm-up and not after its capture; at least 0."""


class CaptureLog:
    """Follows one manager's capture through the function that it calls for each graph.

    vLLM empties its allocator's cache and synchronises before it captures a FULL graph, so that memory read
    between two graphs is that of graphs; of PIECEWISE graphs it includes what the warm-up leaves cached.
    """

    def __init__(self, create_forward: CreateForward) -> None:
        self.own = create_forward
        self._open: tuple[Any, float, int] | None = None
        self.graphs: list[Capture] = []
        """Graphs in capture order."""

    def create_forward(self, desc: Any, warmup: bool) -> Callable[[Any], Any]:
        """Begin a graph where vLLM begins its warm-up."""
        # vLLM asks twice for each graph, for its warm-up and for its capture; the graph begins with the first.
        if warmup:
            self.end(desc)
        return self.own(desc, warmup=warmup)

    def end(self, following: Any = None) -> None:
        """End the open graph, and begin the one that follows."""
        now, free = time.perf_counter(), device.free_memory()
        if self._open is not None:
            descriptor, start, before = self._open
            # Free memory can grow meanwhile, where the allocator gives back what it cached.
            self.graphs.append(Capture(descriptor, now - start, max(before - free, 0) / MIB))
        self._open = None if following is None else (following, now, free)


class Captures:
    """All captures of one model runner, by manager."""

    def __init__(self, trials: Trials | None = None, rows: DummyRows | None = None) -> None:
        """Follow the captures of a model runner.

        :param trials: makes throw-away captures; None: there are none.
        :param rows: dummy rows of the target, to fill with tokens for its timing; None: they stay padding.
        """
        self._trials, self._rows = trials, rows
        self._tried: dict[int, list[TrialGraph]] = {}
        self._logs: dict[int, CaptureLog] = {}
        self._replays: dict[int, list[Replay]] = {}
        self.replaying = 0.0
        """Seconds that replays and throw-away captures took."""
        self.left = 0
        """Bytes of the device that they took and did not give back; below 0 where they gave back what vLLM cached."""

    @property
    def profiles(self) -> bool:
        """Whether graphs are timed."""
        return self._trials is not None

    def begin(self, manager: Any, create_forward: CreateForward) -> CaptureLog:
        """Return the log of a manager's capture that begins."""
        log = self._logs[id(manager)] = CaptureLog(create_forward)
        return log

    def replay(self, manager: Any, log: CaptureLog) -> None:
        """Time the replays of all graphs that a manager has just captured, in the order of capture."""
        descriptors = [graph.descriptor for graph in log.graphs]
        with self._ours():
            self._replays[id(manager)] = self._replay(manager, descriptors, log.create_forward)

    def try_others(self, manager: Any, log: CaptureLog, capture: Callable[..., Any]) -> None:
        """Capture, time and drop graphs of sizes that a manager has not captured.

        :param capture: ``CudaGraphManager.capture``, unobserved.
        """
        if self._trials is not None:
            with self._ours():
                self._tried[id(manager)] = self._trials.of(manager, log.own, capture, self._replay)

    def _replay(self, manager: Any, descriptors: Sequence[Any], create_forward: CreateForward) -> list[Replay]:
        return profile.replays(manager, descriptors, create_forward, self._rows if is_target(manager) else None)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Count what it takes: vLLM measures its capture from beginning to end."""
        start, free = time.perf_counter(), device.free_memory()
        try:
            yield
        finally:
            self.replaying += time.perf_counter() - start
            self.left += free - device.free_memory()

    def trials(self, manager: Any) -> list[TrialGraph]:
        """Return the throw-away captures of a manager."""
        return self._tried.get(id(manager), [])

    def graphs(self, manager: Any) -> list[tuple[Capture, Replay]]:
        """Return each graph of a manager, in capture order, and what its replay takes."""
        log = self._logs.get(id(manager))
        if log is None:
            return []
        # Not profiled, or profiling failed before this manager.
        times = self._replays.get(id(manager)) or [Replay()] * len(log.graphs)
        return list(zip(log.graphs, times, strict=True))
