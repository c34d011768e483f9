"""One adapter per library: the differences between the libraries' attention calls stay in this module.

An adapter gets lengths and pages on the device, and host numbers that do not depend on the batch.
Memory that it allocates under capture belongs to the graph's pool.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, Protocol

import attrs
import torch
from torch.nn.functional import pad

from capture_planner.plugins.backend import Attention
from capture_planner_flash_attention.libraries import FA2, FA3, FA4, TORCH, Library


@attrs.frozen(kw_only=True, eq=False)
class AttentionCall:
    """The arguments of one layer's attention, common to all libraries. All tensors are on the device."""

    query: torch.Tensor
    """``[num_tokens, num_heads, head_dim]``; rows past ``cu_seqlens_q[-1]`` are padding."""
    keys: torch.Tensor
    """``[num_pages, page_size, num_kv_heads, head_dim]``."""
    values: torch.Tensor
    """``[num_pages, page_size, num_kv_heads, head_dim]``."""
    cu_seqlens_q: torch.Tensor
    """``int32[num_reqs + 1]``: where each request's queries start."""
    seqused_k: torch.Tensor
    """``int32[num_reqs]``: tokens in each sequence, the query included."""
    page_table: torch.Tensor
    """``int32[num_reqs, pages]``: page numbers, 0 for the null page."""
    max_seqlen_q: int
    """Tokens of the longest query."""
    max_seqlen_k: int
    """Tokens of the longest sequence."""
    query_len: int | None
    """Rows of ``query`` per request where all requests, padded ones included, have equally many."""
    num_splits: int
    """Maximum number of parts of a KV sequence; 0 (not under capture) lets the library choose."""
    scale: float
    """Factor of the scores, before the softcap."""
    softcap: float | None
    sinks: torch.Tensor | None
    """``[num_heads]``: one logit per head."""
    schedule: torch.Tensor | None = None
    """``int32[n]``: the tile schedule, where the library makes one ahead of the call."""


class AttentionKernel(Protocol):
    """One library, for one group of layers."""

    softcap: bool
    """Whether it takes a softcap."""
    sinks: bool
    """Whether it takes attention sinks."""

    def run(self, call: AttentionCall, out: torch.Tensor) -> torch.Tensor:
        """Attend, and return ``[num_tokens, num_heads, head_dim]``: ``out`` if the library can write to it.

        Rows past ``cu_seqlens_q[-1]`` are undefined.
        """

    def schedule(self, call: AttentionCall) -> torch.Tensor | None:
        """Return the tile schedule of a call without softcap, ``int32[n]``, or None if it has no schedule."""


class FlashAttention4:
    """``flash_attn.cute``: no output argument; a single split, the maximum on SM90 (4.0.0b36)."""

    softcap = sinks = True

    def __init__(self, module: Any, attention: Attention) -> None:
        self._attend = module.flash_attn_varlen_func
        self._causal = attention.causal
        left, right = _window(attention)
        # Here None is what -1 is to the other libraries: no bound on that side.
        self._window = None if left < 0 else left, None if right < 0 else right

    def run(self, call: AttentionCall, out: torch.Tensor) -> torch.Tensor:
        """See ``AttentionKernel``."""
        result, _ = self._attend(
            call.query,
            call.keys,
            call.values,
            cu_seqlens_q=call.cu_seqlens_q,
            seqused_k=call.seqused_k,
            page_table=call.page_table,
            max_seqlen_q=call.max_seqlen_q,
            max_seqlen_k=call.max_seqlen_k,
            softmax_scale=call.scale,
            causal=self._causal,
            window_size=self._window,
            softcap=call.softcap or 0.0,
            learnable_sink=call.sinks,
            num_splits=1,
        )
        return _tensor(result)

    def schedule(self, call: AttentionCall) -> None:
        """None: blocks find their request on the device."""


class FlashAttention3:
    """``flash_attn_interface``: no output argument; the width of the page table is its longest KV."""

    softcap = True

    def __init__(self, module: Any, attention: Attention) -> None:
        self._attend, self._schedule = module.flash_attn_with_kvcache, module.get_scheduler_metadata
        self._attention = attention
        # Upstream builds take no sinks. vLLM's (s_aux) and SGLang's (sinks) do.
        self._sinks = _parameter(self._attend, "s_aux", "sinks")
        self.sinks = self._sinks is not None
        self._mask = {"causal": attention.causal, "window_size": _local_window(attention)}

    def run(self, call: AttentionCall, out: torch.Tensor) -> torch.Tensor:
        """See ``AttentionKernel``."""
        sinks = {} if self._sinks is None or call.sinks is None else {self._sinks: call.sinks}
        result = self._attend(
            call.query,
            call.keys,
            call.values,
            cache_seqlens=call.seqused_k,
            page_table=call.page_table,
            cu_seqlens_q=call.cu_seqlens_q,
            max_seqlen_q=call.max_seqlen_q,
            softmax_scale=call.scale,
            softcap=call.softcap or 0.0,
            scheduler_metadata=call.schedule if call.softcap is None else None,  # a softcap has other tiles
            num_splits=call.num_splits,
            **self._mask,
            **sinks,
        )
        return _tensor(result)

    def schedule(self, call: AttentionCall) -> torch.Tensor:
        """Schedule the tiles, from the same numbers that ``run`` passes.

        Layers with a softcap have tiles of another size, so the captured call schedules those itself.
        """
        # `run` has no longest KV to pass: there it is the width of the page table, so it must be the same here.
        num_reqs, pages = call.page_table.shape
        page_size = call.keys.shape[1]
        metadata = self._schedule(
            num_reqs,
            call.max_seqlen_q,
            pages * page_size,
            self._attention.num_heads,
            self._attention.num_kv_heads,
            self._attention.head_dim,
            call.seqused_k,
            qkv_dtype=call.keys.dtype,
            cu_seqlens_q=call.cu_seqlens_q,
            page_size=page_size,
            num_splits=call.num_splits,
            **self._mask,
        )
        return _tensor(metadata)


class FlashAttention2:
    """``flash_attn``: no output argument; uniform batches take the call that has a number of splits."""

    softcap, sinks = True, False

    def __init__(self, module: Any, attention: Attention) -> None:
        self._uniform, self._mixed = module.flash_attn_with_kvcache, module.flash_attn_varlen_func
        self._mask = {"causal": attention.causal, "window_size": _local_window(attention)}

    def run(self, call: AttentionCall, out: torch.Tensor) -> torch.Tensor:
        """See ``AttentionKernel``."""
        shared = {
            "block_table": call.page_table,
            "softmax_scale": call.scale,
            "softcap": call.softcap or 0.0,
            **self._mask,
        }
        # The call for mixed batches takes no number of splits.
        if call.query_len is not None:
            rows = call.query.reshape(-1, call.query_len, *call.query.shape[1:])
            result = self._uniform(
                rows, call.keys, call.values, cache_seqlens=call.seqused_k, num_splits=call.num_splits, **shared
            )
            return _tensor(result).flatten(0, 1)
        result = self._mixed(
            call.query,
            call.keys,
            call.values,
            cu_seqlens_q=call.cu_seqlens_q,
            cu_seqlens_k=_starts(call.seqused_k),  # with pages, only their differences count
            max_seqlen_q=call.max_seqlen_q,
            max_seqlen_k=call.max_seqlen_k,
            **shared,
        )
        return _tensor(result)

    def schedule(self, call: AttentionCall) -> None:
        """None: its grid follows from host numbers alone."""


class TorchVarlen:
    """``torch.nn.attention.varlen``: writes to ``out``; takes neither softcap nor sinks."""

    softcap = sinks = False

    def __init__(self, module: Any, attention: Attention) -> None:
        self._attend = module.varlen_attn_out
        # Pages came with torch 2.13; an AttributeError is how `load` reports a version without the call.
        if _parameter(self._attend, "block_table") is None:
            raise AttributeError("varlen_attn_out takes no block_table")
        self._window = _window(attention)

    def run(self, call: AttentionCall, out: torch.Tensor) -> torch.Tensor:
        """See ``AttentionKernel``."""
        self._attend(
            out,
            call.query,
            call.keys,
            call.values,
            call.cu_seqlens_q,
            # The kernel reads seqused_k, but the binding requires these offsets too.
            _starts(call.seqused_k),
            call.max_seqlen_q,
            call.max_seqlen_k,
            scale=call.scale,
            window_size=self._window,
            enable_gqa=call.query.shape[1] != call.keys.shape[2],
            seqused_k=call.seqused_k,
            block_table=call.page_table,
            num_splits=1,
        )
        return out

    def schedule(self, call: AttentionCall) -> None:
        """None: its grid follows from host numbers alone."""


_KERNELS: dict[Library, type[FlashAttention2 | FlashAttention3 | FlashAttention4 | TorchVarlen]] = {
    FA2: FlashAttention2,
    FA3: FlashAttention3,
    FA4: FlashAttention4,
    TORCH: TorchVarlen,
}


def load(library: Library, attention: Attention) -> AttentionKernel:
    """Import a library and adapt it to these layers.

    Raises ``ImportError`` if it is not installed, and ``AttributeError`` if the installed version lacks
    the calls.
    """
    return _KERNELS[library](import_module(library.module), attention)


def _window(attention: Attention) -> tuple[int, int]:
    """Return how many keys a query sees to the left and right of its own position; -1: all."""
    left = -1 if attention.window is None else attention.window - 1
    return left, 0 if attention.causal else left


def _local_window(attention: Attention) -> tuple[int, int]:
    """Return ``_window`` for libraries with a separate causal flag, to which a right side of 0 is a window."""
    return (-1, -1) if attention.window is None else _window(attention)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Return ``int32[num_reqs + 1]``: the start of each sequence if they were contiguous."""
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _parameter(function: Any, *names: str) -> str | None:
    """Return the first of ``names`` that is a parameter of the function, or None."""
    return next((name for name in names if name in inspect.signature(function).parameters), None)


def _tensor(result: Any) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result
