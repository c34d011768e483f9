"""How much workspace FlashInfer needs, from the arithmetic of its own scheduler.

Read in ``include/flashinfer/attention/scheduler.cuh`` of 0.6.9, 0.7.1 and 0.7.2.post1. A workspace of
a fixed size overflowed in vllm#40023: 32 query heads, 2 KV heads, head dimension 256 and 512 requests
of one token need 536346624 bytes for partial outputs alone, and 394 MiB were configured.
"""

from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment

INT_WORKSPACE = 8 << 20
"""Bytes, on the device and again in pinned memory, that every wrapper has for its plan."""

SEMAPHORES = 8 << 20
"""Bytes at the head of the workspace that XQA keeps for semaphores."""

_BLOCKS_PER_SM = 16
"""At most: a CUDA-core decode block has at least 128 threads, a multiprocessor at most 2048."""


def cta_tile_q(packed_len: int, head_dim: int, major: int) -> int:
    """Return the rows of a query tile (``FA2DetermineCtaTileQ``); a row is one (token, head)."""
    if head_dim >= 512:
        return 16 if packed_len <= 32 else 32
    if packed_len > 64 and head_dim < 256:
        return 128
    return 16 if packed_len <= 16 and major >= 8 else 64


def tensor_core(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the bytes of tmp_v and tmp_s of a wrapper planned on the FA2 scheduler under capture.

    Padded rows are empty, so no plan may promise a uniform query length: the scheduler then takes
    its ragged bound, one tile a request beyond the tokens', which also covers the uniform one.
    """
    major, _ = environment.device.sm
    reqs, group = entry.num_reqs or 1, _heads(model) // model.num_kv_heads
    tile = cta_tile_q((entry.num_tokens - reqs + 1) * group, model.head_dim, major)
    tiles = max(_split_tiles(model, environment), _ceil_div(entry.num_tokens * group, tile) + reqs - 1)
    return _partials(model, environment, tiles, tile)


def eager(model: Attention, environment: Environment) -> int:
    """Return the bytes of the largest split plan outside a graph, which shares the workspace."""
    major, _ = environment.device.sm
    tile = cta_tile_q(1 << 20, model.head_dim, major)
    return _partials(model, environment, _split_tiles(model, environment), tile)


def cuda_core(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the bytes of a CUDA-core decode: its grid is split up to every resident block."""
    tiles = _BLOCKS_PER_SM * _multiprocessors(environment) // model.num_kv_heads
    return _heads(model) * tiles * (model.head_dim + 1) * 4 + 16


def xqa(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the bytes XQA may use: a chunk of partial outputs for each part of each sequence.

    It makes 3 blocks a multiprocessor, spread over the sequences, and at least one for each.
    """
    sequences = (entry.num_reqs or 0) * model.num_kv_heads
    chunks = 3 * _multiprocessors(environment) + sequences
    rows = (entry.query_len or 1) * (model.num_heads // model.num_kv_heads)
    return chunks * rows * (model.head_dim + 2) * 4


def xqa_counters(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the bytes of XQA's semaphores."""
    return SEMAPHORES


def trtllm_gen(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the bytes trtllm-gen may use: a tile of at most 256 rows a multiprocessor.

    Under decode context parallelism it also keeps softmax sums for 256 tokens a request (what
    vllm#50781 ran out of), and a guard of 1 MiB.
    """
    width = model.head_dim if model.latent is None else model.latent.kv_lora_rank
    rows, sms = (entry.num_reqs or 0) * _heads(model), _multiprocessors(environment)
    tokens = _round_up(entry.query_len or 1, 256)
    sums = rows * tokens * 8 + (1 << 20) if model.decode_context > 1 else 0
    return sums + sms * 256 * (width + 2) * 4


def trtllm_gen_counters(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the bytes of the counters that trtllm-gen's blocks merge by."""
    rows = (entry.num_reqs or 0) * _heads(model)
    return _round_up(max(rows, _multiprocessors(environment)), 8) * 4


def _partials(model: Attention, environment: Environment, tiles: int, tile: int) -> int:
    """Return tmp_v and tmp_s; since 0.7.1 rows are tokens, before that (token, head) pairs."""
    rows = tiles * tile
    if (environment.package("flashinfer-python") or ()) >= (0, 7, 1):
        rows = _ceil_div(rows, _heads(model) // model.num_kv_heads)
    return sum(_round_up(_heads(model) * rows * width * 4, 16) for width in (model.head_dim, 1))


def _split_tiles(model: Attention, environment: Environment) -> int:
    return 2 * _multiprocessors(environment) // model.num_kv_heads


def _heads(model: Attention) -> int:
    """Return the query heads of one rank's attention; decode context parallelism gathers them."""
    return model.num_heads * model.decode_context


def _multiprocessors(environment: Environment) -> int:
    return environment.device.multiprocessors or 0


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, multiple: int) -> int:
    return _ceil_div(value, multiple) * multiple
