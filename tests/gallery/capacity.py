"""Mutants of class E: backends with a buffer that is smaller than the largest padded extent."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.modes import Role
from capture_planner.plugins.backend import Metadata, Reservation
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits
from gallery.core import Mutant
from gallery.paged import PagedBackend, PagedExecutor, Sizes, Work

FIXED_TOKENS = 8
"""Tokens that a workspace of a fixed size was thought to be enough for."""


class FixedWorkspace(PagedBackend):
    """Declares a workspace of a fixed size for partial results, whatever is captured."""

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """The plan in full, and partial results for a few tokens."""
        whole = super().workspace(role, model, environment, entries, limits)
        sizes = Sizes.of(entries, limits)
        partial = (whole.device - whole.pinned) // sizes.rows
        rows = Sizes.of((), replace(limits, max_num_tokens=FIXED_TOKENS)).rows
        return replace(whole, device=whole.pinned + min(rows, sizes.rows) * partial)


class MergeByRequest(PagedExecutor):
    """Keeps the merge offsets of its graphs in a buffer for as many tokens as there may be requests."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        reqs = reservation.limits.max_num_reqs
        self._merge = torch.zeros(reqs + 1, dtype=torch.int32, device=reservation.device)

    def prepare(self, metadata: Metadata) -> None:
        """Plan, and copy the offsets of a graph."""
        super().prepare(metadata)
        if metadata.is_full:
            offsets = self.cut(self.ints).merge
            self._merge[: len(offsets)].copy_(offsets)

    def inputs(self, work: Work, metadata: Metadata) -> tuple[Work, Metadata]:
        """Read the buffer in a graph."""
        if metadata.is_full:
            work = attrs.evolve(work, merge=self._merge[: metadata.num_tokens + 1])
        return work, metadata


class ListOfFirstBatch(PagedExecutor):
    """Keeps a copy of the page list that is as long as the first graph's pages were at its capture."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._list: torch.Tensor | None = None

    def prepare(self, metadata: Metadata) -> None:
        """Plan, and copy the list."""
        super().prepare(metadata)
        if metadata.is_full:
            pages = int(metadata.host["paged_kv_indptr"][-1])
            listed = metadata.fields["paged_kv_indices"][:pages]
            if self._list is None:
                self._list = listed.clone()
            self._list[:pages].copy_(listed)


class StartsOfTheLargestDecode(PagedExecutor):
    """Keeps query offsets in a buffer for as many requests as the largest uniform decode graph has."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        decodes = [entry.num_reqs or 0 for entry in reservation.entries if entry.query_len is not None]
        self._reqs = max(decodes, default=reservation.limits.max_num_reqs)

    def ends(self, metadata: Metadata, request: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the last offsets of the buffer for requests that have none there."""
        if name == "qo_indptr":
            request = request.clamp(max=self._reqs - 1)
        return super().ends(metadata, request, name)


E = BugClass.E
MUTANTS = (
    Mutant(
        name="fixed-workspace",
        threads=("vllm#40023",),
        bug_class=E,
        says="The workspace has a fixed size, and the largest padded extents need more of it",
        backend=FixedWorkspace,
    ),
    Mutant(
        name="merge-by-request",
        threads=(),
        bug_class=E,
        says="A buffer along tokens is sized for the most requests, which is enough for one token each",
        backend=lambda: PagedBackend(MergeByRequest),
    ),
    Mutant(
        name="list-of-first-batch",
        threads=(),
        bug_class=E,
        says="The page list has room for what the capture had, not for the longest sequences",
        backend=lambda: PagedBackend(ListOfFirstBatch),
    ),
    Mutant(
        name="starts-of-the-largest-decode",
        threads=(),
        bug_class=E,
        says="A buffer along requests is sized by the largest uniform decode graph, and batches without one have more",
        backend=lambda: PagedBackend(StartsOfTheLargestDecode),
    ),
)
