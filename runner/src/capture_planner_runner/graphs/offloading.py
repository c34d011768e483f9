"""Graphs of a model whose weights an engine's offloader brings to the device while layers run.

An offloader copies the weights of coming layers on a stream of its own, which a graph knows only as far as it was
captured. So it is called where vLLM's CUDA graph managers and wrappers call theirs: before a capture, so that no copy
of before is under way; inside the capture at its end, so that its copies join it; and before each replay. An
offloader of vLLM or SGLang has these methods. Eager forwards and warm-ups call none of them: there the hooks of its
modules wait for their own copies.

Give ``Runner`` a grapher that calls it, for graphs of all roles. Here one graph is captured and replayed twice::

    import torch
    from capture_planner_runner.graphs.offloading import with_offloader
    from capture_planner_runner.graphs.recorded import RecordedGraphs

    class Offloader:
        resident, host = torch.zeros(4), torch.arange(4.0)

        def sync_prev_onload(self):
            print("no copy is under way")

        def join_after_forward(self):
            self.resident.copy_(self.host)  # in the graph: each replay leaves the first layer's weights

    offloader, total = Offloader(), torch.zeros(4)
    grapher = with_offloader(RecordedGraphs(), offloader)
    graph = grapher.capture(lambda: total.add_(offloader.resident), grapher.pool())
    for _ in range(2):
        graph.replay()
    assert total.tolist() == [0.0, 2.0, 4.0, 6.0]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import torch

from capture_planner.records.fingerprint import Fingerprint
from capture_planner_runner.graphs.graph import Graph, Grapher, GraphPool, Leftover
from capture_planner_runner.graphs.reading import Reading

__all__ = ["Offloader", "with_offloader"]


class Offloader(Protocol):
    """Copies weights to the device while layers run."""

    def sync_prev_onload(self) -> None:
        """Make the current stream wait for all copies. Called outside of graphs, before each piece of one.

        At capture and at every replay; a FULL graph is one piece. An error ends the capture or the forward.
        """

    def join_after_forward(self) -> None:
        """Make the current stream wait for the copies that began in this capture.

        Called inside of it, as the last thing of each piece, so what it launches is part of every replay.
        """


def with_offloader(grapher: Grapher, offloader: Offloader) -> Grapher:
    """Return a grapher that captures by another one, and calls an offloader around each piece of its graphs."""
    return _OffloadingGrapher(grapher, offloader)


@attrs.frozen(eq=False)
class _OffloadingGraph:
    """A graph that is replayed after the offloader's copies."""

    _graph: Graph
    _offloader: Offloader

    @property
    def memory(self) -> int:
        return self._graph.memory

    @property
    def alone(self) -> int:
        return self._graph.alone

    @property
    def leftover(self) -> Leftover:
        return self._graph.leftover

    @property
    def pieces(self) -> int:
        return self._graph.pieces

    def dump(self, stem: Path) -> list[Path]:
        return self._graph.dump(stem)

    def fingerprint(self) -> Fingerprint | None:
        return self._graph.fingerprint()

    def replay(self) -> None:
        self._offloader.sync_prev_onload()
        self._graph.replay()


@attrs.frozen(eq=False)
class _OffloadingGrapher:
    """A grapher that calls an offloader around each piece."""

    _grapher: Grapher
    _offloader: Offloader

    def reading(self) -> Reading | None:
        return self._grapher.reading()

    def settle(self) -> None:
        self._grapher.settle()

    def pool(self, limit: int | None = None) -> GraphPool:
        return self._grapher.pool(limit)

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> Graph:
        def joined() -> None:
            forward()
            # CUDA refuses to end a capture with work on another stream that has not joined it.
            self._offloader.join_after_forward()

        # Outside of the graph, so that it is called at this place of every replay, too.
        self._offloader.sync_prev_onload()
        return _OffloadingGraph(self._grapher.capture(joined, pool), self._offloader)

    def split(
        self, between: Callable[..., object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        def before_the_next_piece(*tensors: torch.Tensor) -> None:
            between(*tensors)
            self._offloader.sync_prev_onload()

        # The piece ends at the split, and its copies must have joined by then.
        self._offloader.join_after_forward()
        self._grapher.split(before_the_next_piece, reads, writes)
