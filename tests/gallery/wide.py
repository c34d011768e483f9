"""Mutants of class E that small and short scenes do not reach: many requests, keys and pages, and wide entries."""

from __future__ import annotations

import attrs
import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.plugins.backend import KernelSizes, Metadata, Reservation, Scoring
from capture_planner_reference.executor import ReferenceExecutor
from gallery.core import Mutant, with_field
from gallery.padding import RenamedReference

TILE, SPLIT, PAGE_NUMBERS = 16, 64, 256


class LimitsAsCapacity(ReferenceExecutor):
    """Keeps the lengths of each request in front of the block table, with room for the limits' requests."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        table = reservation.fields["block_table"]
        self._most = reservation.limits.max_num_reqs
        self._shape = tuple(table.shape)
        self._ints = table.new_zeros(self._most + table.numel())

    def prepare(self, metadata: Metadata) -> None:
        """Copy the table, then the lengths, which overrun it where there are more."""
        super().prepare(metadata)
        if metadata.is_full:
            reqs = metadata.num_reqs
            self._table[:reqs] = metadata.fields["block_table"]
            self._ints[:reqs] = metadata.fields["seq_lens"]

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend over the copied table, in a graph."""
        if metadata.is_full:
            metadata = with_field(metadata, "block_table", self._table[: metadata.num_reqs])
        super().attend(layer, query, out, scoring, metadata)

    @property
    def _table(self) -> torch.Tensor:
        return self._ints[self._most :].view(self._shape)


class OneTileOfRequests(ReferenceExecutor):
    """Its graphs launch one tile of requests; the others read the table of the last request in it."""

    tile = TILE

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend with the rows of the table that the tile has."""
        if metadata.is_full:
            table = metadata.fields["block_table"]
            rows = torch.arange(len(table), device=table.device).clamp(max=self.tile - 1)
            metadata = with_field(metadata, "block_table", table.index_select(0, rows))
        super().attend(layer, query, out, scoring, metadata)


class OneTileOfManyRequests(OneTileOfRequests):
    """Its tile is larger."""

    tile = 32


class SecondSplitLost(ReferenceExecutor):
    """Its graphs split keys, and leave out what the second split has found."""

    split = SPLIT

    def _attend_padded(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        self._is_split = True
        super()._attend_padded(layer, query, out, scoring, metadata)
        self._is_split = False

    _is_split = False

    def _visible(self, keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        visible = super()._visible(keys, positions, lengths)
        return visible & (keys < self.split) if self._is_split else visible


class LateSplitLost(SecondSplitLost):
    """Its splits are longer."""

    split = 256


class DeclaresSizes(RenamedReference):
    """Says where its kernels change."""

    kernel_sizes = KernelSizes(num_reqs=(OneTileOfManyRequests.tile,), num_keys=(LateSplitLost.split,))


class EightBitPages(ReferenceExecutor):
    """Packs the page numbers of a graph into eight bits."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend over the unpacked numbers."""
        if metadata.is_full:
            metadata = with_field(metadata, "block_table", metadata.fields["block_table"] % PAGE_NUMBERS)
        super().attend(layer, query, out, scoring, metadata)


class PagesSideBySide(ReferenceExecutor):
    """Takes each page for the neighbour of the one before it, and steps by as much as a page has."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._caches = {
            layer: attrs.evolve(cache, keys=_side_by_side(cache.keys), values=_side_by_side(cache.values))
            for layer, cache in self._caches.items()
        }


def _side_by_side(cache: torch.Tensor) -> torch.Tensor:
    strides = torch.empty(cache.shape, device="meta").stride()
    return cache.as_strided(cache.shape, strides, cache.storage_offset())


class OffsetsIn32Bits(ReferenceExecutor):
    """Works out where a page begins in 32 bits; what is out of bounds then wraps around, so that nothing crashes."""

    def _weigh(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, visible: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys = self._caches[layer].keys
        offsets = (pages.long() * keys.stride(0)).int()
        return super()._weigh(layer, query, offsets.long() // keys.stride(0) % len(keys), visible, scoring)


E = BugClass.E
WIDE_MUTANTS = (
    Mutant(
        name="pages-side-by-side",
        threads=(),
        bug_class=E,
        says="Pages are found by as many elements as a page has, whatever the stride of the cache is",
        backend=lambda: RenamedReference(PagesSideBySide),
    ),
    Mutant(
        name="page-offsets-wrap-around",
        threads=("tokenspeed#748", "vllm#47671"),
        bug_class=E,
        says="The offset of a page is worked out in 32 bits, and wraps in a large cache",
        backend=lambda: RenamedReference(OffsetsIn32Bits),
    ),
    Mutant(
        name="sized-by-the-limits",
        threads=("vllm#50065",),
        bug_class=E,
        says="A buffer has room for max_num_reqs requests, and a graph that is padded to more overruns it",
        backend=lambda: RenamedReference(LimitsAsCapacity),
    ),
    Mutant(
        name="one-tile-of-requests",
        threads=(),
        bug_class=E,
        says="A graph launches a tile of 16 requests, whatever the number of its requests",
        backend=lambda: RenamedReference(OneTileOfRequests),
    ),
    Mutant(
        name="second-split-lost",
        threads=(),
        bug_class=E,
        says="In a graph keys are split at 64, and what the second split has found is not merged",
        backend=lambda: RenamedReference(SecondSplitLost),
    ),
    Mutant(
        name="pages-in-eight-bits",
        threads=(),
        bug_class=E,
        says="A graph packs page numbers into eight bits, so that page 256 is page 0",
        backend=lambda: RenamedReference(EightBitPages),
    ),
    Mutant(
        name="one-tile-of-many-requests",
        threads=(),
        bug_class=E,
        says="A graph launches a tile of 32 requests, which its backend declares, whatever the number of its requests",
        backend=lambda: DeclaresSizes(OneTileOfManyRequests),
    ),
    Mutant(
        name="late-split-lost",
        threads=(),
        bug_class=E,
        says="In a graph keys are split at 256, which its backend declares, and the second split is not merged",
        backend=lambda: DeclaresSizes(LateSplitLost),
    ),
)
