"""Backends that are right as long as nothing else is captured, or captured first: classes K, M and P."""

from __future__ import annotations

from collections import Counter

import attrs
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner.records.batch import Entry
from capture_planner_reference.executor import ReferenceExecutor
from gallery.core import Mutant
from gallery.padding import RenamedReference
from gallery.paged import PagedBackend, PagedExecutor, Work


class WorkspaceOfCapture(PagedExecutor):
    """Tunes a graph at its first call, and allocates what it merges into at the second, which is the capture."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._calls: Counter[Entry] = Counter()
        self._merged: dict[Entry, torch.Tensor] = {}

    def prepare(self, metadata: Metadata) -> None:
        """Plan, and count the calls of each graph."""
        super().prepare(metadata)
        if metadata.is_full and metadata.entry is not None:
            self._calls[metadata.entry] += 1

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend into the workspace, where there is one."""
        entry = metadata.entry
        if not metadata.is_full or entry is None or self._calls[entry] < 2:
            super().attend(layer, query, out, scoring, metadata)
            return
        merged = self._merged.setdefault(entry, torch.empty_like(out))
        super().attend(layer, query, merged, scoring, metadata)
        out.copy_(merged)


class ConstantsOfFirstCapture(ReferenceExecutor):
    """Computes factors of its queries in the first graph that is captured; the other graphs read them there."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._prepared = 0
        self._factors: torch.Tensor | None = None

    def prepare(self, metadata: Metadata) -> None:
        """Count: a graph is prepared once to be warmed up, and once to be captured."""
        super().prepare(metadata)
        self._prepared += metadata.is_full

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend with queries that are multiplied by 1."""
        if metadata.is_full:
            factors = self._factors
            if factors is None:
                factors = query.new_ones(1, 1, 1)
                if self._prepared == 2:
                    self._factors = factors
            query = query * factors
        super().attend(layer, query, out, scoring, metadata)


class ClearedBySecondGraph(PagedExecutor):
    """Clears its semaphores when a second graph is prepared; a graph that is captured alone waits for ever."""

    _is_full = False

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._semaphore = torch.ones(1, dtype=torch.int32, device=reservation.device)
        self._graphs: set[Entry] = set()

    def prepare(self, metadata: Metadata) -> None:
        """Plan, and clear."""
        super().prepare(metadata)
        self._is_full = metadata.is_full
        if metadata.is_full and metadata.entry is not None:
            self._graphs.add(metadata.entry)
            # A plan of one graph is known from the reservation.
            if len(self._graphs) == min(2, sum(e.num_reqs is not None for e in self.reservation.entries)):
                self._semaphore.zero_()

    def valid(self, work: Work) -> torch.Tensor:
        """Items with work, in a graph once the semaphore is clear."""
        valid = super().valid(work)
        return valid & (self._semaphore == 0) if self._is_full else valid


class MergeOfFirstCapture(PagedExecutor):
    """Keeps merge offsets in a buffer for as many tokens as the first graph has; a larger one replaces it."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._merge: torch.Tensor | None = None

    def prepare(self, metadata: Metadata) -> None:
        """Plan, and copy the offsets of a graph."""
        super().prepare(metadata)
        if metadata.is_full:
            offsets = self.cut(self.ints).merge
            if self._merge is None or len(offsets) > len(self._merge):
                self._merge = torch.zeros_like(offsets)
            self._merge[: len(offsets)].copy_(offsets)

    def inputs(self, work: Work, metadata: Metadata) -> tuple[Work, Metadata]:
        """Read the buffer in a graph."""
        if metadata.is_full and self._merge is not None:
            work = attrs.evolve(work, merge=self._merge[: metadata.num_tokens + 1])
        return work, metadata


POOL_BACKENDS: tuple[Mutant, ...] = (
    Mutant(
        name="workspace-born-in-a-capture",
        threads=("aiter#5393",),
        bug_class=BugClass.K,
        says="A workspace is allocated while a graph is captured, and kept for later graphs that share the pool",
        backend=lambda: PagedBackend(WorkspaceOfCapture),
    ),
    Mutant(
        name="constants-of-the-first-capture",
        threads=("TRT-LLM#16290",),
        bug_class=BugClass.K,
        says="What the first graph computes is read by the other graphs, and is stale when another part of the pool "
        "has run",
        backend=lambda: RenamedReference(ConstantsOfFirstCapture),
    ),
    Mutant(
        name="cleared-by-the-second-graph",
        threads=("vllm#57136",),
        bug_class=BugClass.M,
        says="A buffer is initialised when a second graph is captured, so one graph alone computes garbage",
        backend=lambda: PagedBackend(ClearedBySecondGraph),
    ),
    Mutant(
        name="merge-sized-by-the-first-capture",
        threads=(),
        bug_class=BugClass.P,
        says="A buffer is as large as the first graph that is captured, and replaced for a larger one, while graphs "
        "hold the old one",
        backend=lambda: PagedBackend(MergeOfFirstCapture),
    ),
)
