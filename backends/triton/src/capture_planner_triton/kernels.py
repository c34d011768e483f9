"""The Triton kernels: paged attention over tiles of queries, and the merge of split keys.

A tile's rows are query tokens times the query heads of one KV head, so that a decode of one token is
a product of 16 rows or more on tensor cores. Everything that differs from step to step is read on the
device: which request a tile belongs to, its length, the places of its keys. The grid is that of the
padded extents, so that a graph holds any batch.

For tests on a CPU, ``TRITON_INTERPRET=1`` must be in the environment when this module is imported.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

_LOG2E = tl.constexpr(1.4426950408889634)
"""Weights are computed as powers of two: the hardware has no other exponential."""


def is_interpreted() -> bool:
    """Whether this module was imported with ``TRITON_INTERPRET=1``, so that its kernels need a CPU."""
    return not isinstance(attend, triton.runtime.JITFunction)


# As a constexpr, or specialized, each window would be compiled anew. A tile loads one sink per row, once, so that a
# kernel for aligned sinks would be no faster.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_reqs", "num_tokens", "blocks_each", "splits", "window"],
    do_not_specialize_on_alignment=["sinks"],
)
def attend(
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
    window: tl.tensor | None,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    page_size: tl.constexpr,
    rows: tl.constexpr,
    queries: tl.constexpr,
    tile: tl.constexpr,
    causal: tl.constexpr,
    softcapped: tl.constexpr,
    uniform: tl.constexpr,
    split: tl.constexpr,
) -> None:
    """Attend with one tile of queries of one KV head to its keys, or to one part of them.

    The grid is (blocks, num_kv_heads, splits): see ``Geometry``, which also gives ``width``, ``rows``,
    ``queries``, ``tile`` (its ``keys``) and ``blocks_each``.

    - query, out: ``[num_tokens, num_heads, head_dim]``. keys, values: ``[num_pages, page_size,
      num_kv_heads, head_dim]`` of the same dtype. Their strides, in elements, are ``query_token`` to
      ``out_dim``.
    - starts: ``int32[num_reqs + 1]``, the first query token of each request. lengths: ``int32[num_reqs]``,
      tokens of each sequence with those of the query. table: ``int32[num_reqs, pages]``, with rows
      ``table_row`` elements apart.
    - partial: ``float32[num_tokens, num_heads, splits, head_dim]``, the weighted mean of each part. sums:
      ``float32[num_tokens, num_heads, splits]``, log2 of its total weight. Written if ``split``, else ``out``.
    - sinks: ``[num_heads]`` logits, or None. scale: factor of the scores. softcap: read if ``softcapped``.
    - group: query heads per KV head. window: most keys that a query sees, its own included, or None.
    - uniform: every request has ``blocks_each`` blocks; else a block searches for its request.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.arange(0, rows)
    head = kv_head * group + row % group
    dim = tl.arange(0, width)
    # 64 bits, as a product with a stride may exceed 32 where heads or their elements are far apart.
    far_head = head.to(tl.int64)
    far_dim = dim.to(tl.int64)
    # If the group is not a power of two, some rows are unused.
    used = row < queries * group
    in_head = dim < head_dim

    if not split:
        # There are at least as many blocks as tiles of tokens, so together they zero every padded row.
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
        # Request r begins at block starts[r] // queries + r, which leaves room for all tiles before it.
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
    # The grid covers padded requests and the longest query, so some blocks have no queries.
    if first >= query_len:
        return

    length = tl.load(lengths + owner)
    index = first + row // group
    real = used & (index < query_len)
    token = (start + index).to(tl.int64)
    position = length - query_len + index
    place = token[:, None] * query_token + far_head[:, None] * query_head + far_dim[None, :] * query_dim
    q = tl.load(query + place, mask=real[:, None] & in_head[None, :], other=0.0)

    # Keys that no row of this tile sees are not read: they may lie in freed pages.
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
        # A sink is a key without a value. Only the first part counts it.
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * _LOG2E
        if split:
            sink = tl.where(tl.program_id(2) == 0, sink, float("-inf"))
        top = sink
        total_weight = tl.where(sink > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([rows, width], tl.float32)

    for number in range(first_tile, last_tile):
        key = number * tile + tl.arange(0, tile)
        in_range = (key >= begin) & (key < end)
        page = tl.load(table + owner.to(tl.int64) * table_row + key // page_size, mask=in_range, other=0)
        page = page.to(tl.int64)
        slot = (key % page_size).to(tl.int64)
        read = in_range[:, None] & in_head[None, :]
        at_key = page * keys_page + slot * keys_slot + kv_head.to(tl.int64) * keys_head
        # Of an FP8 cache this converts; any other has the dtype of the queries.
        k = tl.load(keys + at_key[:, None] + far_dim[None, :] * keys_dim, mask=read, other=0.0).to(q.dtype)
        at_value = page * values_page + slot * values_slot + kv_head.to(tl.int64) * values_head
        v = tl.load(values + at_value[:, None] + far_dim[None, :] * values_dim, mask=read, other=0.0).to(q.dtype)

        # "ieee", here and below: float32 would else be rounded to TF32.
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if softcapped:
            # tanh by an exponential that cannot overflow; the interpreter has no tanh.
            small = tl.exp2(tl.abs(score) * (-2 * _LOG2E) / softcap)
            score = tl.where(score < 0, -softcap, softcap) * (1 - small) / (1 + small)
        seen = in_range[None, :]
        if causal:
            seen = seen & (key[None, :] <= position[:, None])
        if window is not None:
            seen = seen & (key[None, :] > position[:, None] - window)
            if not causal:
                seen = seen & (key[None, :] < position[:, None] + window)
        score = tl.where(seen, score * _LOG2E, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, 1))
        # A row without keys so far has top -inf, and -inf - -inf would be NaN.
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
        # A part without keys writes -inf, as `merge` reads the sums of all parts of a real row.
        tl.store(sums + cell, top + tl.log2(total_weight), mask=real)
        place = cell[:, None] * head_dim + dim[None, :]
        tl.store(partial + place, result, mask=(real & some)[:, None] & in_head[None, :])
    else:
        place = token[:, None] * out_token + far_head[:, None] * out_head + far_dim[None, :] * out_dim
        tl.store(out + place, result.to(out.dtype.element_ty), mask=real[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=["num_reqs", "splits"])  # type: ignore[untyped-decorator]
def merge(
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
    """Merge the parts of one token and head: their mean by weight.

    The grid is (num_tokens, num_heads). ``partial``, ``sums``, ``out`` and ``starts`` are as in ``attend``;
    ``most`` is ``splits`` rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, most)
    dim = tl.arange(0, width)
    in_head = dim < head_dim
    cell = (token * tl.num_programs(1) + head) * splits + part
    # The parts of a padded row were not written; without a weight its mean is zero.
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
