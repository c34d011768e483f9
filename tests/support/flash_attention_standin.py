"""Stand-ins for the FlashAttention libraries: they compute, check how they are called, and leave NaN
wherever a real one writes nothing.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn_out


class Libraries:
    """The four modules, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.schedules = 0

    def _attend(
        self, query: Any, keys: Any, values: Any, starts: Any, lengths: Any, table: Any, **how: Any
    ) -> torch.Tensor:
        """Attend row by row in float32; rows that no request owns stay NaN."""
        assert all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in (starts, lengths, table))
        assert query.dtype == keys.dtype == values.dtype
        assert (len(starts) - 1, len(lengths)) == (len(table), len(table))
        left, right = how["window"]
        group = query.shape[1] // keys.shape[2]
        out = torch.full_like(query, math.nan)
        for row, (first, last) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
            length = int(lengths[row])
            pages = table[row, : -(-length // keys.shape[1])].long()
            k, v = (t[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for t in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), k) * how["scale"]
            if how.get("softcap"):
                scores = how["softcap"] * torch.tanh(scores / how["softcap"])
            at, key = torch.arange(length - (last - first), length)[:, None], torch.arange(length)
            seen = torch.ones(last - first, length, dtype=torch.bool)
            seen &= (key <= at) if how["causal"] else True
            seen &= (key >= at - left) if left >= 0 else True
            seen &= (key <= at + right) if right >= 0 else True
            scores = scores.masked_fill(~seen, -math.inf)
            if how.get("sinks") is not None:
                sinks = how["sinks"].float()[:, None, None].expand(-1, last - first, 1)
                scores = torch.cat([scores, sinks], -1)
            out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v).to(out.dtype)
        return out

    def fa4(self) -> ModuleType:
        """Stand in for ``flash_attn.cute`` 4.0.0b36."""

        def flash_attn_varlen_func(
            q, k, v, *, cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            window_size, softcap, learnable_sink, num_splits,
        ):  # fmt: skip
            assert num_splits == 1, "SplitKV not supported on SM 9.0"
            assert all(side is None or side >= 0 for side in window_size)
            self.calls.append({"max_q": max_seqlen_q, "max_k": max_seqlen_k, "splits": num_splits})
            window = [-1 if side is None else side for side in window_size]
            how = {"scale": softmax_scale, "causal": causal, "softcap": softcap, "sinks": learnable_sink}
            return self._attend(q, k, v, cu_seqlens_q, seqused_k, page_table, window=window, **how), None

        return _module("flash_attn.cute", flash_attn_varlen_func)

    def fa3(self) -> ModuleType:
        """Stand in for ``flash_attn_interface`` 3, built with sinks."""

        def get_scheduler_metadata(
            batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, *,
            qkv_dtype, cu_seqlens_q, page_size, causal, window_size, num_splits,
        ):  # fmt: skip
            assert num_splits > 0
            self.schedules += 1
            self._planned = (batch_size, max_seqlen_q, max_seqlen_k, causal, window_size, num_splits)
            vectors = 3 if window_size == (-1, -1) else 2
            made = torch.full((1 + vectors * -(-batch_size // 4) * 4,), self.schedules, dtype=torch.int32)
            self._size = len(made)
            return made

        def flash_attn_with_kvcache(
            q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
            window_size, softcap, scheduler_metadata, num_splits, s_aux=None,
        ):  # fmt: skip
            width = page_table.shape[1] * k_cache.shape[1]
            held = None
            if scheduler_metadata is not None:
                assert self._planned == (len(page_table), max_seqlen_q, width, causal, window_size, num_splits)
                assert (len(scheduler_metadata), softcap) == (self._size, 0.0)
                assert (scheduler_metadata == self.schedules).all(), "a stale schedule"
                held = scheduler_metadata.data_ptr()
            self.calls.append({"max_q": max_seqlen_q, "max_k": width, "splits": num_splits, "schedule": held})
            how = {"scale": softmax_scale, "causal": causal, "softcap": softcap, "sinks": s_aux}
            return self._attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, window=window_size, **how)

        return _module("flash_attn_interface", get_scheduler_metadata, flash_attn_with_kvcache)

    def fa2(self) -> ModuleType:
        """Stand in for ``flash_attn`` 2."""

        def flash_attn_with_kvcache(
            q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal, window_size, softcap,
            num_splits,
        ):  # fmt: skip
            assert k_cache.shape[1] % 256 == 0
            rows, length = q.shape[:2]
            # The real one has no starts: a padded row has queries, and zeros come out of it.
            real = torch.where(cache_seqlens > 0, length, 0)
            starts = torch.tensor([0, *real.cumsum(0).tolist()], dtype=torch.int32)
            self.calls.append({"splits": num_splits, "rows": rows})
            how = {"scale": softmax_scale, "causal": causal, "softcap": softcap, "window": window_size}
            out = self._attend(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, **how)
            return out.nan_to_num(0.0).unflatten(0, (rows, length))

        def flash_attn_varlen_func(
            q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
            window_size, softcap, block_table,
        ):  # fmt: skip
            assert k.shape[1] % 256 == 0
            self.calls.append({"max_q": max_seqlen_q, "max_k": max_seqlen_k})
            how = {"scale": softmax_scale, "causal": causal, "softcap": softcap, "window": window_size}
            return self._attend(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, **how)

        return _module("flash_attn", flash_attn_with_kvcache, flash_attn_varlen_func)

    def torch(self) -> ModuleType:
        """Stand in for the kernel of ``torch.nn.attention.varlen``, under the signature of the real one."""

        def attend(*args: Any, **kwargs: Any) -> None:
            call = inspect.signature(varlen_attn_out).bind(*args, **kwargs).arguments
            query, key = call["query"], call["key"]
            assert key.shape[1] % 256 == 0
            assert call["enable_gqa"] or query.shape[1] == key.shape[2]
            assert torch.equal(call["cu_seq_k"].diff(), call["seqused_k"])
            self.calls.append({"max_q": call["max_q"], "max_k": call["max_k"], "splits": call["num_splits"]})
            left, right = call["window_size"]
            tensors = (query, key, call["value"], call["cu_seq_q"], call["seqused_k"], call["block_table"])
            how = {"scale": call["scale"], "causal": right == 0, "window": (left, right)}
            call["out"].copy_(self._attend(*tensors, **how))

        attend.__signature__ = inspect.signature(varlen_attn_out)  # type: ignore[attr-defined]
        attend.__name__ = "varlen_attn_out"
        return _module("torch.nn.attention.varlen", attend)


def _module(name: str, *functions: Callable[..., Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update({function.__name__: function for function in functions})
    return module


@contextmanager
def installed() -> Iterator[Libraries]:
    """Put the stand-ins where the executor imports from."""
    found = Libraries()
    with pytest.MonkeyPatch.context() as patch:
        for module in (found.fa4(), found.fa3(), found.fa2(), found.torch()):
            patch.setitem(sys.modules, module.__name__, module)
        yield found
