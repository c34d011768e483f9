"""The attention interface of transformers, and what is looked at when a model is loaded.

The library calls one registered attention function with the keyword arguments of the forward. So
``attend`` travels with the call, and nothing here is global but the name of that function.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from capture_planner.errors import RunError
from capture_planner.plugins.backend import Scoring
from capture_planner_runner.models.host_reads import reads_host
from capture_planner_runner.models.protocols import Attend

INTERFACE = "capture_planner"
"""The name of the attention implementation, and of the keyword argument that carries a ``Call``."""

SUPPORTED = "supported: causal decoders of full or sliding-window softmax attention, through the attention interface"


@attrs.frozen(eq=False)
class Call:
    """Arguments of one forward for each of its attention layers."""

    attend: Attend
    windows: tuple[int | None, ...]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    capture_planner: Call | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with ``query [1, num_heads, T, head_dim]``; return ``[1, T, num_heads, head_dim]``."""
    layer = getattr(module, "layer_idx", None)
    where = f"attention layer {layer} ({type(module).__name__})"
    if capture_planner is None or layer is None:
        raise RunError(f"{where} is not given the arguments of the forward, or has no index; {SUPPORTED}")
    if not getattr(module, "is_causal", True):
        raise RunError(f"{where} is not causal; {SUPPORTED}")
    if attention_mask is not None:
        raise RunError(f"{where} has a mask of its own; {SUPPORTED}")
    if key.shape[-1] != value.shape[-1]:
        raise RunError(
            f"{where} has keys of width {key.shape[-1]} and values of width {value.shape[-1]}, as latent "
            f"attention has; {SUPPORTED}"
        )
    window = capture_planner.windows[layer]
    if kwargs.get("sliding_window", window) != window:
        raise RunError(f"{where} asks for a window of {kwargs['sliding_window']}, its configuration for {window}")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    scoring = Scoring(scale=scale, softcap=softcap, sinks=s_aux)
    queries, keys, values = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    return capture_planner.attend(layer, queries, keys, values, scoring).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attention)


class RefuseHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that read device values on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if reads_host(func, args):
            raise RunError(f"its forward reads a device value on the host ({func}), which no graph can hold")
        return func(*args, **(kwargs or {}))


class Probe:
    """An ``attend`` that notes what each layer brings, and answers zeros."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int]] = {}
        self.sinks = False

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        if layer in self.seen:
            raise RunError(f"layer {layer} attends twice in one forward; {SUPPORTED}")
        self.seen[layer] = (query.shape[1], key.shape[1], query.shape[2])
        self.sinks = self.sinks or scoring.sinks is not None
        return torch.zeros_like(query)

    def recur(self, layer: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        """Refuse: no layer of transformers asks for it."""
        raise RunError(f"recurrent layer {layer} runs in the runner; {SUPPORTED}")

    @property
    def real(self) -> torch.Tensor:
        """Refuse: layers of transformers do not know which rows are padding."""
        raise RunError(f"an operator asks which rows are padding; {SUPPORTED}")
