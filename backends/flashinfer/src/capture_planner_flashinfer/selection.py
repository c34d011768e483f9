"""Which of FlashInfer's kernels serve a group of layers on a machine, and why none does.

Support follows vLLM 0.33 (``v1/attention/backends/flashinfer.py``, ``get_cudagraph_support``, and
``mla/flashinfer_mla.py``). No torch is needed here.
"""

from __future__ import annotations

import enum

from capture_planner.plugins.backend import Attention
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.records.model import DataType

PACKAGE = "flashinfer-python"

KV_LENS = 32768
"""Most requests of a prefill wrapper: FlashInfer would replace its length buffer beyond, and a graph's
pointer to it would dangle."""


class KernelFamily(enum.Enum):
    """The kernels that serve a group inside a graph."""

    CUDA_CORE = "decode wrapper on CUDA cores"
    TENSOR_CORE = "decode wrapper on tensor cores"
    PREFILL = "prefill wrapper"
    XQA = "XQA"
    TRTLLM_GEN = "trtllm-gen"

    @property
    def is_wrapper(self) -> bool:
        """Whether the host plans each step; the other kernels read lengths and pages themselves."""
        return self not in (KernelFamily.XQA, KernelFamily.TRTLLM_GEN)


def kernel_family(model: Attention, environment: Environment) -> KernelFamily:
    """Return the kernels that serve a group: one without a host plan if possible, else a wrapper."""
    return planless_family(model, environment) or wrapper_family(model)


def planless_family(model: Attention, environment: Environment) -> KernelFamily | None:
    """Return the kernel that needs no host plan, or None if only the wrappers serve these layers.

    trtllm-gen runs on SM100 and SM103, with several tokens a request only if causal; latent attention
    is always trtllm-gen's. XQA runs on SM90 and SM12x, for head dimensions 16 to 256 in steps of 16,
    with an NVFP4 cache on SM12x only, and returns no log-sum-exp, which decode context parallelism needs.
    """
    major, minor = environment.device.sm
    if model.latent is not None:
        return KernelFamily.TRTLLM_GEN
    if model.decode_context > 1 or model.num_heads % model.num_kv_heads:
        return None
    if major == 10:
        return KernelFamily.TRTLLM_GEN if model.causal else None
    if (major, minor) != (9, 0) and major != 12:
        return None
    fits = 16 <= model.head_dim <= 256 and model.head_dim % 16 == 0
    quantised = model.kv_dtype is DataType.NVFP4 and major != 12
    return KernelFamily.XQA if fits and not quantised and not shares_window(model, environment) else None


def wrapper_family(model: Attention) -> KernelFamily:
    """Return the wrapper that serves a group without a planless kernel."""
    if model.max_query_len > 1:
        return KernelFamily.PREFILL
    # As in SGLang 0.5.23 (`should_use_tensor_core`): from four query heads per KV head on, or for an 8-bit cache.
    dense = model.num_heads >= 4 * model.num_kv_heads or model.kv_dtype in (DataType.FP8, DataType.NVFP4)
    return KernelFamily.TENSOR_CORE if dense else KernelFamily.CUDA_CORE


def shares_window(model: Attention, environment: Environment) -> bool:
    """Whether XQA would apply the last token's sliding window to a whole query.

    Fixed in 0.7.1 (flashinfer#4137).
    """
    return model.window is not None and model.max_query_len > 1 and not _is_fixed(environment)


def xqa_splits(environment: Environment) -> bool:
    """Whether XQA may split a sequence over several blocks.

    Before 0.7.1 each block writes the output, and a late one overwrites the merged result
    (flashinfer#4161; seen on an H100 with 0.6.9, in one row of 2466).
    """
    return _is_fixed(environment)


def _is_fixed(environment: Environment) -> bool:
    # () sorts before all versions: an unknown one counts as not fixed.
    return (environment.package(PACKAGE) or ()) >= (0, 7, 1)


def refusal(model: Attention, environment: Environment) -> str | None:
    """Return why FlashInfer cannot serve these layers there at all, or None."""
    device = environment.device
    if device.kind is not DeviceKind.CUDA:
        return f"FlashInfer has no kernels for the CPU {device.name}"
    where = device_label(environment)
    version = environment.package(PACKAGE)
    if version is None:
        return f"{PACKAGE} is not installed; install it for {where}"
    if device.sm < (7, 5):
        return f"FlashInfer needs SM75 or newer, not {where}"
    if model.latent is not None:
        served = device.sm[0] == 10
        return None if served else f"FlashInfer's latent attention needs SM100, not {where} (vLLM 0.33)"
    # The rules below are about SM75 alone, the only older device that is left.
    if device.sm >= (8, 0):
        return None
    if version < (0, 6, 16):
        return f"FlashInfer's paged prefill fails to launch on {where} before 0.6.16 (flashinfer#3620)"
    if model.dtype is DataType.BFLOAT16:
        return f"{where} has no bfloat16 tensor cores, so FlashInfer skips its kernels (flashinfer#473)"
    if model.head_dim > 256:
        return f"Head dimension {model.head_dim} does not fit the shared memory of {where} (flashinfer#3526)"
    return None


def device_label(environment: Environment) -> str:
    """Return a GPU's name with its compute capability."""
    major, minor = environment.device.sm
    return f"{environment.device.name} (SM{major}{minor})"
