"""Paged attention in plain torch, twice: from tensors for a graph, from host values for an eager step.

The two share only the mask (``_visible``) and the weighted mean (``_weigh``). This module is also an
example of ``capture_planner.plugins.backend.Executor`` for authors of backends.
"""

from __future__ import annotations

import torch

from capture_planner.errors import BackendError, RunError
from capture_planner.plugins.backend import Metadata, Reservation, Scoring
from capture_planner.records.model import DataType

_QUERY_START_LOC, _SEQ_LENS, _BLOCK_TABLE = _FIELDS = ("query_start_loc", "seq_lens", "block_table")
_ELEMENTS = 1 << 24
"""Most elements of one intermediate, unless a single row has more: rows are processed in blocks."""


class ReferenceExecutor:
    """The executor of one group of one role.

    Scores and sums are float64 where queries are, else float32. The sliding window counts the
    query's own token, as in vLLM: ``position - window < key <= position``; where attention is not
    causal it reaches as far to the other side.
    """

    def __init__(self, reservation: Reservation) -> None:
        """Keep the caches.

        Raises ``BackendError`` for latent attention, an NVFP4 cache, and caches of another shape than the group's.
        """
        _check_supported(reservation)
        self._attention = reservation.attention
        self._page_size = reservation.page_size
        self._ranks, self._rank = reservation.attention.decode_context, reservation.context_rank
        self._group = f"{reservation.role.value}, group {reservation.group}"
        self._caches = dict(reservation.caches)

    def prepare(self, metadata: Metadata) -> None:
        """Check the extents of the step; there is no host work to do.

        Raises ``RunError`` if a field has the wrong shape. The runner's guards check that no buffer was
        replaced.
        """
        self._check_extents(metadata)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        """Write the attention of ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``.

        Rows that no request owns, and rows that see no key, become exact zeros.
        """
        self._check_shapes(layer, query, out, metadata)
        self._attend(layer, query, out, scoring, metadata)

    def attend_part(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        scoring: Scoring,
        metadata: Metadata,
    ) -> None:
        """Write the attention to this rank's keys to ``out``, and the logarithms of its sums of weights to ``sums``."""
        self._check_shapes(layer, query, out, metadata)
        both = sums.new_empty(*query.shape[:2], query.shape[2] + 1)
        self._attend(layer, query, both, scoring, metadata)
        out.copy_(both[..., :-1])
        sums.copy_(both[..., -1])

    def layout(self) -> tuple[int, ...] | None:
        """Return None: a graph bakes in no number of a step."""
        return None

    def release(self) -> None:
        """Drop the caches."""
        self._caches.clear()

    def _check_shapes(self, layer: int, query: torch.Tensor, out: torch.Tensor, metadata: Metadata) -> None:
        expected = (metadata.num_tokens, self._attention.num_heads * self._ranks, self._attention.head_dim)
        for name, tensor in (("query", query), ("out", out)):
            if tensor.shape != expected:
                raise RunError(
                    f"{self._group}, layer {layer}: {name} is {list(tensor.shape)}, expected "
                    f"{list(expected)}; cut it to the extents of the metadata"
                )

    def _attend(self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata) -> None:
        if metadata.is_full:
            self._attend_padded(layer, query, out, scoring, metadata)
        else:
            self._attend_real(layer, query, out, scoring, metadata)

    def _attend_padded(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        """Attend at static shapes: each row over the whole block table."""
        starts, lengths, table = (metadata.fields[name] for name in _FIELDS)
        num_tokens, num_reqs = len(query), len(table)
        entry = metadata.entry
        query_len = 1 if entry is None or entry.query_len is None else entry.query_len
        if entry is not None and entry.query_len is not None and num_reqs * query_len == num_tokens:
            # A row without queries is padding, even if another group's backend pads with a length above 0.
            lengths = lengths.masked_fill(starts.diff() <= 0, 0)
            positions = lengths[:, None] - query_len + torch.arange(query_len, device=query.device)
        else:
            # Requests of different query lengths: each token becomes a row.
            query_len, ends = 1, starts[1:]
            tokens = torch.arange(num_tokens, device=query.device, dtype=ends.dtype)
            # Rows of no request count as the last one's, with a length of 0.
            owners = torch.searchsorted(ends, tokens, right=True).clamp(max=num_reqs - 1)
            lengths, table = lengths.index_select(0, owners), table.index_select(0, owners)
            positions = (lengths + tokens - ends.index_select(0, owners))[:, None]
            lengths = lengths.masked_fill(tokens >= ends[-1], 0)
        keys = self._positions(table.shape[1], query.device)
        rows, out_rows = (tensor.view(-1, query_len, *tensor.shape[1:]) for tensor in (query, out))
        heads = self._attention
        widest = max(heads.num_kv_heads * heads.head_dim, query.shape[1] * query_len)
        for block in _blocks(len(rows), len(keys) * widest):
            visible = self._visible(keys, positions[block], lengths[block])
            out_rows[block] = self._weigh(layer, rows[block], table[block], visible, scoring)

    def _attend_real(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        """Attend request by request, each over its own pages."""
        starts, lengths = (metadata.host[name].tolist() for name in (_QUERY_START_LOC, _SEQ_LENS))
        table = metadata.fields[_BLOCK_TABLE]
        out[starts[metadata.num_reqs] :] = 0
        for request in range(metadata.num_reqs):
            start, end, length = starts[request], starts[request + 1], lengths[request]
            pages = table[request : request + 1, : self._pages(length)]
            keys = self._positions(pages.shape[1], query.device)
            positions = torch.arange(length - (end - start), length, device=query.device)[None]
            total = torch.full((1,), length, device=query.device)
            for block in _blocks(end - start, length * query.shape[1]):
                rows = slice(start + block.start, start + block.stop)
                visible = self._visible(keys, positions[:, block], total)
                out[rows] = self._weigh(layer, query[None, rows], pages, visible, scoring)[0]

    def _pages(self, tokens: int) -> int:
        """Return the pages that so many tokens of a request take; ranks that share its KV have a part of each."""
        return -(-tokens // (self._page_size * self._ranks))

    def _positions(self, pages: int, device: torch.device) -> torch.Tensor:
        """Return the position in the sequence of each key of so many pages, ``int64[S]``."""
        # Ranks share a sequence token by token: key i of a rank is at position i * ranks + rank.
        keys = torch.arange(pages * self._page_size, device=device)
        return keys if self._ranks == 1 else keys * self._ranks + self._rank

    def _visible(self, keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return ``bool[N, q, S]``: which keys the queries see.

        ``keys int64[S]`` and ``positions int[N, q]`` are positions in the sequence, of ``lengths int[N]``.
        """
        positions = positions[..., None]
        visible = keys < lengths[:, None, None]
        if self._attention.causal:
            visible = visible & (keys <= positions)
        if self._attention.window is not None:
            visible = visible & (keys > positions - self._attention.window)
            if not self._attention.causal:
                visible = visible & (keys < positions + self._attention.window)
        return visible

    def _weigh(
        self, layer: int, query: torch.Tensor, pages: torch.Tensor, visible: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Return ``[N, q, heads, dim]``: the weighted values of ``pages int32[N, W]`` for each query.

        ``visible bool[N, q, W * page_size]`` masks the keys; masked NaN does not reach the result. Where
        ranks share the KV, ``dim`` is one more: the last is the logarithm of the sum of a head's weights.
        """
        cache = self._caches[layer]
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        keys, values = (
            _pages_of(tensor, pages.flatten()).view(len(pages), -1, *tensor.shape[2:]).to(dtype)
            for tensor in (cache.keys, cache.values)
        )
        # Query heads that share a key head are rows of one matrix, so that no key is repeated.
        num_reqs, length, kv_heads = len(query), query.shape[1], keys.shape[2]
        grouped = query.to(dtype).view(num_reqs, length, kv_heads, -1, query.shape[3]).transpose(1, 2)
        products = grouped.flatten(2, 3) @ keys.permute(0, 2, 3, 1)
        scores = products.view(num_reqs, kv_heads, length, -1, keys.shape[1]) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        scores = scores.masked_fill(~visible[:, None, :, None], -torch.inf)
        # Where nothing is visible the top is -inf, and -inf - -inf would be NaN.
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        if scoring.sinks is not None:
            # One that outweighs all keys by more than dtype holds is inf here, and the mean 0.
            total = total + (scoring.sinks.view(kv_heads, 1, -1, 1) - top).exp()
        # A weight of 0 does not keep NaN out. Pages before a window may be freed, so that what is
        # masked is what no query of the row sees, not only what lies beyond the sequence.
        values = values.masked_fill(~visible.any(1)[..., None, None], 0)
        # Rows that see no key have a sum of 0: the clamp makes them zeros, not NaN.
        sums = (weights.flatten(2, 3) @ values.transpose(1, 2)).view(*weights.shape[:4], -1)
        mean = sums / total.clamp(min=torch.finfo(dtype).tiny)
        if self._ranks > 1:
            mean = torch.cat([mean, top + total.log()], dim=-1)
        return mean.transpose(1, 2).flatten(2, 3)

    def _check_extents(self, metadata: Metadata) -> None:
        shape = {name: tuple(metadata.fields[name].shape) for name in _FIELDS}
        pages = self._pages(metadata.max_seq_len)
        expected = {
            _QUERY_START_LOC: (metadata.num_reqs + 1,),
            _SEQ_LENS: (metadata.num_reqs,),
            # A table may be wider than the step needs.
            _BLOCK_TABLE: (metadata.num_reqs, max(pages, *shape[_BLOCK_TABLE][1:])),
        }
        for name in _FIELDS:
            if shape[name] != expected[name]:
                raise RunError(
                    f"{self._group}: {name} is {list(shape[name])}, expected {list(expected[name])} for "
                    f"{metadata.num_reqs} requests of at most {metadata.max_seq_len} tokens in pages of "
                    f"{self._page_size}; cut the fields to the extents of the metadata"
                )
        if metadata.is_full:
            return
        starts, lengths = (metadata.host[name].tolist() for name in (_QUERY_START_LOC, _SEQ_LENS))
        for request in range(metadata.num_reqs):
            query_len = starts[request + 1] - starts[request]
            if not 0 <= query_len <= lengths[request]:
                raise RunError(
                    f"{self._group}, request {request}: a query of {query_len} tokens in a sequence of "
                    f"{lengths[request]}; seq_lens counts the tokens of the query too"
                )


def _pages_of(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return ``cache[pages]``; of eight-bit floats as integers, since not every operator takes such floats."""
    same = cache.view(torch.uint8) if cache.itemsize == 1 else cache
    return same.index_select(0, pages).view(cache.dtype)


def _blocks(rows: int, elements: int) -> list[slice]:
    """Split ``rows``, of ``elements`` elements each, into blocks of at most ``_ELEMENTS``."""
    step = max(1, _ELEMENTS // max(elements, 1))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _check_supported(reservation: Reservation) -> None:
    attention, where = reservation.attention, f"{reservation.role.value}, group {reservation.group}"
    unsupported = {
        "latent attention": attention.latent is not None,
        "an NVFP4 cache": attention.kv_dtype is DataType.NVFP4,
    }
    for feature, required in unsupported.items():
        if required:
            raise BackendError(
                f"reference: {where}: it does not run {feature}; it runs ordinary heads (MHA, MQA, GQA) of "
                "one width for keys and values; name another backend for this group"
            )
    expected = (reservation.page_size, attention.num_kv_heads, attention.head_dim)
    for layer, cache in reservation.caches.items():
        for kind, tensor in (("keys", cache.keys), ("values", cache.values)):
            if tensor.ndim != 4 or tensor.shape[1:] != expected:
                raise BackendError(
                    f"reference: {where}, layer {layer}: {kind} are {list(tensor.shape)}, expected "
                    f"[num_pages, {', '.join(map(str, expected))}]"
                )
