"""How far FlashInfer goes inside a full graph, and what its kernels read there.

Support follows vLLM 0.33 (``v1/attention/backends/flashinfer.py``, ``get_cudagraph_support``, and
``mla/flashinfer_mla.py``); fields and workspace follow FlashInfer 0.7.2's own source.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from capture_planner.modes import GraphMode, GraphSupport, Refresh, Role
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
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.model import DataType
from capture_planner.records.spec import Limits
from capture_planner_flashinfer import workspace

if TYPE_CHECKING:
    from capture_planner.runtime.executor import Executor, Reservation

PACKAGE = "flashinfer-python"

KV_LENS = 32768
"""Requests that a prefill wrapper's length buffer holds; it would be replaced, and dangle, past them."""


class Path(enum.Enum):
    """The kernels that serve a group inside a graph."""

    CUDA_CORE = "decode wrapper on CUDA cores"
    TENSOR_CORE = "decode wrapper on tensor cores"
    PREFILL = "prefill wrapper"
    XQA = "XQA"
    TRTLLM_GEN = "trtllm-gen"

    @property
    def is_wrapper(self) -> bool:
        """Whether the host plans it; the others read lengths and pages in the kernel."""
        return self not in (Path.XQA, Path.TRTLLM_GEN)


def kernel(model: Attention, environment: Environment) -> Path | None:
    """Return the kernel that needs no host plan, or None where only the wrappers serve.

    trtllm-gen on SM100 and SM103; XQA on SM90 and SM12x, for head dimensions 16 to 256 in steps of
    16, an NVFP4 cache on SM12x only. trtllm-gen takes several tokens a request only if causal.
    Latent attention is trtllm-gen's wherever it is served at all. XQA gives no log-sum-exp, which
    decode context parallelism merges by. Before 0.7.1 it has one sliding window for all tokens of a
    query, that of the last (flashinfer#4137).
    """
    major, minor = environment.device.sm
    if model.latent is not None:
        return Path.TRTLLM_GEN
    if model.decode_context > 1 or model.num_heads % model.num_kv_heads:
        return None
    if major == 10:
        return Path.TRTLLM_GEN if model.causal else None
    if (major, minor) != (9, 0) and major != 12:
        return None
    fits = 16 <= model.head_dim <= 256 and model.head_dim % 16 == 0
    quantised = model.kv_dtype is DataType.NVFP4 and major != 12
    return Path.XQA if fits and not quantised and not _shares_window(model, environment) else None


def _shares_window(model: Attention, environment: Environment) -> bool:
    """Say whether XQA would give all tokens of a query the window of the last one."""
    old = (environment.package(PACKAGE) or ()) < (0, 7, 1)
    return model.window is not None and model.max_query_len > 1 and old


def splits(environment: Environment) -> bool:
    """Say whether XQA may split a sequence over several blocks.

    Before 0.7.1 each of them writes the output, and one that is late overwrites what the last one merged
    (flashinfer#4161; seen on an H100 with 0.6.9, one row of 2466).
    """
    return (environment.package(PACKAGE) or ()) >= (0, 7, 1)


def path(model: Attention, environment: Environment) -> Path:
    """Return the kernels that serve a group: those that need no host plan where there are any."""
    return kernel(model, environment) or wrapper(model)


def wrapper(model: Attention) -> Path:
    """Return the wrapper that serves a group where no other kernel does.

    A decode wrapper uses tensor cores from four query heads a KV head on, or on an 8-bit cache
    (SGLang 0.5.23, ``should_use_tensor_core``).
    """
    if model.max_query_len > 1:
        return Path.PREFILL
    dense = model.num_heads >= 4 * model.num_kv_heads or model.kv_dtype in (DataType.FP8, DataType.NVFP4)
    return Path.TENSOR_CORE if dense else Path.CUDA_CORE


def refusal(model: Attention, environment: Environment) -> str | None:
    """Return why FlashInfer cannot serve these layers at all there, or None."""
    device = environment.device
    if device.kind is not DeviceKind.CUDA:
        return f"FlashInfer has no kernels for the CPU {device.name}"
    where = _device(environment)
    version = environment.package(PACKAGE)
    if version is None:
        return f"{PACKAGE} is not installed; install it for {where}"
    if device.sm < (7, 5):
        return f"FlashInfer needs SM75 or newer, not {where}"
    if model.latent is not None:
        return (
            None
            if device.sm[0] == 10
            else f"FlashInfer's latent attention needs SM100, not {where} (vLLM 0.33)"
        )
    if device.sm >= (8, 0):
        return None
    if version < (0, 6, 16):
        return f"FlashInfer's paged prefill fails to launch on {where} before 0.6.16 (flashinfer#3620)"
    if model.dtype is DataType.BFLOAT16:
        return f"{where} has no bfloat16 tensor cores, so FlashInfer skips its kernels (flashinfer#473)"
    if model.head_dim > 256:
        return f"Head dimension {model.head_dim} does not fit the shared memory of {where} (flashinfer#3526)"
    return None


class FlashInfer:
    """FlashInfer, never ALWAYS: prompts and decodes take different kernels in one forward."""

    name = "flashinfer"

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """UNIFORM_BATCH where one kernel takes several tokens a request, else one token.

        Latent attention on SM100 is ALWAYS in vLLM 0.33, for ragged decodes of up to 1 + K tokens;
        prompts take another kernel there too, so here it is UNIFORM_BATCH.
        """
        refused = refusal(model, environment)
        if refused is not None:
            return Support(level=GraphSupport.NEVER, reason=f"{refused}.")
        level, why = self._level(model, environment)
        capped = path(model, environment) is Path.PREFILL
        return Support(
            level=level,
            reason=f"FlashInfer {environment.packages[PACKAGE]} on {_device(environment)}: {why}.",
            max_num_reqs=KV_LENS if capped else None,
        )

    def _level(self, model: Attention, environment: Environment) -> tuple[GraphSupport, str]:
        single, uniform = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, GraphSupport.UNIFORM_BATCH
        found = kernel(model, environment)
        if model.decode_context > 1:
            return single, f"{model.decode_context} decode-context ranks leave one token a request"
        if environment.device.sm < (9, 0):
            if model.causal:
                return uniform, "the FA2 kernels below SM90 take uniform causal queries"
            return single, "the FA2 kernels below SM90 take several tokens a request only if causal"
        if found is not None:
            return uniform, f"{found.value} takes the same number of tokens of every request"
        shape = (
            f"{model.num_heads} query heads, {model.num_kv_heads} KV heads, head dimension {model.head_dim}"
        )
        kind = "causal" if model.causal else "non-causal"
        if _shares_window(model, environment):
            kind += f", with a window of {model.window} (flashinfer#4137)"
        return single, f"neither XQA nor trtllm-gen takes {shape}, {kind}, on a {model.kv_dtype.value} cache"

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Declare the fields of the kernels that serve this group.

        Wrappers take their own page lists: a padded row repeats the last offset and so has no pages,
        and its last page has length 0, where the host's and the device's lengths agree. XQA and
        trtllm-gen take seq_lens and block_table; rows of several tokens must be as long as their
        query, padding included, so a padded row attends to the null page.
        """
        if refusal(model, environment) is not None:
            return PaddingContract()
        chosen = path(model, environment)
        if chosen.is_wrapper:
            return PaddingContract(fields=PAGE_LISTS + _OF_WRAPPER[chosen])
        fields = [_frozen("max_query_len"), _frozen("max_seq_len")]
        if model.max_query_len > 1:
            fields.append(
                MetadataField(
                    name="seq_lens", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=model.max_query_len
                )
            )
        return PaddingContract(fields=tuple(fields))

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """In the graph for XQA and trtllm-gen; a wrapper is planned on the host before each replay."""
        served = refusal(model, environment) is None and model.decode_context == 1
        held = served and not path(model, environment).is_wrapper
        return Refresh.IN_GRAPH if held else Refresh.HOST

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """What ``parts`` says: plan workspaces, counters, and one float workspace for every launch.

        A wrapper's batch is fixed, so there is one for each (requests, query length); graphs that
        differ in LoRA adapters or draft steps share it. One more plans eager and PIECEWISE steps.
        The float workspace must not grow after capture.
        """
        if refusal(model, environment) is not None:
            return Workspace(formula="0: FlashInfer does not run there")
        chosen, cut = path(model, environment), parts(model, environment, entries)
        graphs = f" and of {_FORMULA[chosen]}" if _graphs(entries) else ""
        counters = f"{cut.counters} bytes of counters, " if cut.counters else ""
        return Workspace(
            device=cut.device,
            pinned=cut.plans * workspace.INT_WORKSPACE,
            formula=f"{cut.plans} wrapper{'s' if cut.plans > 1 else ''} of 8 MiB on each side, {counters}"
            f"and one float workspace of {cut.floats} bytes, the most of an eager plan{graphs}",
        )

    def reserve(self, reservation: Reservation) -> Executor:
        """Make the executor of one group, with all of its wrappers.

        Raises ``BackendError`` where FlashInfer is missing, and for what this backend does not run:
        see ``executor.refuse``.
        """
        # Planning needs no torch, so that this module must not import it.
        from capture_planner_flashinfer.executor import FlashInferExecutor

        return FlashInferExecutor(reservation)


@attrs.frozen(kw_only=True)
class Parts:
    """How a group's workspace is cut up, in this order."""

    plans: int
    """Wrappers: each has a plan workspace on the device and in pinned memory. The first is eager."""
    counters: int
    """Bytes that kernels without a plan find zero, and leave zero. No other launch may write there."""
    floats: int
    """Bytes of partial results, which hold nothing from one launch to the next."""

    @property
    def device(self) -> int:
        """Bytes of all of them on the device."""
        return self.plans * workspace.INT_WORKSPACE + self.counters + self.floats


def parts(model: Attention, environment: Environment, entries: Sequence[Entry]) -> Parts:
    """Return how much of each a group needs for these entries."""
    graphs, chosen = _graphs(entries), path(model, environment)
    wrappers = len({(e.num_reqs, e.query_len) for e in graphs}) if chosen.is_wrapper else 0
    counters = _COUNTERS.get(chosen)
    return Parts(
        plans=1 + wrappers,
        counters=max((counters(model, environment, e) for e in graphs), default=0) if counters else 0,
        floats=max(
            workspace.eager(model, environment),
            *(_FLOAT_WORKSPACE[chosen](model, environment, e) for e in graphs),
            0,
        ),
    )


def _graphs(entries: Sequence[Entry]) -> list[Entry]:
    return [e for e in entries if e.mode is GraphMode.FULL and e.num_reqs is not None and e.query_len]


def _frozen(name: str, dtype: str = "int32", scale: int = 1) -> MetadataField:
    """Describe what the host reads at launch and bakes in, planned at its worst case."""
    return MetadataField(
        name=name,
        axis=Axis.SCALAR,
        dtype=dtype,
        fill=Fill.WORST_CASE,
        lifetime=Lifetime.FROZEN,
        where=Where.HOST,
        scale=scale,
    )


PAGE_LISTS = (
    MetadataField(
        name="paged_kv_indptr", axis=Axis.REQUEST_PLUS_ONE, fill=Fill.REPEAT_LAST, where=Where.BOTH
    ),
    MetadataField(name="paged_kv_indices", axis=Axis.PAGE, fill=Fill.CONSTANT, value=0, indexes=Bound.PAGES),
    MetadataField(
        name="paged_kv_last_page_len", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, where=Where.BOTH
    ),
)
"""What every wrapper reads. The host's copies make the plan; a fast plan never copies them over."""

_OF_WRAPPER = {
    # DecodePlanInfo has 10 numbers, PrefillPlanInfo 15: the grid, the tile and every offset.
    Path.CUDA_CORE: (_frozen("plan_info", "int64", 10),),
    # The wrapper's own ramp, which the host plans and the wrapper keeps on the device: one token for
    # every planned row, real or padded.
    Path.TENSOR_CORE: (
        MetadataField(
            name="qo_indptr",
            axis=Axis.REQUEST_PLUS_ONE,
            fill=Fill.WORST_CASE,
            lifetime=Lifetime.FROZEN,
            indexes=Bound.TOKENS,
            where=Where.HOST,
        ),
        _frozen("plan_info", "int64", 15),
    ),
    # No custom mask: once its buffer is given, a plan without a mask keeps the old bits.
    Path.PREFILL: (
        MetadataField(
            name="qo_indptr",
            axis=Axis.REQUEST_PLUS_ONE,
            fill=Fill.REAL_TOTAL,
            indexes=Bound.TOKENS,
            where=Where.BOTH,
        ),
        MetadataField(name="kv_lens", axis=Axis.REQUEST, fill=Fill.CONSTANT, value=0, where=Where.BOTH),
        _frozen("plan_info", "int64", 15),
    ),
}


_FLOAT_WORKSPACE = {
    Path.CUDA_CORE: workspace.cuda_core,
    Path.TENSOR_CORE: workspace.tensor_core,
    Path.PREFILL: workspace.tensor_core,
    Path.XQA: workspace.xqa,
    Path.TRTLLM_GEN: workspace.trtllm_gen,
}

_COUNTERS = {
    Path.XQA: workspace.xqa_counters,
    Path.TRTLLM_GEN: workspace.trtllm_gen_counters,
}

_FA2_FORMULA = (
    "the FA2 scheduler: heads * rows * (head_dim + 1) * 4, rows = tiles * cta_tile_q (/ group since 0.7.1), "
    "tiles = max(2 * SMs / kv_heads, ceil(tokens * group / cta_tile_q) + reqs - 1)"
)
_FORMULA = {
    Path.CUDA_CORE: "CUDA-core decode: heads * (16 * SMs / kv_heads) * (head_dim + 1) * 4",
    Path.TENSOR_CORE: _FA2_FORMULA,
    Path.PREFILL: _FA2_FORMULA,
    Path.XQA: "XQA: (3 * SMs + reqs * kv_heads) * query_len * group * (head_dim + 2) * 4",
    Path.TRTLLM_GEN: "trtllm-gen: SMs * 256 * (width + 2) * 4",
}


def _device(environment: Environment) -> str:
    major, minor = environment.device.sm
    return f"{environment.device.name} (SM{major}{minor})"
