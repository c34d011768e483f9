"""Graphs: what captures a forward and replays it. Recorded on a CPU, CUDA graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from capture_planner.records.fingerprint import Fingerprint
from capture_planner_runner.graphs.leftover import Leftover
from capture_planner_runner.graphs.reading import Reading


class GraphPool(Protocol):
    """The memory that graphs' intermediates live in; graphs that share a pool never run at once.

    What a graph added goes with it, as far as memory can be told apart: a recorded pool gives back each chunk in which
    no graph lies any more, a CUDA pool its segments once none of its graphs is left.
    """

    @property
    def memory(self) -> int:
        """Bytes that the pool holds now."""

    def poison(self) -> None:
        """Overwrite every byte with ``0xFF``: NaN as a float, -1 as an integer."""


class Graph(Protocol):
    """One captured forward."""

    @property
    def memory(self) -> int:
        """Bytes by which this graph grew its pool."""

    @property
    def alone(self) -> int:
        """Bytes that it would take in a separate pool.

        Of a CUDA graph: its tensors when most of them were alive, without what segments round up.
        """

    @property
    def leftover(self) -> Leftover:
        """Tensors that its forward made and that outlived the capture."""

    @property
    def pieces(self) -> int:
        """Number of pieces: 1 for a FULL graph, one more than its attention calls for PIECEWISE."""

    def dump(self, stem: Path) -> list[Path]:
        """Write its contents into files with names that begin with ``stem``, and return them.

        Recorded graphs are text, an operator a line; CUDA graphs are Graphviz, a file a piece.
        """

    def fingerprint(self) -> Fingerprint | None:
        """Return what it is made of; None where nothing reads it. Raises ``CaptureError`` where it cannot be read."""

    def replay(self) -> None:
        """Run again on the same storage, with the host's numbers as they were at capture."""


class Grapher(Protocol):
    """Captures graphs on one kind of device."""

    def reading(self) -> Reading | None:
        """Wait for the device, give back what no tensor owns, and read its memory; None: a host."""

    def settle(self) -> None:
        """Wait until the device has done all that it was given."""

    def pool(self, limit: int | None = None) -> GraphPool:
        """Make a pool that refuses to hold more than ``limit`` bytes."""

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> Graph:
        """Run ``forward`` once and keep what it did.

        Raises ``CaptureError`` where it did what no graph can hold, such as reading a device value on the host, and
        ``torch.OutOfMemoryError`` where the pool cannot hold it; then the pool is as it was before.
        """

    def split(
        self, between: Callable[..., object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """End a piece, run ``between(*reads, *writes)`` outside the graph, and begin the next piece.

        Called by the forward while it is captured; ``between`` is run there, and once at this place
        of every replay, on tensors over the same memory as at capture. ``reads`` and ``writes`` are all
        the tensors of the graph that it touches: a graph keeps where they are and not the tensors, so
        that their memory is there for what comes after them, and ``between`` must not keep them either.
        """
