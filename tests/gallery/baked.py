"""Mutants of class F: backends whose graphs hold a number, an address or a plan that later steps change."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner.records.batch import Entry
from capture_planner_reference.executor import ReferenceExecutor
from gallery.core import Mutant, with_field
from gallery.padding import RenamedReference
from gallery.paged import SPLITS, PagedBackend, PagedExecutor, Work


class PlanNotRefreshed(PagedExecutor):
    """Plans a graph at its capture, and stages that plan again before every replay."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._plans: dict[Entry, Work] = {}

    def plan(self, metadata: Metadata) -> Work:
        """Plan a step that has no graph, and any other the first time."""
        if not metadata.is_full or metadata.entry is None:
            return super().plan(metadata)
        if metadata.entry not in self._plans:
            self._plans[metadata.entry] = super().plan(metadata)
        return self._plans[metadata.entry]


class LengthsNotRefreshed(ReferenceExecutor):
    """Copies lengths for its graphs when they are made, and not before they are replayed."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._lengths: dict[Entry, torch.Tensor] = {}

    def prepare(self, metadata: Metadata) -> None:
        """Make the copy of a graph once."""
        super().prepare(metadata)
        if metadata.is_full and metadata.entry is not None and metadata.entry not in self._lengths:
            self._lengths[metadata.entry] = metadata.fields["seq_lens"].clone()

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend with the copy."""
        if metadata.is_full and metadata.entry is not None:
            metadata = with_field(metadata, "seq_lens", self._lengths[metadata.entry])
        super().attend(layer, query, out, scoring, metadata)


class FreshLengths(ReferenceExecutor):
    """Makes a new tensor of lengths at every step; a graph reads the one that was there at its capture."""

    def prepare(self, metadata: Metadata) -> None:
        """Make it."""
        super().prepare(metadata)
        self._lengths = metadata.fields["seq_lens"].clone()

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend with it."""
        super().attend(layer, query, out, scoring, with_field(metadata, "seq_lens", self._lengths))


class VaryingTakenForUniform(ReferenceExecutor):
    """Bakes the longest query of a varying graph in as that of every request."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend as in a uniform graph of the same extents."""
        entry = metadata.entry
        if metadata.is_full and entry is not None and entry.max_query_len is not None:
            uniform = attrs.evolve(entry, query_len=entry.max_query_len, max_query_len=None)
            metadata = attrs.evolve(metadata, entry=uniform)
        super().attend(layer, query, out, scoring, metadata)


class GrowsWorkspace(PagedExecutor):
    """Keeps page lists in memory that is replaced when a step has more pages than any step before it."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._list = reservation.fields["paged_kv_indices"][:1].clone()

    def prepare(self, metadata: Metadata) -> None:
        """Plan; grow, and copy the list."""
        super().prepare(metadata)
        pages = int(metadata.host["paged_kv_indptr"][-1])
        if pages > len(self._list):
            self._list = self._list.new_zeros(pages)
        self._list[:pages].copy_(metadata.fields["paged_kv_indices"][:pages])

    def inputs(self, work: Work, metadata: Metadata) -> tuple[Work, Metadata]:
        """Read the copy."""
        return work, with_field(metadata, "paged_kv_indices", self._list)


class SharesStaging(PagedBackend):
    """Gives the same pinned memory to all groups."""

    def __init__(self) -> None:
        super().__init__(CopiesAtLaunch)
        self._pinned: dict[int, torch.Tensor] = {}

    def reserve(self, reservation: Reservation) -> PagedExecutor:
        """Take what another group of this size has."""
        pinned = self._pinned.setdefault(len(reservation.pinned), reservation.pinned)
        return super().reserve(attrs.evolve(reservation, pinned=pinned))


class CopiesAtLaunch(PagedExecutor):
    """Copies its plan when the stream gets there, which is at the launch at the latest."""

    def stage(self, work: Work) -> None:
        """Write the plan into pinned memory alone."""
        device, self.ints = self.ints, self.staging
        super().stage(work)
        self.ints = device

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Copy what is in the pinned memory by now."""
        self.ints.copy_(self.staging)
        super().attend(layer, query, out, scoring, metadata)


class OffsetsOfEagerSteps(PagedExecutor):
    """Rebuilds the page offsets of every step in one buffer, and graphs are bound to another."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._bound: dict[Entry | None, torch.Tensor] = {}

    def prepare(self, metadata: Metadata) -> None:
        """Plan; of a graph the offsets are copied when it is made."""
        super().prepare(metadata)
        if metadata.is_full and metadata.entry not in self._bound:
            self._bound[metadata.entry] = metadata.fields["paged_kv_indptr"].clone()

    def ends(self, metadata: Metadata, request: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Read what is bound."""
        if metadata.is_full:
            metadata = with_field(metadata, "paged_kv_indptr", self._bound[metadata.entry])
        return super().ends(metadata, request, name)


class KeepsMask(PagedExecutor):
    """Has a mask for steps with long prompts; where a step has none, the old bits stay."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        tokens = self.sizes.rows // SPLITS
        shape = (tokens, reservation.attention.max_model_len + reservation.page_size)
        self._mask = torch.ones(shape, dtype=torch.bool, device=reservation.device)

    def prepare(self, metadata: Metadata) -> None:
        """Plan, and write the bits of a step whose queries are longer than any decode's."""
        super().prepare(metadata)
        if metadata.max_query_len <= self.reservation.attention.max_query_len:
            return
        starts, lengths = metadata.fields["qo_indptr"], metadata.fields["seq_lens"]
        tokens = torch.arange(metadata.num_tokens, device=starts.device, dtype=starts.dtype)
        owner = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=metadata.num_reqs - 1)
        position = lengths[owner] - starts[owner + 1] + tokens
        keys = torch.arange(self._mask.shape[1], device=starts.device)
        self._mask[: metadata.num_tokens] = keys <= position[:, None]

    def masked(self, seen: torch.Tensor, tokens: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Take away what the bits do."""
        rows, columns = tokens.clamp(0, self._mask.shape[0] - 1), keys.clamp(max=self._mask.shape[1] - 1)
        return seen & self._mask[rows[:, :, None], columns[:, None]]


class SplitOfFirstBatch(PagedExecutor):
    """Bakes in how many pages a part has, and says nothing of it."""

    chunk = 1

    def plan(self, metadata: Metadata) -> Work:
        """Keep the number on the host, too."""
        work = super().plan(metadata)
        self.chunk = int(work.chunk[0])
        return work

    def cut(self, ints: torch.Tensor) -> Work:
        """Return the plan with the host's number, once it is on the device."""
        work = super().cut(ints)
        return work if ints is self.staging else attrs.evolve(work, chunk=self.chunk)


class GridOfBatch(PagedExecutor):
    """Launches as many items as the batch has work for, and not what the graph's extents may need."""

    items = 0

    def plan(self, metadata: Metadata) -> Work:
        """Count them."""
        work = super().plan(metadata)
        self.items = len(work.request)
        return work

    def cut(self, ints: torch.Tensor) -> Work:
        """Return the plan of so many items."""
        work = super().cut(ints)
        return work if ints is self.staging else _first(work, self.items)


class LayoutOfBatch(GridOfBatch):
    """The same, and its layout says so."""

    def layout(self) -> tuple[int, ...] | None:
        """Return the number of items, too."""
        return self.items, *(super().layout() or ())


def _first(work: Work, count: int) -> Work:
    names = ("request", "first", "column", "valid")
    taken: dict[str, Any] = {name: getattr(work, name)[:count] for name in names}
    return attrs.evolve(work, **taken)


class LongestOfBatch(PagedExecutor):
    """Sizes a graph by the longest sequence of the batch that it was captured with."""

    def width(self, metadata: Metadata) -> int:
        """Take the real lengths in the place of the model's."""
        longest = int(metadata.host["seq_lens"].max(initial=1))
        return super().width(attrs.evolve(metadata, max_seq_len=longest))


class ReadsLengths(ReferenceExecutor):
    """Asks the device for the longest sequence while it attends."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Leave out what no request has."""
        if int(metadata.fields["seq_lens"].max()):
            super().attend(layer, query, out, scoring, metadata)


F = BugClass.F
MUTANTS = (
    Mutant(
        name="plan-not-refreshed",
        threads=("TRT-LLM#18769",),
        bug_class=F,
        says="A graph's plan is made at its capture and used again for every batch",
        backend=lambda: PagedBackend(PlanNotRefreshed),
    ),
    Mutant(
        name="lengths-not-refreshed",
        threads=("vllm#38311",),
        bug_class=F,
        says="A graph's copy of the lengths is not refreshed before it is replayed",
        backend=lambda: RenamedReference(LengthsNotRefreshed),
    ),
    Mutant(
        name="fresh-lengths",
        threads=("vllm#37363",),
        bug_class=F,
        says="Every step makes a new tensor, and graphs read the address of an old one",
        backend=lambda: RenamedReference(FreshLengths),
    ),
    Mutant(
        name="varying-taken-for-uniform",
        threads=("vllm-ascend#9136",),
        bug_class=F,
        says="A graph of varying decodes gives every request as many rows as the longest may have",
        backend=lambda: RenamedReference(VaryingTakenForUniform),
    ),
    Mutant(
        name="grows-workspace",
        threads=("flashinfer#4399", "flashinfer#4553"),
        bug_class=F,
        says="A step that needs more workspace replaces it, and graphs that are there read the old one",
        backend=lambda: PagedBackend(GrowsWorkspace),
    ),
    Mutant(
        name="shares-staging",
        threads=("mini-sglang#103",),
        bug_class=F,
        says="A second group's plan overwrites the pinned memory before the copy of the first has run",
        backend=SharesStaging,
    ),
    Mutant(
        name="offsets-of-eager-steps",
        threads=("sglang#37975",),
        bug_class=F,
        says="Page offsets are rebuilt in the buffer of eager steps, and not in the one that graphs read",
        backend=lambda: PagedBackend(OffsetsOfEagerSteps),
    ),
    Mutant(
        name="keeps-mask",
        threads=(),
        bug_class=F,
        says="A step without a mask runs with the bits of the last one that had one",
        backend=lambda: PagedBackend(KeepsMask),
    ),
    Mutant(
        name="split-of-first-batch",
        threads=("vllm#20301",),
        bug_class=F,
        says="The split of sequences is chosen at capture, and later plans split otherwise",
        backend=lambda: PagedBackend(SplitOfFirstBatch),
    ),
    Mutant(
        name="grid-of-batch",
        threads=("vllm#20301",),
        bug_class=F,
        says="A graph launches as many blocks as the batch of its capture needed",
        backend=lambda: PagedBackend(GridOfBatch),
    ),
    Mutant(
        name="layout-of-batch",
        threads=("TRT-LLM#18002",),
        bug_class=F,
        says="The layout of a plan follows the batch, so that no other batch can be replayed",
        backend=lambda: PagedBackend(LayoutOfBatch),
    ),
    Mutant(
        name="longest-of-batch",
        threads=("vllm#19106",),
        bug_class=F,
        says="The longest sequence of the batch is baked in, instead of the model's",
        backend=lambda: PagedBackend(LongestOfBatch),
    ),
    Mutant(
        name="reads-lengths",
        threads=(),
        bug_class=F,
        says="A length is read on the host while the graph is captured",
        backend=lambda: RenamedReference(ReadsLengths),
    ),
)
