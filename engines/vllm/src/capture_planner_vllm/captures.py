"""What vLLM's graph managers capture, graph by graph: time and memory of each, and the time of its replays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs

from capture_planner_vllm import device, profile

MIB = 1 << 20

CreateForward = Callable[..., Callable[[Any], Any]]
"""vLLM's ``CreateForwardFn``: (descriptor, warmup) to the forward that is captured."""


@attrs.frozen
class Capture:
    """One graph that was captured."""

    descriptor: Any
    seconds: float
    """With its warm-up."""
    mib: float
    """Device memory that was free before its warm-up and not after its capture; at least 0."""


class CaptureLog:
    """Follows one manager's capture through the function that it calls for each graph.

    vLLM empties its allocator's cache and synchronises before it captures a FULL graph, so that memory read
    between two graphs is that of graphs; of PIECEWISE graphs it includes what the warm-up leaves cached.
    """

    def __init__(self, create_forward: CreateForward) -> None:
        self._create = create_forward
        self._open: tuple[Any, float, int] | None = None
        self.graphs: list[Capture] = []
        """In capture order."""

    def create_forward(self, desc: Any, warmup: bool) -> Callable[[Any], Any]:
        """Begin a graph where vLLM begins its warm-up."""
        if warmup:
            self.end(desc)
        return self._create(desc, warmup=warmup)

    def end(self, following: Any = None) -> None:
        """End the open graph, and begin the one that follows."""
        now, free = time.perf_counter(), device.free_memory()
        if self._open is not None:
            descriptor, start, before = self._open
            self.graphs.append(Capture(descriptor, now - start, max(before - free, 0) / MIB))
        self._open = None if following is None else (following, now, free)


class Captures:
    """All captures of one model runner, by manager."""

    def __init__(self) -> None:
        self._logs: dict[int, CaptureLog] = {}
        self._replays: dict[int, list[float | None]] = {}
        self.replaying = 0.0
        """Seconds that replays took."""

    def begin(self, manager: Any, create_forward: CreateForward) -> CaptureLog:
        """Return the log of a manager's capture that begins."""
        log = self._logs[id(manager)] = CaptureLog(create_forward)
        return log

    def replay(self, manager: Any, log: CaptureLog) -> None:
        """Time the replays of all graphs that a manager has just captured, in the order of capture."""
        start = time.perf_counter()
        descriptors = [graph.descriptor for graph in log.graphs]
        self._replays[id(manager)] = profile.replays(manager, descriptors, log.create_forward)
        self.replaying += time.perf_counter() - start

    def graphs(self, manager: Any) -> list[tuple[Capture, float | None]]:
        """Return each graph of a manager, in capture order, and the milliseconds of its replay where it was timed."""
        log = self._logs.get(id(manager))
        if log is None:
            return []
        times = self._replays.get(id(manager)) or [None] * len(log.graphs)
        return list(zip(log.graphs, times, strict=True))
