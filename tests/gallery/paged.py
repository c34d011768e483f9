"""A healthy backend that plans on the host and splits long sequences, as FlashInfer's wrappers do.

Before every step the host cuts the batch into work items: a tile of a request's queries with a part of
its pages. A graph launches as many items as its extents may ever need; those without work are masked.
Each item leaves a partial result in the workspace, and the partial results of a row are merged. So there
is a plan, page lists, pinned staging, a reused workspace and a merge: all that such backends get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.errors import BackendError
from capture_planner.modes import GraphSupport, Refresh, Role
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner.records.backend import (
    Attention,
    Axis,
    Bound,
    Fill,
    Lifetime,
    MetadataField,
    PaddingContract,
    Support,
    Where,
    Workspace,
)
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.model import DataType
from capture_planner.records.spec import Limits

Array = np.ndarray[Any, Any]

SPLITS = 3
"""Most parts of one sequence: a fixed bound, so that a grid follows from a graph's extents alone."""

TILE = 2
"""Tokens of a query tile; 1 where every request has one token."""

FIELDS = (
    MetadataField(name="paged_kv_indptr", axis=Axis.REQUEST_PLUS_ONE, fill=Fill.REPEAT_LAST, where=Where.BOTH),
    MetadataField(name="paged_kv_indices", axis=Axis.PAGE, fill=Fill.CONSTANT, value=0, indexes=Bound.PAGES),
    MetadataField(name="paged_kv_last_page_len", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, where=Where.BOTH),
    MetadataField(
        name="qo_indptr", axis=Axis.REQUEST_PLUS_ONE, fill=Fill.REAL_TOTAL, indexes=Bound.TOKENS, where=Where.BOTH
    ),
    *(
        MetadataField(name=name, axis=Axis.SCALAR, fill=Fill.WORST_CASE, lifetime=Lifetime.FROZEN, where=Where.HOST)
        for name in ("max_query_len", "max_seq_len")
    ),
)


@attrs.frozen
class Grid:
    """What a launch is sized by: it follows from a graph's extents, whatever batch is in them."""

    tokens: int
    reqs: int
    tile: int

    @property
    def items(self) -> int:
        """Work items that are launched."""
        return (-(-self.tokens // self.tile) + self.reqs) * SPLITS

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each vector of ``Work``, in its order."""
        return (self.items, self.items, self.items, self.items, 1, self.tokens + 1)


@attrs.frozen(kw_only=True)
class Work:
    """A plan: one element an item in the first four, all ``int32``."""

    request: Any
    first: Any
    """The first token of the item's query tile, counted over the batch."""
    column: Any
    """Which part of the sequence."""
    valid: Any
    """1, and 0 of what is launched without work."""
    chunk: Any
    """Pages of a part, ``[1]``."""
    merge: Any
    """Where the partial results of each token begin, ``[tokens + 1]``."""

    @property
    def vectors(self) -> tuple[Any, ...]:
        """All of them, in the order in which they are staged."""
        return self.request, self.first, self.column, self.valid, self.chunk, self.merge


@attrs.frozen
class Sizes:
    """How the workspace is cut up: the plan, then the partial results; in elements."""

    ints: int
    rows: int
    """Partial results: for every token, one per part, and one that is never read."""

    @classmethod
    def of(cls, entries: Sequence[Entry], limits: Limits) -> Sizes:
        """Size for the largest padded extents, and for any batch that the limits admit."""
        tokens = max(limits.max_num_tokens, *(entry.num_tokens for entry in entries), 0)
        reqs = max(limits.max_num_reqs, *(entry.num_reqs or 0 for entry in entries), 0)
        ints = sum(Grid(tokens, reqs, 1).lengths)
        return cls(ints=-(-ints // 4) * 4, rows=tokens * SPLITS + 1)


class PagedBackend:
    """Work items planned on the host; ``executor`` is what runs them."""

    name = "paged"

    def __init__(self, executor: type[PagedExecutor] | None = None) -> None:
        self._executor = executor or PagedExecutor

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """ALWAYS: tiles of queries take requests of any length."""
        return Support(level=GraphSupport.ALWAYS, reason="Its work items hold any batch.")

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Page lists and query offsets, on both sides; the longest query and sequence are baked in."""
        return PaddingContract(fields=FIELDS)

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """On the host: it plans there."""
        return Refresh.HOST

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """A plan, on both sides, and partial results."""
        sizes = Sizes.of(entries, limits)
        partial = model.num_heads * (model.head_dim + 1) * (8 if model.dtype is DataType.FLOAT64 else 4)
        return Workspace(
            device=4 * sizes.ints + sizes.rows * partial,
            pinned=4 * sizes.ints,
            formula=f"4 * {sizes.ints} of plan, {sizes.rows} partial results of {partial}",
        )

    def reserve(self, reservation: Reservation) -> PagedExecutor:
        """Make the executor of one group; raises ``BackendError`` where the workspace is too small."""
        return self._executor(reservation)


class PagedExecutor:
    """Exact attention for one group of one role."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.sizes = Sizes.of(reservation.entries, reservation.limits)
        self.dtype = torch.float64 if reservation.attention.dtype is DataType.FLOAT64 else torch.float32
        self.staging = reservation.pinned.view(torch.int32)
        self.ints = reservation.workspace[: 4 * self.sizes.ints].view(torch.int32)
        self.grid = Grid(0, 0, 1)
        self._fence = torch.cuda.Event() if reservation.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def prepare(self, metadata: Metadata) -> None:
        """Plan the step, and copy the plan over."""
        self.grid = self.grid_of(metadata)
        self.stage(self.plan(metadata))

    def layout(self) -> tuple[int, ...] | None:
        """Return the grid, the tile and the parts: what a launch bakes in."""
        return self.grid.items, self.grid.tile, SPLITS

    def release(self) -> None:
        """Nothing is held that is not the runner's."""

    # On the host.

    def grid_of(self, metadata: Metadata) -> Grid:
        """Return the grid of a step's extents."""
        return Grid(metadata.num_tokens, metadata.num_reqs, 1 if metadata.max_query_len == 1 else TILE)

    def plan(self, metadata: Metadata) -> Work:
        """Cut the batch into work items; a row without queries or without keys has none."""
        starts, pages = metadata.host["qo_indptr"], np.diff(metadata.host["paged_kv_indptr"])
        queries = np.diff(starts)
        lengths = self.lengths(pages, metadata.host["paged_kv_last_page_len"])
        seen = pages - self.skipped(lengths, queries)
        chunk = max(1, -(-int(seen.max(initial=0)) // SPLITS))
        columns = -(-seen // chunk)
        number = columns * -(-queries // self.grid.tile)
        request = np.repeat(np.arange(len(queries)), number)
        inner = np.arange(len(request)) - np.repeat(np.cumsum(number) - number, number)
        merge = np.cumsum([0, *np.repeat(columns, queries)])
        return Work(
            request=request,
            first=starts[request] + inner // columns[request] * self.grid.tile,
            column=inner % columns[request],
            valid=np.ones(len(request)),
            chunk=np.array([chunk]),
            merge=np.concatenate((merge, np.full(self.grid.tokens + 1 - len(merge), merge[-1]))),
        )

    def stage(self, work: Work) -> None:
        """Write the plan into pinned memory, zeroes behind it, and copy it over."""
        if self._fence is not None:
            self._fence.synchronize()
        for part, values in zip(self.cut(self.staging).vectors, work.vectors, strict=True):
            part[: len(values)] = torch.from_numpy(values)
            part[len(values) :] = 0
        self.ints.copy_(self.staging, non_blocking=True)
        if self._fence is not None:
            self._fence.record()

    def cut(self, ints: torch.Tensor) -> Work:
        """Return the vectors of a plan in ``int32[sizes.ints]``, for the grid of this step."""
        lengths = self.grid.lengths
        return Work(**dict(zip(_VECTORS, torch.split(ints[: sum(lengths)], list(lengths)), strict=True)))

    def lengths(self, pages: Any, last: Any) -> Any:
        """Return the tokens of each sequence; 0 of one without pages, whatever its last page says."""
        return (pages > 0) * ((pages - 1) * self.reservation.page_size + last)

    def skipped(self, lengths: Any, queries: Any) -> Any:
        """Return the pages of each sequence that lie before the window of its first query."""
        window = self.reservation.attention.window
        if window is None:
            return 0 * lengths
        return (lengths - queries + 1 - window).clip(0) // self.reservation.page_size

    # On the device.

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Run all items and merge; rows that no request owns become zero.

        Raises ``BackendError`` for sinks and for a softcap.
        """
        if scoring.sinks is not None or scoring.softcap is not None:
            raise BackendError("paged: it has no sinks and no softcap; name another backend")
        work, partials = self.cut(self.ints), self.partials(len(query))
        inputs, step = self.inputs(work, metadata)
        self.run(layer, query, inputs, partials, scoring, step)
        out.copy_(self.merged(work.merge, *partials))

    def partials(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[tokens * SPLITS + 1, heads, dim]`` and their log-sums ``[..., heads]``; raises
        ``BackendError`` where the workspace has no room for them.
        """
        attention = self.reservation.attention
        rows, heads, dim = tokens * SPLITS + 1, attention.num_heads, attention.head_dim
        floats = self.reservation.workspace[4 * self.sizes.ints :]
        need = rows * heads * (dim + 1) * self.dtype.itemsize
        if need > floats.numel():
            raise BackendError(
                f"paged: {tokens} tokens need {need} bytes of workspace for partial results, and there are "
                f"{floats.numel()}"
            )
        values, sums = torch.split(floats[:need].view(self.dtype), [rows * heads * dim, rows * heads])
        return values.view(rows, heads, dim), sums.view(rows, heads)

    def valid(self, work: Work) -> torch.Tensor:
        """Return ``bool[items]``: which of the launched items have work."""
        return torch.ne(work.valid, 0)

    def inputs(self, work: Work, metadata: Metadata) -> tuple[Work, Metadata]:
        """Return the plan and the metadata that ``run`` reads: these."""
        return work, metadata

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        work: Work,
        partials: tuple[torch.Tensor, torch.Tensor],
        scoring: Scoring,
        metadata: Metadata,
    ) -> None:
        """Write the partial result of each item's tokens."""
        values, sums = partials
        size, grid = self.reservation.page_size, self.grid
        starts, ends = self.ends(metadata, work.request, "qo_indptr")
        begin, end = self.ends(metadata, work.request, "paged_kv_indptr")
        pages, last = end - begin, metadata.fields["paged_kv_last_page_len"].index_select(0, work.request)
        length = self.lengths(pages, last)
        tokens = work.first[:, None] + _range(grid.tile, query)
        real = self.valid(work)[:, None] & (tokens < ends[:, None])
        position = (length - ends)[:, None] + tokens
        number = _range(self.width(metadata), query)
        page = (self.skipped(length, ends - starts) + work.column * work.chunk)[:, None] + number
        held = (number < work.chunk) & (page < pages[:, None])
        listed = metadata.fields["paged_kv_indices"]
        at = torch.where(held, begin[:, None] + page, 0)
        numbers = torch.where(held, listed.index_select(0, at.flatten()).view_as(at), 0)
        keys = (page[:, :, None] * size + _range(size, query)).flatten(1)
        seen = (keys < length[:, None])[:, None] & (keys[:, None] <= position[:, :, None])
        seen = seen & held.repeat_interleave(size, 1)[:, None] & real[:, :, None]
        if (window := self.reservation.attention.window) is not None:
            seen = seen & (keys[:, None] > position[:, :, None] - window)
        seen = self.masked(seen, tokens, keys)
        rows = torch.where(real, tokens, 0)
        value, total = self.weighed(layer, query, rows, numbers, seen, scoring)
        to = torch.where(real, work.merge.index_select(0, rows.flatten()).view_as(rows) + work.column[:, None], -1)
        to = torch.where(to < 0, len(values) - 1, to).flatten().long()
        values.index_copy_(0, to, value.flatten(0, 1))
        sums.index_copy_(0, to, total.flatten(0, 1))

    def ends(self, metadata: Metadata, request: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each item's request begins and ends in an offset field, ``int32[items]`` each."""
        offsets = metadata.fields[name]
        return offsets.index_select(0, request), offsets.index_select(0, request + 1)

    def width(self, metadata: Metadata) -> int:
        """Return the most pages of a part, at the longest sequence that there may be."""
        size, window = self.reservation.page_size, self.reservation.attention.window
        pages = -(-metadata.max_seq_len // size)
        if window is not None:
            pages = min(pages, (window + metadata.max_query_len) // size + 2)
        return max(1, -(-pages // SPLITS))

    def masked(self, seen: torch.Tensor, tokens: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return ``seen bool[items, tile, keys]`` less what a mask of the step takes away: nothing."""
        return seen

    def weighed(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        pages: torch.Tensor,
        seen: torch.Tensor,
        scoring: Scoring,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean over what is seen, ``[items, tile, heads, dim]``, and log-sums of the weights.

        The log-sum of a row that sees nothing is -inf, and its mean 0.
        """
        cache = self.reservation.caches[layer]
        keys, values = (
            tensor.index_select(0, pages.flatten()).view(len(pages), -1, *tensor.shape[2:]).to(self.dtype)
            for tensor in (cache.keys, cache.values)
        )
        asked = query.index_select(0, rows.flatten()).to(self.dtype)
        asked = asked.view(*rows.shape, keys.shape[2], -1, query.shape[2])
        scores = torch.einsum("nqhgd,nshd->nqhgs", asked, keys) * scoring.scale
        scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(self.dtype).min)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        values = values.masked_fill(~seen.any(1)[..., None, None], 0)
        mean = torch.einsum("nqhgs,nshd->nqhgd", weights, values) / total.clamp(min=torch.finfo(self.dtype).tiny)
        return mean.flatten(2, 3), (top + total.log()).flatten(2, 4)

    def merged(self, merge: torch.Tensor, values: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Return ``[tokens, heads, dim]``: the partial results of each token, weighed by their sums."""
        at = merge[:-1, None] + _range(SPLITS, merge)
        held = at < merge[1:, None]
        at = torch.where(held, at, 0)
        return self.weighed_sum(values, sums, at, held)

    @staticmethod
    def weighed_sum(values: torch.Tensor, sums: torch.Tensor, at: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """Return the merge of the partial results ``at int[tokens, SPLITS]``, of those that are held."""
        parts = values.index_select(0, at.flatten()).view(*at.shape, *values.shape[1:])
        weights = sums.index_select(0, at.flatten()).view(*at.shape, sums.shape[1])
        weights = weights.masked_fill(~held[..., None], -torch.inf)
        weights = (weights - weights.amax(1, keepdim=True).clamp(min=torch.finfo(sums.dtype).min)).exp()
        total = weights.sum(1).clamp(min=torch.finfo(sums.dtype).tiny)
        parts = parts.masked_fill(~held[..., None, None], 0)
        return (weights[..., None] * parts).sum(1) / total[..., None]


_VECTORS = tuple(field.name for field in attrs.fields(Work))


def _range(length: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(length, device=like.device, dtype=torch.int32)


__all__ = ["FIELDS", "SPLITS", "TILE", "Grid", "PagedBackend", "PagedExecutor", "Sizes", "Work"]
