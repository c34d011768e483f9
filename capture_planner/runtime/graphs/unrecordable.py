"""What no graph can hold: operators and tensors that a recorded graph refuses, and where the caller called them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from capture_planner.errors import CaptureError
from capture_planner.runtime.models.host_reads import is_mask

aten = torch.ops.aten

_OUR_FILES = (str(Path(torch.__file__).parent) + "/", str(Path(__file__).parent) + "/")


def check_host_sync(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse an operator whose host code waits for device values."""
    if torch.Tag.data_dependent_output in func.tags or func is aten._linalg_check_errors.default:
        raise refusal(func, "it reads a device value on the host", "keep values on the device")
    if func is aten.index.Tensor:
        is_dynamic = any(is_mask(index) for index in args[1])
    elif func.overloadpacket in (aten.index_put, aten.index_put_):
        is_dynamic = args[2].numel() != 1 and any(is_mask(index) for index in args[1])
    elif func is aten.repeat_interleave.Tensor:
        is_dynamic = kwargs.get("output_size") is None
    else:
        is_dynamic = torch.Tag.dynamic_output_shape in func.tags
    if is_dynamic:
        raise refusal(func, "a shape depends on device values", "select with torch.where or masked_fill")


def run_without_random(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator, and refuse it if it drew random numbers (with a dropout of 0 it does not)."""
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator))
    generator = next(given, torch.default_generator)
    before = generator.get_state()
    result = func(*args, **kwargs)
    if not torch.equal(before, generator.get_state()):
        raise refusal(func, "a replay would draw the same random numbers again", "sample outside")
    return result


def is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def describe(tensor: torch.Tensor) -> str:
    kind = "a conjugate or negated view" if tensor.is_conj() or tensor.is_neg() else type(tensor).__name__
    return f"{kind} of {tensor.dtype} and {tensor.layout} on {tensor.device}"


def refusal(func: object, why: str, remedy: str) -> CaptureError:
    return CaptureError(f"no graph can hold {func}{calling_line()}: {why}; {remedy}")


def calling_line() -> str:
    """Return where the caller's own code is: its innermost line outside torch and this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OUR_FILES):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
