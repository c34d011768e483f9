"""A step that is launched, and the values of it that the device still works out."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.runtime.execution.inputs import Array, StepInputs
from capture_planner.runtime.serving.speculative import Verification
from capture_planner.runtime.serving.states import ScheduledBatch

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


@attrs.frozen(kw_only=True, eq=False)
class PendingStep:
    """A step that is launched, whose tokens are not read yet."""

    index: int
    scheduled: ScheduledBatch
    inputs: StepInputs
    started: float
    tokens: OnItsWay
    """``int64[T]``: what the target says after each row that is read."""
    draft_decodes: Dispatch | None
    """What serves its draft decodes; None where there are none."""
    proposed: OnItsWay | None
    """``int64[states + 1, K]``, where the drafter is launched too."""
    promised: Verification | None
    """What the step counts, where that is known before its tokens are."""
    is_on_device: bool
    """Whether the next step can be launched before the host has read anything of this one."""
