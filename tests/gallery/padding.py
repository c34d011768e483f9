"""Mutants of class D: backends whose real rows depend on what padding, or reused memory, holds."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.modes import Refresh, Role
from capture_planner.plugins.backend import Executor, Metadata, Reservation, Scoring
from capture_planner.records.backend import Attention, Axis, Bound, Fill, MetadataField, PaddingContract, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits
from capture_planner_reference.backend import Reference
from capture_planner_reference.executor import ReferenceExecutor
from gallery.core import Mutant, with_field
from gallery.paged import SPLITS, PagedBackend, PagedExecutor, Work
from gallery.scheduled import METADATA, ScheduledExecutor, ScheduledReference


class RenamedReference(Reference):
    """The reference under a name of its own, prepared on the host; ``executor`` is what it runs."""

    name = "renamed"

    def __init__(self, executor: type[ReferenceExecutor] = ReferenceExecutor) -> None:
        self._executor = executor

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """On the host, where mutants prepare what they should not."""
        return Refresh.HOST

    def reserve(self, reservation: Reservation) -> Executor:
        """Make the executor of one group."""
        return self._executor(reservation)


class CopiesTable(RenamedReference):
    """Keeps a block table of its own in the workspace."""

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """As many rows and columns as there may be; a page has one token at least."""
        rows = max(limits.max_num_reqs, *(entry.num_reqs or 0 for entry in entries), 0)
        return Workspace(device=4 * rows * (model.max_model_len + 1), formula="a block table")


class StalePageIndices(ReferenceExecutor):
    """Copies the pages of real requests alone; its graphs gather those of all rows."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        columns = reservation.fields["block_table"].shape[1]
        ints = reservation.workspace.view(torch.int32)
        self._table = ints[: len(ints) // columns * columns].view(-1, columns)

    def prepare(self, metadata: Metadata) -> None:
        """Copy as many rows as there are requests."""
        super().prepare(metadata)
        real = int((metadata.host["idx_mapping"] >= 0).sum())
        self._table[:real] = metadata.fields["block_table"][:real]

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend over the copy."""
        metadata = with_field(metadata, "block_table", self._table[: metadata.num_reqs])
        super().attend(layer, query, out, scoring, metadata)


class PaddedBlocksRun(PagedExecutor):
    """Launches the padded items of a graph as if they had work: the plan neither writes nor masks them."""

    _is_full = False

    def prepare(self, metadata: Metadata) -> None:
        """Plan; a launch outside a graph has no padding."""
        self._is_full = metadata.is_full
        super().prepare(metadata)

    def stage(self, work: Work) -> None:
        """Copy what was planned for a graph, and nothing behind it."""
        if not self._is_full:
            super().stage(work)
            return
        for part, values in zip(self.cut(self.ints).vectors, work.vectors, strict=True):
            part[: len(values)] = torch.from_numpy(values)

    def valid(self, work: Work) -> torch.Tensor:
        """All of them, in a graph."""
        valid = super().valid(work)
        return torch.ones_like(valid) if self._is_full else valid


class MergesUnwritten(PagedExecutor):
    """Has a place for every part of every token, cleared once, and merges them all."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self.partials(0)[1].fill_(-torch.inf)

    def stage(self, work: Work) -> None:
        """Begin each token's parts where its places do."""
        super().stage(attrs.evolve(work, merge=np.arange(len(work.merge)) * SPLITS))

    def partials(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places, which are the same for every batch."""
        return super().partials((self.sizes.rows - 1) // SPLITS)


class EachBlockWrites(PagedExecutor):
    """In a graph every block writes the output, and a late one overwrites what the last one merged."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Merge; then the block of the first part comes late."""
        super().attend(layer, query, out, scoring, metadata)
        if metadata.is_full:
            merge, values = self.cut(self.ints).merge, self.partials(len(query))[0]
            late = values.index_select(0, merge[:-1]).to(out.dtype)
            out.copy_(torch.where((merge[1:] - merge[:-1] > 1)[:, None, None], late, out))


class StaleTileCounts(ScheduledExecutor):
    """Keeps scheduler metadata of its own, and leaves what is behind the requests of a step."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self.scheduled = torch.zeros_like(self.scheduled)

    def prepare(self, metadata: Metadata) -> None:
        """Count the tiles of the real requests."""
        real = int((metadata.host["idx_mapping"] >= 0).sum())
        tiles = -(-metadata.fields["seq_lens"][:real] // self.reservation.page_size)
        self.scheduled[METADATA.offset :][: METADATA.scale * real : METADATA.scale] = tiles


class OffsetsByToken(PagedExecutor):
    """Reads offsets along tokens, where they lie along requests: the same where each has one token."""

    def ends(self, metadata: Metadata, request: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the request's number as that of its token, in a graph."""
        begin, end = super().ends(metadata, request, name)
        return (request, request + 1) if metadata.is_full and name == "qo_indptr" else (begin, end)


class ZeroFilledOffsets(RenamedReference):
    """Declares that offsets are padded with 0."""

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """The offsets, wrongly."""
        wrong = MetadataField(
            name="query_start_loc", axis=Axis.REQUEST_PLUS_ONE, fill=Fill.CONSTANT, value=0, indexes=Bound.TOKENS
        )
        return PaddingContract(fields=(wrong,))


class ClearsPadding(ReferenceExecutor):
    """Clears the rows behind the last of the offsets, which is the real total where they are padded so."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend, and clear."""
        super().attend(layer, query, out, scoring, metadata)
        rows = torch.arange(len(out), device=out.device)
        out.masked_fill_((rows >= metadata.fields["query_start_loc"][-1])[:, None, None], 0)


class PaddedRowsUnwritten(PagedExecutor):
    """Writes the rows of real requests alone."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Leave what is in the memory of the others."""
        whole = torch.empty_like(out)
        super().attend(layer, query, whole, scoring, metadata)
        rows = torch.arange(len(out), device=out.device) < metadata.fields["qo_indptr"][-1]
        out.copy_(torch.where(rows[:, None, None], whole, out))


D = BugClass.D
MUTANTS = (
    Mutant(
        name="stale-page-indices",
        threads=("vllm#39773",),
        bug_class=D,
        says="The backend copies the pages of real requests alone, and its graphs gather pages for padded rows",
        backend=lambda: CopiesTable(StalePageIndices),
    ),
    Mutant(
        name="padded-blocks-run",
        threads=("flashinfer#4002", "flashinfer#5176", "sglang#34190"),
        bug_class=D,
        says="Blocks launched beyond the plan are not masked, and read plan entries that were never written",
        backend=lambda: PagedBackend(PaddedBlocksRun),
    ),
    Mutant(
        name="merges-unwritten-partials",
        threads=(),
        bug_class=D,
        says="The merge reads partial results that no block wrote, which is right in a fresh workspace alone",
        backend=lambda: PagedBackend(MergesUnwritten),
    ),
    Mutant(
        name="each-block-writes",
        threads=("flashinfer#4161",),
        bug_class=D,
        says="Each block of a split sequence writes the output, and a late one overwrites the merged row",
        backend=lambda: PagedBackend(EachBlockWrites),
    ),
    Mutant(
        name="stale-tile-counts",
        threads=("vllm#35918",),
        bug_class=D,
        says="Scheduler metadata is made for the real requests, and its tail keeps those of a larger batch",
        backend=lambda: ScheduledReference(StaleTileCounts),
    ),
    Mutant(
        name="offsets-by-token",
        threads=(),
        bug_class=D,
        says="Query offsets are read along tokens instead of requests",
        backend=lambda: PagedBackend(OffsetsByToken),
    ),
    Mutant(
        name="zero-filled-offsets",
        threads=(),
        bug_class=D,
        says="The contract fills query offsets with 0, and the kernel takes the last one for the real total",
        backend=lambda: ZeroFilledOffsets(ClearsPadding),
    ),
    Mutant(
        name="padded-rows-unwritten",
        threads=(),
        bug_class=D,
        says="The output's padded rows keep what was in their memory",
        backend=lambda: PagedBackend(PaddedRowsUnwritten),
    ),
)
