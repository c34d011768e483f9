"""How the work of one step is cut into programs, from padded extents alone, without torch.

The planner sizes the workspace by it and the executor launches by it, so that the two agree.
"""

from __future__ import annotations

import attrs

from capture_planner.records.backend import Attention
from capture_planner.records.model import DataType

ITEMSIZE = {DataType.BFLOAT16: 2, DataType.FLOAT16: 2, DataType.FLOAT32: 4}
"""The element types that the kernel takes, with their bytes."""

MAX_HEAD_DIM = 256
"""Wider tiles of keys leave no room for a second one in flight on devices with 99 KiB."""

MAX_GROUP = 128
"""Query heads that one KV head may serve: they are rows of one tile."""

MAX_GROUP_BYTES = 32 << 10
"""Bytes that their queries may take: keys and values need the rest of the shared memory."""

MIN_TILE = 16
"""Fewest rows, keys and columns that a tensor core's product takes."""

MAX_ROWS = 64
"""Rows of a tile, where heads do not ask for more: the least that Hopper's warp-group product takes."""

MAX_KEYS = 64
"""Keys of a tile: enough for a product and for wide loads; more would be computed with in vain."""

MAX_SPLITS = 32
"""Parts that the keys of one tile are cut into at most; merging them costs more from there on."""

PROGRAMS = 4
"""Programs a multiprocessor that a split grid may have: so many run at once, and lengths even out."""

_TILE_BYTES = 16 << 10
"""Bytes of a tile of queries, of keys or of values, where its least extent allows."""

_IN_FLIGHT = 1
"""Tiles of keys and of values that are on their way while one is computed with.

A decode waits for memory: it is programs beside it that keep the device busy, and they need the room
(on an H200, 64 requests of 700 tokens take 47 us so, and 61 us with 2).
"""


@attrs.frozen(kw_only=True)
class Geometry:
    """The grid of one launch and the tile of one program: ``blocks * num_kv_heads * splits`` programs."""

    rows: int
    """Rows of a tile: query tokens times the query heads of one KV head, rounded up to a power of two."""
    queries: int
    """Query tokens of a tile."""
    keys: int
    """Keys that are read at a time."""
    width: int
    """The head dimension, rounded up to a power of two."""
    blocks: int
    """Tiles of queries that the padded extents can have."""
    blocks_each: int | None
    """Tiles of each request; None: requests differ, and a program looks for its owner."""
    splits: int
    """Parts that the keys of a tile are cut into."""
    warps: int
    stages: int
    """Depth of Triton's pipeline: loads that depend on a load (the page's number) take two a tile."""


def geometry(
    model: Attention,
    multiprocessors: int,
    *,
    num_reqs: int,
    num_tokens: int,
    query_len: int | None,
    max_seq_len: int,
    workspace: int | None = None,
) -> Geometry:
    """Cut a step of at least one request and one token.

    ``query_len`` is the most tokens that a request has, or None where requests differ widely.
    ``workspace`` is the bytes there are for partial results, or None where the answer decides how
    many there will be.
    """
    group = model.num_heads // model.num_kv_heads
    # Tokens of a request that are worth a tile: in a mixed batch, the mean.
    tokens = query_len or _ceil_div(num_tokens, num_reqs)
    width = max(_power_of_two(model.head_dim), MIN_TILE)
    fitting = max(_TILE_BYTES // (width * ITEMSIZE[model.dtype]), MIN_TILE)
    rows = max(_power_of_two(group), min(_power_of_two(tokens * group), fitting, MAX_ROWS), MIN_TILE)
    queries = rows // group
    blocks_each = None if query_len is None else _ceil_div(query_len, queries)
    blocks = num_tokens // queries + num_reqs if blocks_each is None else num_reqs * blocks_each
    keys = min(fitting, MAX_KEYS)
    reach = max_seq_len if model.window is None else min(max_seq_len, model.window + queries)
    splits = min(
        PROGRAMS * multiprocessors // (blocks * model.num_kv_heads), MAX_SPLITS, _ceil_div(reach, keys)
    )
    if workspace is not None:
        splits = min(splits, workspace // partial_bytes(model, num_tokens, 1))
    return Geometry(
        rows=rows,
        queries=queries,
        keys=keys,
        width=width,
        blocks=blocks,
        blocks_each=blocks_each,
        splits=max(splits, 1),
        warps=8 if rows * width > 64 * 128 else 4,
        stages=2 * _IN_FLIGHT + 1,
    )


def partial_bytes(model: Attention, num_tokens: int, splits: int) -> int:
    """Return the bytes of ``splits`` partial results of so many tokens: float32, each with its sum."""
    return splits * num_tokens * model.num_heads * (model.head_dim + 1) * 4


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(value: int) -> int:
    """Round up to a power of two."""
    return 1 << (value - 1).bit_length()
