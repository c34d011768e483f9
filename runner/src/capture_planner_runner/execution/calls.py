"""Calls that the layers of a model make in one forward: attention, recurrence, and the mask of real rows."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.plugins.backend import NULL_SLOT, Scoring


def _no_state(layer: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    raise RunError(f"recurrent layer {layer} has no state here; run the model without recurrent layers")


@attrs.frozen(eq=False)
class LayerCalls:
    """An ``Attend`` of one forward."""

    _attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, Scoring], torch.Tensor]
    _slots: torch.Tensor
    """``int64[T]``: the slots that the tokens are stored in; the null slot for padding."""
    _recur: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor] = _no_state

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        return self._attend(layer, query, keys, values, scoring)

    def recur(self, layer: int, inputs: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
        return self._recur(layer, inputs, decays)

    @property
    def real(self) -> torch.Tensor:
        # A graph pads tokens alone or requests too, and in both the slots of padding are filled.
        return self._slots != NULL_SLOT
