"""Paged attention as one kernel over tiles of queries, and one that merges what split keys gave.

A tile's rows are query tokens times the query heads of one KV head, so that a decode of one token is
a product of 16 rows or more on tensor cores. Everything that differs from step to step is read on the
device: which request a tile belongs to, how long it is, where its keys are. The grid is that of the
padded extents, so that a graph holds any batch.

This module alone imports Triton. For tests on a CPU, ``TRITON_INTERPRET=1`` must be in the environment
when it is imported.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from capture_planner.errors import BackendError, RunError
from capture_planner.runtime.executor import Metadata, Reservation, Scoring
from capture_planner_triton.backend import of_entry, refusal
from capture_planner_triton.geometry import Geometry, geometry, partial_bytes

_LOG2E = tl.constexpr(1.4426950408889634)
"""Weights are powers of two: the hardware has no other exponential."""


class TritonExecutor:
    """Attention of one group of one role. A step has no host work, and a graph bakes in no number of it.

    The sliding window counts the query's own token, as in vLLM: ``position - window < key <= position``;
    where attention is not causal it reaches as far to the other side. Scores and sums are float32.
    """

    def __init__(self, reservation: Reservation) -> None:
        """Keep the caches and the workspace; allocate nothing.

        Raises ``BackendError`` for what the kernel does not compute, for a device that it was not
        compiled for, for a workspace smaller than the plan's, and for caches of another shape or dtype.
        """
        self._attention = reservation.attention
        self._page_size = reservation.page_size
        self._multiprocessors = reservation.environment.device.multiprocessors or 1
        self._caches = dict(reservation.caches)
        self._group = f"{reservation.role.value}, group {reservation.group}"
        self._refuse(reservation)
        self._workspace = reservation.workspace[: reservation.workspace.numel() // 4 * 4].view(torch.float32)

    def prepare(self, metadata: Metadata) -> None:
        """Nothing: all that a step needs is read on the device."""

    def attend(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, scoring: Scoring, metadata: Metadata
    ) -> None:
        """Write the attention of ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``.

        Rows that no request owns, and rows that see no key, become exact zeros. Raises ``RunError``
        where a tensor has another shape or dtype than the metadata and the caches say.
        """
        self._check(layer, query, out, metadata)
        if not metadata.num_tokens or not metadata.num_reqs:
            out.zero_()
            return
        cut = self._geometry(metadata)
        model, cache = self._attention, self._caches[layer]
        starts, lengths, table = (
            metadata.fields[name] for name in ("query_start_loc", "seq_lens", "block_table")
        )
        heads, kv_heads = model.num_heads, model.num_kv_heads
        partial = self._workspace[: partial_bytes(model, metadata.num_tokens, cut.splits) // 4]
        sums = partial[metadata.num_tokens * heads * cut.splits * model.head_dim :]
        _attend[(cut.blocks, kv_heads, cut.splits)](
            query,
            cache.keys,
            cache.values,
            out,
            partial,
            sums,
            starts,
            lengths,
            table,
            scoring.sinks,
            scoring.scale,
            scoring.softcap or 1.0,
            metadata.num_reqs,
            metadata.num_tokens,
            cut.blocks_each or 1,
            cut.splits,
            table.stride(0),
            *query.stride(),
            *cache.keys.stride(),
            *cache.values.stride(),
            *out.stride(),
            group=heads // kv_heads,
            head_dim=model.head_dim,
            width=cut.width,
            page_size=self._page_size,
            rows=cut.rows,
            queries=cut.queries,
            tile=cut.keys,
            window=model.window,
            causal=model.causal,
            softcapped=scoring.softcap is not None,
            uniform=cut.blocks_each is not None,
            split=cut.splits > 1,
            num_warps=cut.warps,
            num_stages=cut.stages,
            enable_fp_fusion=True,
        )
        if cut.splits > 1:
            _merge[(metadata.num_tokens, heads)](
                partial,
                sums,
                out,
                starts,
                metadata.num_reqs,
                cut.splits,
                *out.stride(),
                head_dim=model.head_dim,
                width=cut.width,
                most=1 << (cut.splits - 1).bit_length(),
                num_warps=2,
                enable_fp_fusion=True,
            )

    def layout(self) -> tuple[int, ...] | None:
        """None: what a graph bakes in follows from its entry."""
        return None

    def release(self) -> None:
        """Let go of the caches."""
        self._caches.clear()

    def _geometry(self, metadata: Metadata) -> Geometry:
        """Cut a full graph as the plan says, and another step as far as the workspace goes."""
        full = metadata.is_full
        longest = metadata.max_query_len
        if full and metadata.entry is not None:
            query_len = metadata.entry.query_len
        else:
            query_len = longest if longest * metadata.num_reqs == metadata.num_tokens else None
        return geometry(
            self._attention,
            self._multiprocessors,
            num_reqs=metadata.num_reqs,
            num_tokens=metadata.num_tokens,
            query_len=query_len,
            max_seq_len=self._attention.max_model_len if full else max(metadata.max_seq_len, 1),
            workspace=self._workspace.nbytes,
        )

    def _check(self, layer: int, query: torch.Tensor, out: torch.Tensor, metadata: Metadata) -> None:
        """Refuse what the kernel would read or write beyond its end."""
        model, dtype = self._attention, self._caches[layer].keys.dtype
        expected = (metadata.num_tokens, model.num_heads, model.head_dim)
        for name, tensor in (("query", query), ("out", out)):
            if tensor.shape != expected or tensor.dtype is not dtype:
                raise RunError(
                    f"{self._group}, layer {layer}: {name} is {tensor.dtype} {list(tensor.shape)}, expected "
                    f"{dtype} {list(expected)}; cut it to the extents of the metadata"
                )

    def _refuse(self, reservation: Reservation) -> None:
        model, where = self._attention, f"triton: {self._group}"
        if refused := refusal(model):
            raise BackendError(f"{where}: {refused}; name another backend for this group")
        interpreted = not isinstance(_attend, triton.runtime.JITFunction)
        if interpreted != (reservation.device.type == "cpu"):
            raise BackendError(
                f"{where}: the kernel was {'interpreted' if interpreted else 'compiled'}, and the device is "
                f"{reservation.device}; compiled it needs a GPU; the interpreter, for tests, needs the CPU "
                "and TRITON_INTERPRET=1 in the environment before capture_planner_triton.executor is imported"
            )
        for entry in reservation.entries:
            if entry.num_reqs is None:
                continue
            splits = of_entry(model, reservation.environment, entry).splits
            need = partial_bytes(model, entry.num_tokens, splits) if splits > 1 else 0
            if reservation.workspace.numel() < need:
                raise BackendError(
                    f"{where}: {entry} needs a workspace of {need} bytes, and it has "
                    f"{reservation.workspace.numel()}; reserve what workspace() says"
                )
        expected = (self._page_size, model.num_kv_heads, model.head_dim)
        dtype = getattr(torch, model.kv_dtype.value)
        for layer, cache in self._caches.items():
            for kind, tensor in (("keys", cache.keys), ("values", cache.values)):
                if tensor.ndim != 4 or tensor.shape[1:] != expected or tensor.dtype is not dtype:
                    raise BackendError(
                        f"{where}, layer {layer}: {kind} are {tensor.dtype} {list(tensor.shape)}, expected "
                        f"{dtype} [num_pages, {', '.join(map(str, expected))}]"
                    )


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "blocks_each", "splits"])  # type: ignore[untyped-decorator]
def _attend(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    table: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    num_reqs: tl.tensor,
    num_tokens: tl.tensor,
    blocks_each: tl.tensor,
    splits: tl.tensor,
    table_row: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    query_dim: tl.tensor,
    keys_page: tl.tensor,
    keys_slot: tl.tensor,
    keys_head: tl.tensor,
    keys_dim: tl.tensor,
    values_page: tl.tensor,
    values_slot: tl.tensor,
    values_head: tl.tensor,
    values_dim: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    out_dim: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    page_size: tl.constexpr,
    rows: tl.constexpr,
    queries: tl.constexpr,
    tile: tl.constexpr,
    window: tl.constexpr,
    causal: tl.constexpr,
    softcapped: tl.constexpr,
    uniform: tl.constexpr,
    split: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.arange(0, rows)
    head = kv_head * group + row % group
    dim = tl.arange(0, width)
    # Times a stride these may pass 32 bits, in a layout where heads or their elements are far apart.
    far_head = head.to(tl.int64)
    far_dim = dim.to(tl.int64)
    # A group that is no power of two leaves rows over.
    used = row < queries * group
    in_head = dim < head_dim

    if not split:
        # There are as many blocks as tiles of tokens, or more: together they reach every padded row.
        total = tl.load(starts + num_reqs)
        if (block + 1) * queries > total:
            token = (block * queries + row // group).to(tl.int64)
            padded = used & (token >= total) & (token < num_tokens)
            place = token[:, None] * out_token + far_head[:, None] * out_head + far_dim[None, :] * out_dim
            zero = tl.zeros([rows, width], out.dtype.element_ty)
            tl.store(out + place, zero, mask=padded[:, None] & in_head[None, :])

    if uniform:
        owner = block // blocks_each
        first = (block % blocks_each) * queries
    else:
        # Request r begins at block starts[r] // queries + r: room for its tiles, and never less.
        low = 0
        high = num_reqs
        while low < high:
            middle = (low + high) // 2
            if tl.load(starts + middle) // queries + middle <= block:
                low = middle + 1
            else:
                high = middle
        owner = low - 1
        first = (block - tl.load(starts + owner) // queries - owner) * queries
    start = tl.load(starts + owner)
    query_len = tl.load(starts + owner + 1) - start
    if first >= query_len:
        return

    length = tl.load(lengths + owner)
    index = first + row // group
    real = used & (index < query_len)
    token = (start + index).to(tl.int64)
    position = length - query_len + index
    place = token[:, None] * query_token + far_head[:, None] * query_head + far_dim[None, :] * query_dim
    q = tl.load(query + place, mask=real[:, None] & in_head[None, :], other=0.0)

    # Keys that no row of this tile sees may be anything, freed pages included: they are not read.
    first_position = length - query_len + first
    last_position = length - query_len + tl.minimum(first + queries, query_len) - 1
    begin = 0
    end = length
    if causal:
        end = tl.minimum(end, last_position + 1)
    if window is not None:
        begin = tl.maximum(first_position - window + 1, 0)
        if not causal:
            end = tl.minimum(end, last_position + window)
    first_tile = begin // tile
    last_tile = tl.cdiv(end, tile)

    if split:
        part = tl.program_id(2)
        each = tl.cdiv(tl.maximum(last_tile - first_tile, 0), splits)
        first_tile += part * each
        last_tile = tl.minimum(first_tile + each, last_tile)

    top = tl.full([rows], float("-inf"), tl.float32)
    total_weight = tl.zeros([rows], tl.float32)
    if sinks is not None:
        # A sink is a key without a value; the first part has it.
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * _LOG2E
        if split:
            sink = tl.where(tl.program_id(2) == 0, sink, float("-inf"))
        top = sink
        total_weight = tl.where(sink > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([rows, width], tl.float32)

    for number in range(first_tile, last_tile):
        key = number * tile + tl.arange(0, tile)
        held = (key >= begin) & (key < end)
        page = tl.load(table + owner.to(tl.int64) * table_row + key // page_size, mask=held, other=0)
        page = page.to(tl.int64)
        slot = (key % page_size).to(tl.int64)
        read = held[:, None] & in_head[None, :]
        at_key = page * keys_page + slot * keys_slot + kv_head.to(tl.int64) * keys_head
        k = tl.load(keys + at_key[:, None] + far_dim[None, :] * keys_dim, mask=read, other=0.0)
        at_value = page * values_page + slot * values_slot + kv_head.to(tl.int64) * values_head
        v = tl.load(values + at_value[:, None] + far_dim[None, :] * values_dim, mask=read, other=0.0)

        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if softcapped:
            # tanh by an exponential that cannot overflow; the interpreter has no other.
            small = tl.exp2(tl.abs(score) * (-2 * _LOG2E) / softcap)
            score = tl.where(score < 0, -softcap, softcap) * (1 - small) / (1 + small)
        seen = held[None, :]
        if causal:
            seen = seen & (key[None, :] <= position[:, None])
        if window is not None:
            seen = seen & (key[None, :] > position[:, None] - window)
            if not causal:
                seen = seen & (key[None, :] < position[:, None] + window)
        score = tl.where(seen, score * _LOG2E, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, 1))
        # A row that has seen nothing has the top -inf, and -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        decay = tl.exp2(top - base)
        total_weight = total_weight * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = new_top

    some = total_weight > 0
    total_weight = tl.where(some, total_weight, 1.0)
    result = acc / total_weight[:, None]
    if split:
        cell = (token * (group * tl.num_programs(1)) + head) * splits + tl.program_id(2)
        tl.store(sums + cell, top + tl.log2(total_weight), mask=real)
        place = cell[:, None] * head_dim + dim[None, :]
        tl.store(partial + place, result, mask=(real & some)[:, None] & in_head[None, :])
    else:
        place = token[:, None] * out_token + far_head[:, None] * out_head + far_dim[None, :] * out_dim
        tl.store(out + place, result.to(out.dtype.element_ty), mask=real[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["num_reqs", "splits"])  # type: ignore[untyped-decorator]
def _merge(
    partial: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    starts: tl.tensor,
    num_reqs: tl.tensor,
    splits: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    out_dim: tl.tensor,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, most)
    dim = tl.arange(0, width)
    in_head = dim < head_dim
    cell = (token * tl.num_programs(1) + head) * splits + part
    # No program wrote the parts of a padded row; without a weight its mean is zero.
    written = part < tl.where(token < tl.load(starts + num_reqs), splits, 0)
    weight = tl.load(sums + cell, mask=written, other=float("-inf"))
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    read = (weight > 0)[:, None] & in_head[None, :]
    value = tl.load(partial + cell[:, None] * head_dim + dim[None, :], mask=read, other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(value * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    place = token * out_token + head.to(tl.int64) * out_head + dim.to(tl.int64) * out_dim
    tl.store(out + place, result.to(out.dtype.element_ty), mask=in_head)
