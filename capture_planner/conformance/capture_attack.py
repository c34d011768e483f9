"""How the capture session of a scene is disturbed, and what watches it: order, memory, errors, replays.

A scene's runner captures through ``WatchedGraphs``. They let a session run out of memory or break off, and they
know which graph belongs to which entry without asking the runner.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch

from capture_planner.conformance.failure import Check
from capture_planner.modes import Role
from capture_planner.records._base import NonNegative, record
from capture_planner.records.batch import Entry
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.runtime.capture import Work
from capture_planner.runtime.execution.role import RoleRun
from capture_planner.runtime.graphs.graph import Graph, Grapher, GraphPool
from capture_planner.runtime.graphs.leftover import Leftover
from capture_planner.runtime.graphs.reading import Reading

Key = tuple[Role, Entry | None]
"""Which graph: its role and its entry."""


@record
class CaptureAttack:
    """How the capture session of a scene goes."""

    order: NonNegative = 0
    """Seed of the order of captures; 0: the runner's own."""
    alone: NonNegative = 0
    """The number of the only graph of each role that fits into memory, from 1; 0: all do."""
    breaks: NonNegative = 0
    """The number of the attention call, from 1, that raises in a first session; 0: none does."""
    stays_eager: bool = False
    """Whether there is no second session after one that broke off."""

    def arranged(self, work: Work) -> Work:
        """Return what is captured in the order of this attack."""
        return random.Random(self.order).sample(work, len(work)) if self.order else work


class InjectedError(RuntimeError):
    """Raised by the suite in the middle of a capture session."""


@attrs.frozen(kw_only=True, eq=False)
class WatchedGraph:
    """A graph, and the role and the entry that it was captured for."""

    graph: Graph
    key: Key
    on_replay: Callable[[Key], None]

    @property
    def memory(self) -> int:
        """As of the graph."""
        return self.graph.memory

    @property
    def alone(self) -> int:
        """As of the graph."""
        return self.graph.alone

    @property
    def leftover(self) -> Leftover:
        """As of the graph."""
        return self.graph.leftover

    @property
    def pieces(self) -> int:
        """As of the graph."""
        return self.graph.pieces

    def dump(self, stem: Path) -> list[Path]:
        """As of the graph."""
        return self.graph.dump(stem)

    def fingerprint(self) -> Fingerprint | None:
        """As of the graph."""
        return self.graph.fingerprint()

    def replay(self) -> None:
        """Note it, and replay the graph."""
        self.on_replay(self.key)
        self.graph.replay()


class WatchedGraphs:
    """The grapher of one scene. In a ``session`` captures are disturbed; those on first use are not.

    :param beneath: captures and replays.
    """

    def __init__(self, beneath: Grapher, attack: CaptureAttack) -> None:
        self.replays: list[Key] = []
        """Which graphs were replayed, in order."""
        self.leftovers: dict[Key, Leftover] = {}
        """What outlived the capture of a graph, where anything did."""
        self.broken: Key | None = None
        """The capture that the suite broke off."""
        self._beneath, self._attack = beneath, attack
        self._staged: Counter[Role] = Counter()
        self._breaks = 0
        self._is_open = False
        self._key: Key | None = None

    @contextmanager
    def session(self, *, breaks: int = 0) -> Iterator[None]:
        """Watch a capture session; ``breaks``: the number of the attention call that raises, 0 for none."""
        self._is_open, self._breaks = True, breaks
        self._staged.clear()
        self.leftovers.clear()
        try:
            yield
        finally:
            self._is_open, self._breaks = False, 0

    def staged(self, role: RoleRun) -> None:
        """Take note that a forward is prepared; raises for a graph that is to find no memory."""
        if self._is_open and self._attack.alone:
            staged, alone = self._staged[role.role], (self._attack.alone - 1) % len(role.plan.entries)
            self._staged[role.role] += 1
            # The graph that fits is staged twice: to warm up, and to be captured.
            if staged - (staged > alone) != alone:
                for buffer in role.fields:
                    buffer.spoil()  # What was to be written into it is not.
                raise torch.OutOfMemoryError("the suite leaves memory for one graph of a role")

    def attention(self, role: RoleRun) -> None:
        """Take note of which forward attends; raises in a session that is to break off here."""
        self._key = role.role, next(iter(role.attention.metadata.values())).entry
        if self._is_open:
            self._breaks -= 1
            if self._breaks == 0:
                self.broken = self._key
                raise InjectedError("the suite breaks this capture session off")

    # As a grapher.

    def reading(self) -> Reading | None:
        return self._beneath.reading()

    def settle(self) -> None:
        self._beneath.settle()

    def pool(self, limit: int | None = None) -> GraphPool:
        return self._beneath.pool(limit)

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> Graph:
        """Capture, and take note of what outlives it."""
        graph = self._beneath.capture(forward, pool)
        assert self._key is not None, "a forward attends"
        if graph.leftover.size:
            self.leftovers[self._key] = graph.leftover
        return WatchedGraph(graph=graph, key=self._key, on_replay=self._note)

    def split(
        self, between: Callable[..., object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        self._beneath.split(between, reads, writes)

    def _note(self, key: Key) -> None:
        if self._is_open:
            role, entry = key
            raise Check.REPLAYED.violation("the graph is replayed inside a capture session", role=role, entry=entry)
        self.replays.append(key)
