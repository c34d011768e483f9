"""Every batch that an engine's limits admit, with the engine's answer and the best graph it has.

The whole space is asked, batch by batch, through the engine's own rule: nothing is assumed about how
it finds a graph, so that a hole between two sizes is seen wherever it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.emulation import Emulation, Graph, Manager
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry, Kind, Rejection
from capture_planner.records.batch_space import DecodeFamily, batches


@attrs.frozen(kw_only=True)
class Asked:
    """One batch, what the engine answers, and the graph of its own that would serve it best."""

    batch: Batch
    answer: Dispatch
    best: Entry | None
    """The cheapest compatible graph that is captured; None where there is none."""
    last: int
    """The extent up to which larger batches are answered alike; its own, but beyond the largest graph."""

    @property
    def kind(self) -> Kind:
        """A decode, or mixed."""
        return self.batch.kind

    @property
    def extent(self) -> int:
        """Requests of a decode, tokens of a mixed batch."""
        return self.batch.extent(self.kind)

    @property
    def misses_full(self) -> bool:
        """Whether a compatible FULL graph is captured, and the answer is no FULL graph."""
        best = self.best
        return best is not None and best.mode is GraphMode.FULL and self.answer.mode is not GraphMode.FULL

    @property
    def misses_any(self) -> bool:
        """Whether a compatible graph is captured, and the batch runs eager."""
        return self.best is not None and self.answer.entry is None


@attrs.frozen(kw_only=True)
class Run:
    """Batches of one role and kind that follow each other and have something in common."""

    role: Role
    kind: Kind
    query_len: int | None
    first: int
    last: int
    active_loras: int
    asked: tuple[Asked, ...]

    def __str__(self) -> str:
        span = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        many = "" if self.last == 1 else "s"
        if self.kind is Kind.MIXED:
            text = f"mixed batches of {span} token{many}"
        else:
            text = f"decodes of {span} request{many}, query length {self.query_len}"
        return text + (f", {self.active_loras} active LoRA" if self.active_loras else "")


def walk(emulation: Emulation) -> tuple[Asked, ...]:
    """Ask about every admissible batch of every role, as ``admissible.batches`` has them.

    Beyond the largest graph nothing is captured, so that one batch stands for all.
    """
    return tuple(asked for manager in emulation.managers for asked in _role(emulation, manager))


def _role(emulation: Emulation, manager: Manager) -> Iterator[Asked]:
    role, graphs = manager.role, _Graphs(manager.graphs)
    largest = max((graph.entry.num_tokens for graph in manager.graphs), default=0)
    families = emulation.families(role)
    for batch, last in batches(role, emulation, families=families, upto=largest):
        best = graphs.best(batch, _draft_steps(batch, families))
        yield Asked(batch=batch, answer=manager.dispatch(batch), best=best, last=last)


def _draft_steps(batch: Batch, families: Iterable[DecodeFamily]) -> int | None:
    found = (f for f in families if f.query_len == batch.query_len and batch.num_reqs in f.requests)
    return next((family.draft_steps for family in found), None)


class _Graphs:
    """Captured graphs, alike but for their size in one row, so that few are looked at for a batch."""

    def __init__(self, graphs: Iterable[Graph]) -> None:
        rows: dict[tuple[object, ...], list[Graph]] = {}
        for graph in graphs:
            entry = graph.entry
            kind = (entry.mode, entry.query_len, entry.active_loras, entry.draft_steps, graph.max_query_len)
            rows.setdefault(kind, []).append(graph)
        by_cost = (sorted(row, key=lambda graph: graph.entry.cost) for row in rows.values())
        self._rows = [([graph.entry.num_tokens for graph in row], row) for row in by_cost]

    def best(self, batch: Batch, steps: int | None) -> Entry | None:
        """Return the cheapest graph that serves the batch."""
        found = (self._first(tokens, row, batch, steps) for tokens, row in self._rows)
        return min((entry for entry in found if entry), key=lambda entry: entry.cost, default=None)

    @staticmethod
    def _first(tokens: list[int], row: list[Graph], batch: Batch, steps: int | None) -> Entry | None:
        for graph in row[bisect_left(tokens, batch.num_tokens) :]:
            rejection = graph.rejection(batch, steps)
            if rejection is None:
                return graph.entry
            if rejection is not Rejection.REQUESTS:
                return None  # What is larger in a row is wrong in the same way.
        return None


def runs(asked: Iterable[Asked]) -> Iterator[Run]:
    """Group batches of one role, kind, query length and adapter count that follow each other."""
    run: list[Asked] = []
    for one in sorted(asked, key=_place):
        if run and (_place(one)[:-1] != _place(run[0])[:-1] or one.extent > run[-1].last + 1):
            yield _run(run)
            run = []
        run.append(one)
    if run:
        yield _run(run)


def _place(asked: Asked) -> tuple[str, str, int, int, int]:
    batch = asked.batch
    return (batch.role, asked.kind.value, batch.query_len or 0, batch.active_loras, asked.extent)


def _run(asked: list[Asked]) -> Run:
    first, last = asked[0], asked[-1]
    return Run(
        role=first.batch.role,
        kind=first.kind,
        query_len=first.batch.query_len,
        first=first.extent,
        last=last.last,
        active_loras=first.batch.active_loras,
        asked=tuple(asked),
    )
