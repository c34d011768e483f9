"""vLLM's FLASH_ATTN and TRITON_ATTN from an unpacked wheel on a CPU, for recorded graphs.

vLLM's configuration, layers, metadata builders and implementations run as they are. Triton's kernels are interpreted. Of
FlashAttention, which is compiled, two functions are stand-ins with what matters here: its schedule is computed ahead of
the call, from the lengths at that time, and its output has the rows of requests only.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from capture_planner.modes import GraphSupport, Role
from capture_planner.records.backend import Attention, Support
from capture_planner.records.environment import Environment
from capture_planner_vllm.attention_backend import VllmAttention
from support.files import module_at

configs = module_at(Path(__file__).with_name("vllm_config.py"))
BACKENDS = "vllm.v1.attention.backends"


class InterpretedAttention(VllmAttention):
    """One of vLLM's backends, said to run here."""

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        return Support(level=GraphSupport.ALWAYS, reason="its kernels are interpreted")

    def _refusal(self, model: Attention, environment: Environment) -> str | None:
        return None


class AttentionOracle(configs.VllmOracle):  # type: ignore[misc,name-defined]
    """vLLM on a pretended H100 whose kernels run on the CPU; there is one in a process."""

    def __init__(self, wheel: Path) -> None:
        # Read when a kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
        super().__init__(wheel)
        self._machine.name, self._machine.memory, self._machine.multiprocessors = "H100", 80 << 30, 132
        from vllm.v1.attention.backends import flash_attn, triton_attn

        triton_attn.unified_attention = recorded(triton_attn.unified_attention)
        flash_attn.flash_attn_varlen_func = recorded(varlen_attention)
        flash_attn.get_scheduler_metadata = schedule

    def _provide_triton(self) -> None:
        import triton
        import triton.language as tl

        constants = {"LOG2E": math.log2(math.e), "LOGE2": math.log(2)}
        configs.stubs.provide("vllm.triton_utils", HAS_TRITON=True, triton=triton, tl=tl, **constants)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let vLLM import what it still needs, and compute with NaN in silence."""
        with configs.stubs.installed(self._wheel, "vllm"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield


# A recorded graph holds torch operators: this one calls any function on tensors, with the other arguments as they were.
_LIBRARY = torch.library.Library("capture_planner_oracle", "DEF")
_LIBRARY.define("call(Tensor(a!)[] tensors, int number) -> ()")
_CALLS: list[Callable[[list[torch.Tensor]], None]] = []
_LIBRARY.impl("call", lambda tensors, number: _CALLS[number](tensors), "CPU")


def recorded(function: Callable[..., object]) -> Callable[..., None]:
    """Return a function that a recorded graph calls again at each replay, as a CUDA graph launches a kernel."""

    def call(*args: Any, **kwargs: Any) -> None:
        values, tree = pytree.tree_flatten((args, kwargs))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]

        def run(given: list[torch.Tensor]) -> None:
            rest = iter(given)
            filled = [next(rest) if isinstance(value, torch.Tensor) else value for value in values]
            args, kwargs = pytree.tree_unflatten(filled, tree)
            function(*args, **kwargs)

        _CALLS.append(run)
        torch.ops.capture_planner_oracle.call(tensors, len(_CALLS) - 1)

    return call


def schedule(*, batch_size: int, cache_seqlens: torch.Tensor, **rest: Any) -> torch.Tensor:
    """Stand for FlashAttention 3's schedule, of its size: what a call does for each request."""
    padded = -(-batch_size // 4) * 4
    return torch.nn.functional.pad(cache_seqlens[:batch_size], (1, padded * 4 - batch_size))


def varlen_attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: list[int] | None,
    softcap: float,
    scheduler_metadata: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> None:
    """Attend as FlashAttention does; keys that the schedule or ``max_seqlen_k`` do not cover are not seen."""
    assert causal and not softcap and s_aux is None
    starts, lengths, group = cu_seqlens_q.tolist(), seqused_k.tolist(), q.shape[1] // k.shape[2]
    window = window_size[0] if window_size and window_size[0] >= 0 else None
    for row, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        length, tokens = min(lengths[row], max_seqlen_k), min(last - first, max_seqlen_q)
        if scheduler_metadata is not None:
            length = min(length, int(scheduler_metadata[1 + row]))
        if not tokens or not length:
            continue
        pages = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (
            each[pages].flatten(0, 1)[:length].repeat_interleave(group, dim=1).double().transpose(0, 1)
            for each in (k, v)
        )
        scores = q[first : first + tokens].double().transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
        position = torch.arange(length - (last - first), length)[:tokens, None]
        distance = position - torch.arange(length)
        hidden = distance < 0 if window is None else (distance < 0) | (distance > window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[first : first + tokens] = (weights @ values).transpose(0, 1).to(out.dtype)
