"""The graphs of one role: captured in sessions, guarded, and replayed once their session has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from capture_planner.modes import GraphMode
from capture_planner.records.batch import Entry
from capture_planner_runner.execution.guards import GraphState, PointerGuard
from capture_planner_runner.graphs.graph import Graph, Grapher, GraphPool


class RoleGraphs(dict[Entry, Graph]):
    """The graphs that may be replayed, by entry. Those of a session are added when it ends."""

    def __init__(self, grapher: Grapher) -> None:
        super().__init__()
        self.pool: GraphPool | None = None
        """The memory of the graphs; None before ``begin``."""
        self._grapher = grapher
        self._guard: PointerGuard | None = None
        self._states: dict[Entry, GraphState] = {}
        # Nothing of a session is replayed before it has ended (vllm#28334).
        self._captured: dict[Entry, tuple[Graph, GraphState]] = {}
        self._is_splitting = False

    def begin(self, pool: GraphPool, guard: PointerGuard) -> None:
        """Drop all graphs, and capture into ``pool`` from here on; ``guard`` knows where every tensor is now."""
        self.drop_all()
        self.pool, self._guard = pool, guard

    def capture(self, entry: Entry, forward: Callable[[], None], state: Callable[[], GraphState]) -> Graph:
        """Capture a forward for an entry; ``state`` returns the host values that it bakes in, after the capture."""
        assert self.pool is not None, "begin comes first"
        self._is_splitting = entry.mode is GraphMode.PIECEWISE
        try:
            graph = self._grapher.capture(forward, self.pool)
        finally:
            # Also after an error: eager forwards that follow must not split.
            self._is_splitting = False
        self._captured[entry] = graph, state()
        return graph

    def call(
        self, function: Callable[..., None], *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Call what no piece of a graph may hold; a PIECEWISE capture is split here, and calls it at each replay."""
        if self._is_splitting:
            self._grapher.split(function, reads=reads, writes=writes)
        else:
            function(*reads, *writes)

    def drop(self, entry: Entry) -> None:
        """Drop the captured graph of an entry, if there is one: another rank has none."""
        self._captured.pop(entry, None)

    def end(self) -> None:
        """End the session: all its graphs may be replayed."""
        for entry in list(self._captured):  # `keep` takes it out
            self.keep(entry)

    def keep(self, entry: Entry) -> None:
        """Let one captured graph be replayed next to those that are there, if it was captured."""
        if entry in self._captured:
            self[entry], self._states[entry] = self._captured.pop(entry)

    def abandon(self) -> None:
        """Drop all graphs after an error: everything runs eager, and another session may begin."""
        self.drop_all()
        self.pool = self._guard = None

    def drop_all(self) -> None:
        """Drop all graphs, those that may be replayed and those of a session; the pool stays."""
        for graphs in (self, self._states, self._captured):
            graphs.clear()

    def check(self, entry: Entry, now: GraphState, label: str) -> None:
        """Compare the values that a graph bakes in with the present ones; raises ``GuardError`` with ``label``."""
        if self._guard is not None:
            self._guard.check(label)
        self._states[entry].check(now, label)
