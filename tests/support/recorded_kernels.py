"""Kernels for recorded graphs: any function as one operator, and FlashAttention 3 as far as its calls matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

_LIBRARY = torch.library.Library("capture_planner_kernels", "DEF")
_LIBRARY.define("call(Tensor(a!)[] tensors, int number) -> ()")
_CALLS: list[Callable[[list[torch.Tensor]], None]] = []
_LIBRARY.impl("call", lambda tensors, number: _CALLS[number](tensors), "CPU")


def recorded(function: Callable[..., object]) -> Callable[..., None]:
    """Return a function that a recorded graph calls again at each replay, as a CUDA graph launches a kernel.

    The tensors among its arguments are the graph's; all else is as it was at the capture.
    """

    def call(*args: Any, **kwargs: Any) -> None:
        values, tree = pytree.tree_flatten((args, kwargs))
        made = [value for value in values if isinstance(value, torch.Tensor)]
        # Without the tensors: what a capture made must not live on in the call.
        rest = [torch.Tensor if isinstance(value, torch.Tensor) else value for value in values]

        def run(tensors: list[torch.Tensor]) -> None:
            given = iter(tensors)
            filled = [next(given) if value is torch.Tensor else value for value in rest]
            args, kwargs = pytree.tree_unflatten(filled, tree)
            function(*args, **kwargs)

        _CALLS.append(run)
        torch.ops.capture_planner_kernels.call(made, len(_CALLS) - 1)

    return call


def swizzles(max_seqlen_q: int, max_seqlen_k: int, headdim: int, causal: bool, window: Sequence[int] | None) -> bool:
    """Return whether FlashAttention 3's schedule has a list for swizzled heads.

    As ``mha_fwd_get_scheduler_metadata`` and ``mha_fwd`` derive it from the maxima, for a paged cache
    (hopper/flash_api.cpp of vllm-project/flash-attention, 617264c).
    """
    left, right = window or (-1, -1)
    left, right = -1 if left >= max_seqlen_k - 1 else left, -1 if right >= max_seqlen_q - 1 else right
    if max_seqlen_q == 1 and left == right == -1 and not 64 < headdim <= 128:
        causal = False
    return causal or left >= 0 or right >= 0


def schedule(
    *,
    batch_size: int,
    cache_seqlens: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    headdim: int,
    causal: bool = True,
    window_size: Sequence[int] | None = None,
    **rest: object,
) -> torch.Tensor:
    """Stand for FlashAttention 3's schedule: the length of each request, and, if heads are swizzled, a 1 for each.

    ``int32[1 + vectors * round_up(batch_size, 4)]``, with 2 or 3 vectors: the first is for lengths, the last for heads.
    """
    padded = -(-batch_size // 4) * 4
    vectors = torch.zeros(3, padded, dtype=torch.int32, device=cache_seqlens.device)
    vectors[0, :batch_size], vectors[2] = cache_seqlens[:batch_size], 1
    vectors = vectors[: 3 if swizzles(max_seqlen_q, max_seqlen_k, headdim, causal, window_size) else 2]
    return torch.nn.functional.pad(vectors.flatten(), (0, 1))


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
    **rest: object,
) -> None:
    """Attend as FlashAttention does. Rows that no request owns are left as they are.

    Rows beyond ``max_seqlen_q``, and keys beyond ``max_seqlen_k`` or the schedule, are left out;
    and requests for which a kernel that swizzles heads finds no heads in the schedule.
    """
    assert causal
    starts, lengths, group = cu_seqlens_q.tolist(), seqused_k.tolist(), q.shape[1] // k.shape[2]
    window = window_size[0] if window_size and window_size[0] >= 0 else None
    swizzled = swizzles(max_seqlen_q, max_seqlen_k, q.shape[2], causal, window_size)
    padded = -(-(len(starts) - 1) // 4) * 4
    for row, (first, last) in enumerate(pairwise(starts)):
        length, tokens = min(lengths[row], max_seqlen_k), min(last - first, max_seqlen_q)
        if scheduler_metadata is not None:
            length = min(length, int(scheduler_metadata[row]))
            if swizzled and not scheduler_metadata[2 * padded + row]:
                continue
        if not tokens or not length:
            continue
        pages = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (
            each[pages].flatten(0, 1)[:length].repeat_interleave(group, dim=1).double().transpose(0, 1)
            for each in (k, v)
        )
        scores = q[first : first + tokens].double().transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
        position = torch.arange(lengths[row] - (last - first), lengths[row])[:tokens, None]
        distance = position - torch.arange(length)
        hidden = distance < 0 if window is None else (distance < 0) | (distance > window)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(hidden, -torch.inf)
        if s_aux is not None:  # a logit of each head that has no value
            scores = torch.cat([scores, s_aux.double()[:, None, None].expand(-1, len(position), 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        out[first : first + tokens] = (weights @ values).transpose(0, 1).to(out.dtype)
