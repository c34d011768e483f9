"""The parts of vLLM 0.33 that the attention adapter calls, small enough to read: same names, parameters and rules.

``run_vllm_attention.py`` compares names, parameters and fields with the wheel's. The builder is FLASH_ATTN's, with the
schedule that it computes ahead of a call and keeps in a buffer.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from support.recorded_kernels import recorded, schedule, varlen_attention

ADAPTER = ("capture_planner_vllm.attention.config", "capture_planner_vllm.attention.executor")
CURRENT: list[Any] = []

attention = recorded(varlen_attention)


class CUDAGraphMode(enum.Enum):
    """vLLM's modes."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)


@contextmanager
def set_current_vllm_config(vllm_config: Any) -> Iterator[None]:
    """Make a configuration the current one."""
    CURRENT.append(vllm_config)
    yield
    CURRENT.pop()


@dataclass
class EngineArgs:
    """The arguments that the adapter gives."""

    model: str
    skip_tokenizer_init: bool
    load_format: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    attention_backend: str
    enforce_eager: bool

    def create_engine_config(self) -> Any:
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=0, max_num_batched_tokens=0),
            compilation_config=SimpleNamespace(
                cudagraph_mode=None,
                cudagraph_capture_sizes=None,
                max_cudagraph_capture_size=None,
                static_forward_context={},
            ),
            cache_config=SimpleNamespace(block_size=self.block_size),
            speculative_config=None,
        )


@dataclass
class CommonAttentionMetadata:
    """The fields that the adapter sets."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


@dataclass
class BuiltMetadata:
    """What a builder makes of it."""

    common: CommonAttentionMetadata
    schedule: torch.Tensor


class Builder:
    """FLASH_ATTN's builder with FlashAttention 3."""

    def __init__(self, spec: Any, layer_names: list[str], config: Any, device: torch.device) -> None:
        batch = max(config.scheduler_config.max_num_seqs, config.compilation_config.max_cudagraph_capture_size)
        self.spec = spec
        self.schedule = torch.zeros(1 + -(-batch // 4) * 16, dtype=torch.int32, device=device)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> BuiltMetadata:
        built = self.build(0, common_attn_metadata)
        # As TRITON_ATTN's builder does; the schedule of FLASH_ATTN's is made before.
        common_attn_metadata.seq_lens.fill_(1)
        return built

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata) -> BuiltMetadata:
        made = BuiltMetadata(common_attn_metadata, self.schedule)
        self.update_draft_decode_metadata(made)
        return made

    def update_draft_decode_metadata(self, metadata: BuiltMetadata) -> None:
        common = metadata.common
        made = schedule(
            batch_size=common.num_reqs,
            cache_seqlens=common.seq_lens,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            headdim=self.spec.head_size,
            causal=common.causal,
            window_size=None if self.spec.window is None else [self.spec.window - 1, 0],
        )
        self.schedule[: len(made)] = made
        self.schedule[len(made) :] = 0


class Implementation:
    """FLASH_ATTN's implementation."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.scale, self.window, self.head_size = scale, sliding_window, head_size
        self.softcap, self.sinks = logits_soft_cap, sinks

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: BuiltMetadata,
        output: torch.Tensor,
    ) -> torch.Tensor:
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        common = attn_metadata.common
        attention(
            q=query[: common.num_actual_tokens],
            k=keys,
            v=values,
            out=output[: common.num_actual_tokens],
            cu_seqlens_q=common.query_start_loc,
            seqused_k=common.seq_lens,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            block_table=common.block_table_tensor,
            softmax_scale=self.scale,
            causal=common.causal,
            window_size=None if self.window is None else [self.window - 1, 0],
            softcap=self.softcap or 0,
            scheduler_metadata=attn_metadata.schedule,
            s_aux=self.sinks,
        )
        return output


class Attention:
    """A layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        cache_config: Any = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
    ) -> None:
        if head_size % 4:
            raise ValueError(f"FLASH_ATTN does not support heads of {head_size}")
        context = CURRENT[-1].compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"Duplicate layer name: {prefix}")
        context[prefix] = self
        self.layer_name = prefix
        window = per_layer_sliding_window
        self.impl = Implementation(num_heads, head_size, scale, num_kv_heads or num_heads, None, window, "auto")

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return SimpleNamespace(
            block_size=vllm_config.cache_config.block_size, head_size=self.impl.head_size, window=self.impl.window
        )

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_builder_cls=lambda: Builder)


@dataclass
class Seam:
    """A name of vLLM that the adapter uses, with the parameters or fields that it needs there."""

    module: str
    name: str
    needs: frozenset[str] = field(default_factory=frozenset)


def seams() -> list[Seam]:
    """Return what has to be in vLLM."""
    common = frozenset(each.name for each in fields(CommonAttentionMetadata))
    given = frozenset(each.name for each in fields(EngineArgs))
    layer = frozenset(("num_heads", "head_size", "scale", "cache_config", "per_layer_sliding_window", "prefix"))
    return [
        Seam("vllm.config", "CUDAGraphMode"),
        Seam("vllm.config", "set_current_vllm_config", frozenset(("vllm_config",))),
        Seam("vllm.engine.arg_utils", "EngineArgs", given),
        Seam("vllm.model_executor.layers.attention", "Attention", layer),
        Seam("vllm.v1.attention.backend", "CommonAttentionMetadata", common),
    ]


@contextmanager
def stand_in(version: tuple[int, int, int] = (0, 33, 0)) -> Iterator[None]:
    """Put it where vLLM would be imported from; the adapter's modules are imported anew."""
    modules: dict[str, Any] = {}
    for each in seams():
        parts = each.module.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            modules.setdefault(name, ModuleType(name))
        setattr(modules[each.module], each.name, globals()[each.name])
    modules["vllm"].__version_tuple__, modules["vllm"].__version__ = version, ".".join(map(str, version))
    before = {name: sys.modules.pop(name, None) for name in (*modules, *ADAPTER)}
    sys.modules.update(modules)
    try:
        yield
    finally:
        # Nothing else is taken back: what was imported meanwhile stays imported.
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
