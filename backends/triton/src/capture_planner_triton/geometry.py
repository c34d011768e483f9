"""Which layers the kernel computes, and how it cuts a step into programs. No torch is needed here.

Programs follow from padded extents only. The planner sizes the workspace and the executor launches by
the same functions, so that the two agree.
"""

from __future__ import annotations

import attrs

from capture_planner.plugins.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.model import DataType

ITEMSIZE = {DataType.BFLOAT16: 2, DataType.FLOAT16: 2, DataType.FLOAT32: 4}
"""Bytes of each element type that the kernel takes."""

MAX_HEAD_DIM = 256
"""Wider tiles of keys leave no room for a second one in flight on devices with 99 KiB."""

MAX_GROUP = 128
"""Most query heads per KV head: they are rows of one tile."""

MAX_GROUP_BYTES = 32 << 10
"""Most bytes of the queries of one KV head and token: keys and values need the rest of shared memory."""

MIN_TILE = 16
"""Fewest rows, keys and columns of a product on tensor cores."""

MAX_ROWS = 64
"""Rows of a tile, unless a group has more heads: the fewest of a warp-group product on Hopper."""

MAX_KEYS = 64
"""Keys of a tile: enough for a product and for wide loads; more would waste work on short sequences."""

MAX_SPLITS = 32
"""Most parts of the keys of one tile; merging more parts costs more than it saves."""

PROGRAMS = 4
"""Most programs per multiprocessor of a split grid: so many run at once, and unequal lengths even out."""

_TILE_BYTES = 16 << 10
"""Bytes of a tile of queries, keys or values, unless its minimum extent takes more."""

_IN_FLIGHT = 1
"""Tiles of keys and values that are loaded ahead of the one in use.

A decode waits for memory, and other programs keep the device busy meanwhile; they need the shared memory
(on an H200, 64 requests of 700 tokens take 47 us with 1 tile, 61 us with 2).
"""


def refusal(model: Attention) -> str | None:
    """Return why the kernel cannot compute these layers on any device, or None."""
    if model.latent is not None:
        return "latent attention has keys and values of two widths in one cache, which the kernel does not read"
    if model.decode_context > 1:
        return f"{model.decode_context} decode-context ranks need the log-sum-exp, which attend does not return"
    if model.dtype not in ITEMSIZE:
        return f"activations in {model.dtype.value}; the kernel takes bfloat16, float16 and float32"
    if model.kv_dtype not in (model.dtype, DataType.FP8):
        return (
            f"a {model.kv_dtype.value} KV cache under {model.dtype.value} activations; the kernel converts keys and "
            "values from fp8 alone"
        )
    if model.head_dim > MAX_HEAD_DIM:
        return f"head dimension {model.head_dim} is more than {MAX_HEAD_DIM}, the widest tile of keys"
    group = model.num_heads // model.num_kv_heads
    if group > MAX_GROUP:
        return f"{group} query heads a KV head are more than the {MAX_GROUP} rows of a tile"
    taken = group * model.head_dim * ITEMSIZE[model.dtype]
    if taken > MAX_GROUP_BYTES:
        return (
            f"{group} query heads a KV head of dimension {model.head_dim} take {taken} bytes, and a tile has "
            f"{MAX_GROUP_BYTES}"
        )
    return None


@attrs.frozen(kw_only=True)
class Geometry:
    """The grid of one launch and the tile of one program: ``blocks * num_kv_heads * splits`` programs."""

    rows: int
    """Rows of a tile: query tokens times the query heads of one KV head, rounded up to a power of two."""
    queries: int
    """Query tokens of a tile."""
    keys: int
    """Keys of a tile."""
    width: int
    """The head dimension, rounded up to a power of two."""
    blocks: int
    """Most tiles of queries within the padded extents."""
    blocks_each: int | None
    """Tiles of each request; None: requests differ, and a program searches for its request."""
    splits: int
    """Parts of the keys of a tile."""
    warps: int
    stages: int
    """Depth of Triton's pipeline: two a tile, as the loads depend on a load of the page number."""


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

    ``query_len`` is the longest query in tokens, or None if requests differ widely. ``max_seq_len`` is
    the longest sequence in tokens. ``workspace`` limits the bytes of partial results; None: no limit.
    """
    group = model.num_heads // model.num_kv_heads
    # The tokens of a request that a tile should hold: the mean in a mixed batch.
    tokens = query_len or _ceil_div(num_tokens, num_reqs)
    width = max(_power_of_two(model.head_dim), MIN_TILE)
    fitting = max(_TILE_BYTES // (width * ITEMSIZE[model.dtype]), MIN_TILE)
    rows = max(_power_of_two(group), min(_power_of_two(tokens * group), fitting, MAX_ROWS), MIN_TILE)
    queries = rows // group
    blocks_each = None if query_len is None else _ceil_div(query_len, queries)
    # Each request may end with a tile that it does not fill.
    blocks = num_tokens // queries + num_reqs if blocks_each is None else num_reqs * blocks_each
    keys = min(fitting, MAX_KEYS)
    # The keys that any query of a tile sees: the windows of its tokens overlap.
    reach = max_seq_len if model.window is None else min(max_seq_len, model.window + queries)
    splits = min(PROGRAMS * multiprocessors // (blocks * model.num_kv_heads), MAX_SPLITS, _ceil_div(reach, keys))
    if workspace is not None:
        splits = min(splits, workspace // partial_bytes(model, num_tokens, 1))
    return Geometry(
        rows=rows,
        queries=queries,
        keys=keys,
        width=width,
        blocks=blocks,
        blocks_each=blocks_each,
        # 0 where the blocks alone fill the device, or the workspace holds no part.
        splits=max(splits, 1),
        warps=8 if rows * width > 64 * 128 else 4,
        stages=2 * _IN_FLIGHT + 1,
    )


def entry_geometry(model: Attention, environment: Environment, entry: Entry) -> Geometry:
    """Return how a full graph is cut. Graphs of the same extents are cut the same way."""
    return geometry(
        model,
        environment.device.multiprocessors or 1,
        num_reqs=entry.num_reqs or 1,
        num_tokens=entry.num_tokens,
        query_len=entry.tokens_each,
        max_seq_len=model.max_model_len,
    )


def entry_partial_bytes(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the bytes of a full graph's partial results: 0 if its keys are not split."""
    splits = entry_geometry(model, environment, entry).splits
    return partial_bytes(model, entry.num_tokens, splits) if splits > 1 else 0


def partial_bytes(model: Attention, num_tokens: int, splits: int) -> int:
    """Return the bytes of ``splits`` partial results of each token and head: float32, each with its sum."""
    return splits * num_tokens * model.num_heads * (model.head_dim + 1) * 4


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(value: int) -> int:
    """Round up to a power of two."""
    return 1 << (value - 1).bit_length()
