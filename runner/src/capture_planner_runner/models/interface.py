"""The attention interface of transformers, as the runner's models use it: what travels with the call of a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from capture_planner.errors import RunError
from capture_planner.plugins.backend import Scoring
from capture_planner_runner.models.protocols import Attend

INTERFACE = "capture_planner"
"""The name of the attention implementation, and of the keyword argument that carries a ``Call``."""

SUPPORTED = (
    "supported: causal decoders of full or sliding-window softmax attention, through the attention interface, and of "
    "Mamba-2 layers"
)


@attrs.frozen(eq=False)
class Call:
    """Arguments of one forward for each of its layers."""

    attend: Attend
    windows: Mapping[int, int | None]
    positions: torch.Tensor | None = None
    """``int64[T]``, for recurrent layers; None: there are none."""


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
    """Attend with ``query [1, num_heads, T, head_dim]``; return ``[1, T, num_heads, head_dim]``.

    The library calls one registered attention function with the keyword arguments of the forward. So ``attend``
    travels with the call, and nothing here is global but the name of this function.
    """
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
    # The plan has the windows of the configuration: with another one a layer would attend to other keys.
    window = capture_planner.windows[layer]
    if kwargs.get("sliding_window", window) != window:
        raise RunError(f"{where} asks for a window of {kwargs['sliding_window']}, its configuration for {window}")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    scoring = Scoring(scale=scale, softcap=softcap, sinks=s_aux)
    queries, keys, values = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    return capture_planner.attend(layer, queries, keys, values, scoring).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(INTERFACE, _attention)
