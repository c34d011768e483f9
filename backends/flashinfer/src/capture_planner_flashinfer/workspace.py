"""How much workspace FlashInfer needs, from the arithmetic of its own scheduler. All sizes are in bytes.

Read in ``include/flashinfer/attention/scheduler.cuh`` of 0.6.9, 0.7.1 and 0.7.2.post1. A workspace of
a fixed size overflowed in vllm#40023: 32 query heads, 2 KV heads, head dimension 256 and 512 requests
of one token need 536346624 bytes for partial outputs alone, and 394 MiB were configured.
"""

from collections.abc import Sequence

import attrs

from capture_planner.modes import GraphMode
from capture_planner.plugins.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner_flashinfer.selection import PACKAGE, KernelFamily, kernel_family

INT_WORKSPACE = 8 << 20
"""A wrapper's plan workspace, on the device and again in pinned memory."""

SEMAPHORES = 8 << 20
"""The head of XQA's workspace, which it keeps for semaphores."""

_BLOCKS_PER_SM = 16
"""At most: a CUDA-core decode block has at least 128 threads, a multiprocessor at most 2048."""


@attrs.frozen(kw_only=True)
class WorkspaceParts:
    """The parts of a group's workspace, in this order."""

    plans: int
    """Number of wrappers: each has ``INT_WORKSPACE`` bytes on the device and in pinned memory.

    The first is for eager and PIECEWISE steps. A wrapper's batch is fixed, so there is one more for each
    (requests, query length); graphs that differ in LoRA adapters or draft steps share it.
    """
    counters: int
    """Counters of the kernels without a plan: zero between launches, so no other launch may write here."""
    floats: int
    """Partial results of one launch, shared by all launches."""

    @property
    def device(self) -> int:
        """All parts together, on the device."""
        return self.plans * INT_WORKSPACE + self.counters + self.floats


def workspace_parts(model: Attention, environment: Environment, entries: Sequence[Entry]) -> WorkspaceParts:
    """Return the parts that a group needs for these entries."""
    graphs, family = _uniform_graphs(entries), kernel_family(model, environment)
    wrappers = len({(e.num_reqs, e.query_len) for e in graphs}) if family.is_wrapper else 0
    counters = _COUNTERS.get(family)
    return WorkspaceParts(
        plans=1 + wrappers,
        counters=max((counters(model, environment, e) for e in graphs), default=0) if counters else 0,
        # The 0 is for plans without graphs: `max` needs two values or an iterable.
        floats=max(eager(model, environment), *(_FLOATS[family](model, environment, e) for e in graphs), 0),
    )


def formula(model: Attention, environment: Environment, entries: Sequence[Entry]) -> str:
    """Return how ``workspace_parts`` comes to its sizes, for the plan."""
    parts = workspace_parts(model, environment, entries)
    graphs = f" and of {_FORMULAS[kernel_family(model, environment)]}" if _uniform_graphs(entries) else ""
    counters = f"{parts.counters} bytes of counters, " if parts.counters else ""
    return (
        f"{parts.plans} wrapper{'s' if parts.plans > 1 else ''} of 8 MiB on each side, {counters}"
        f"and one float workspace of {parts.floats} bytes, the most of an eager plan{graphs}"
    )


def _uniform_graphs(entries: Sequence[Entry]) -> list[Entry]:
    return [e for e in entries if e.mode is GraphMode.FULL and e.num_reqs is not None and e.query_len]


def cta_tile_q(packed_len: int, head_dim: int, major: int) -> int:
    """Return the rows of a query tile (``FA2DetermineCtaTileQ``); a row is one (token, head)."""
    if head_dim >= 512:
        return 16 if packed_len <= 32 else 32
    if packed_len > 64 and head_dim < 256:
        return 128
    return 16 if packed_len <= 16 and major >= 8 else 64


def tensor_core(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the size of tmp_v and tmp_s of a wrapper planned on the FA2 scheduler under capture.

    Padded rows are empty, so no plan may promise a uniform query length: the scheduler then takes
    its ragged bound, one tile a request beyond the tokens', which also covers the uniform one.
    """
    major, _ = environment.device.sm
    reqs, group = entry.num_reqs or 1, _heads(model) // model.num_kv_heads
    # The longest possible query: every other request has one token.
    tile = cta_tile_q((entry.num_tokens - reqs + 1) * group, model.head_dim, major)
    tiles = max(_split_tiles(model, environment), _ceil_div(entry.num_tokens * group, tile) + reqs - 1)
    return _partials(model, environment, tiles, tile)


def eager(model: Attention, environment: Environment) -> int:
    """Return the size of the largest split plan outside a graph, which shares the workspace."""
    major, _ = environment.device.sm
    tile = cta_tile_q(1 << 20, model.head_dim, major)  # long enough for the largest tile
    return _partials(model, environment, _split_tiles(model, environment), tile)


def _cuda_core(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the size for a CUDA-core decode, whose grid is split up to every resident block."""
    tiles = _BLOCKS_PER_SM * _multiprocessors(environment) // model.num_kv_heads
    # 16: the sums behind the partial outputs are aligned to as many bytes.
    return _heads(model) * tiles * (model.head_dim + 1) * 4 + 16


def _xqa(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the most that XQA uses: a chunk of partial outputs for each part of each sequence.

    It makes 3 blocks a multiprocessor, spread over the sequences, and at least one for each.
    """
    sequences = (entry.num_reqs or 0) * model.num_kv_heads
    chunks = 3 * _multiprocessors(environment) + sequences
    rows = (entry.query_len or 1) * (model.num_heads // model.num_kv_heads)
    return chunks * rows * (model.head_dim + 2) * 4


def _trtllm_gen(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the most that trtllm-gen uses: a tile of at most 256 rows a multiprocessor.

    Under decode context parallelism it also keeps softmax sums for 256 tokens a request (what
    vllm#50781 ran out of), and a guard of 1 MiB.
    """
    width = model.head_dim if model.latent is None else model.latent.kv_lora_rank
    rows, sms = (entry.num_reqs or 0) * _heads(model), _multiprocessors(environment)
    tokens = _round_up(entry.query_len or 1, 256)
    sums = rows * tokens * 8 + (1 << 20) if model.decode_context > 1 else 0
    return sums + sms * 256 * (width + 2) * 4


def _trtllm_gen_counters(model: Attention, environment: Environment, entry: Entry) -> int:
    """Return the size of the counters by which trtllm-gen's blocks merge."""
    rows = (entry.num_reqs or 0) * _heads(model)
    return _round_up(max(rows, _multiprocessors(environment)), 8) * 4


_FLOATS = {
    KernelFamily.CUDA_CORE: _cuda_core,
    KernelFamily.TENSOR_CORE: tensor_core,
    KernelFamily.PREFILL: tensor_core,
    KernelFamily.XQA: _xqa,
    KernelFamily.TRTLLM_GEN: _trtllm_gen,
}
_COUNTERS = {
    KernelFamily.XQA: lambda model, environment, entry: SEMAPHORES,
    KernelFamily.TRTLLM_GEN: _trtllm_gen_counters,
}
_FA2_FORMULA = (
    "the FA2 scheduler: heads * rows * (head_dim + 1) * 4, rows = tiles * cta_tile_q (/ group since 0.7.1), "
    "tiles = max(2 * SMs / kv_heads, ceil(tokens * group / cta_tile_q) + reqs - 1)"
)
_FORMULAS = {
    KernelFamily.CUDA_CORE: "CUDA-core decode: heads * (16 * SMs / kv_heads) * (head_dim + 1) * 4",
    KernelFamily.TENSOR_CORE: _FA2_FORMULA,
    KernelFamily.PREFILL: _FA2_FORMULA,
    KernelFamily.XQA: "XQA: (3 * SMs + reqs * kv_heads) * query_len * group * (head_dim + 2) * 4",
    KernelFamily.TRTLLM_GEN: "trtllm-gen: SMs * 256 * (width + 2) * 4",
}


def _partials(model: Attention, environment: Environment, tiles: int, tile: int) -> int:
    """Return tmp_v and tmp_s; since 0.7.1 rows are tokens, before that (token, head) pairs."""
    rows = tiles * tile
    if (environment.package(PACKAGE) or ()) >= (0, 7, 1):
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
