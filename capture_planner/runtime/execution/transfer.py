"""Values that a device still works out, brought to the host without stopping what follows them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from capture_planner.runtime.execution.inputs import Array

OnItsWay = Callable[[], Array]
"""Waits for values that a device still works out, and returns them."""


def on_its_way(tensor: torch.Tensor) -> OnItsWay:
    """Begin to bring a small tensor to the host, and return what waits for it."""
    if tensor.device.type == "cpu":
        here = tensor.numpy().copy()
        return lambda: here
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def arrived() -> Array:
        copied.synchronize()
        array: Array = pinned.numpy()
        return array

    return arrived
