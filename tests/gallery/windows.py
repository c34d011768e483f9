"""Mutants of class F and R: graphs that take windows, shared pages and extents for what they are not."""

from __future__ import annotations

import torch

from capture_planner.analysis.lint.core import BugClass
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner_reference.executor import ReferenceExecutor
from gallery.core import Mutant, with_field
from gallery.padding import RenamedReference


class WindowOfTheLastQuery(ReferenceExecutor):
    """In a graph all queries of a request begin at the page that the window of its last one begins in."""

    _is_full = False

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend, and tell the mask of it."""
        self._is_full = metadata.is_full
        super().attend(layer, query, out, scoring, metadata)

    def _visible(self, keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        visible, window = super()._visible(keys, positions, lengths), self._attention.window
        if not self._is_full or window is None:
            return visible
        first = (lengths - window).clamp(min=0) // self._page_size * self._page_size
        return visible & (keys >= first[:, None, None])


class PrefixOfTheFirstTwo(ReferenceExecutor):
    """In a graph all requests have the first page of the first, if the first two share theirs."""

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend over a table whose first column is one page."""
        table = metadata.fields["block_table"]
        if metadata.is_full and len(table) > 1:
            first = torch.where(table[0, 0] == table[1, 0], table[0, 0], table[:, 0])
            metadata = with_field(metadata, "block_table", torch.cat([first[:, None], table[:, 1:]], dim=1))
        super().attend(layer, query, out, scoring, metadata)


class TableKeptByExtents(ReferenceExecutor):
    """Copies the table of a graph under its tokens and requests; another of the same extents takes its place."""

    def __init__(self, reservation: Reservation) -> None:
        super().__init__(reservation)
        self._tables: dict[tuple[int, int], torch.Tensor] = {}

    def prepare(self, metadata: Metadata) -> None:
        """Make the copy when a graph is made, and bring it up to date before a replay."""
        super().prepare(metadata)
        if metadata.is_full:
            key, table = (metadata.num_tokens, metadata.num_reqs), metadata.fields["block_table"]
            if metadata.for_capture:
                self._tables[key] = table.clone()
            self._tables[key].copy_(table)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Attend over the copy, in a graph."""
        if metadata.is_full:
            metadata = with_field(metadata, "block_table", self._tables[metadata.num_tokens, metadata.num_reqs])
        super().attend(layer, query, out, scoring, metadata)


class OwnKeyOfShortQueriesLost(ReferenceExecutor):
    """In a graph of any batch, requests of one token take the kernel of decodes, which drops a key of a first page."""

    def _attend_padded(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        entry = metadata.entry
        if entry is not None and entry.query_len is None:
            starts, lengths = metadata.fields["query_start_loc"], metadata.fields["seq_lens"]
            short = (starts.diff() == 1) & (lengths > 1) & (lengths <= self._page_size)
            metadata = with_field(metadata, "seq_lens", lengths - short.to(lengths.dtype))
        super()._attend_padded(layer, query, out, scoring, metadata)


F, R = BugClass.F, BugClass.R
WINDOW_MUTANTS = (
    Mutant(
        name="window-of-the-last-query",
        threads=(),
        bug_class=F,
        says="In a graph the pages before the window of a request's last query are skipped for all of its queries",
        backend=lambda: RenamedReference(WindowOfTheLastQuery),
    ),
    Mutant(
        name="prefix-of-the-first-two",
        threads=(),
        bug_class=F,
        says="In a graph a prefix that the first two requests share is taken for one of all",
        backend=lambda: RenamedReference(PrefixOfTheFirstTwo),
    ),
    Mutant(
        name="table-kept-by-extents",
        threads=(),
        bug_class=R,
        says="A graph's table is kept under its tokens and requests, and another graph of the same extents replaces it",
        backend=lambda: RenamedReference(TableKeptByExtents),
    ),
    Mutant(
        name="own-key-of-short-queries-lost",
        threads=(),
        bug_class=F,
        says="In a graph of any batch a request of one token misses a key, while it has one page",
        backend=lambda: RenamedReference(OwnKeyOfShortQueriesLost),
    ),
)
