"""Operators in recorded graphs: their traits, overloads that write into given tensors, collectives, and refusals."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import torch

from capture_planner.errors import CaptureError
from capture_planner_runner.models.host_reads import is_mask

aten = torch.ops.aten

# Traits ------------------------------------------------------------------------------------

_CONSTANTS = frozenset({aten.lift.default, aten.lift_fresh.default})
_ALLOCATIONS = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


@attrs.frozen(kw_only=True)
class Traits:
    """Properties of an operator for a recording."""

    is_composite: bool
    """Composed of other operators on a CPU; those are recorded."""
    may_wait: bool
    """Its host code may wait for device values, depending on its arguments."""
    is_unfinished: bool
    """Its result arrives later."""
    changes_view: bool
    """It changes how a tensor looks at memory."""
    is_constant: bool
    """It makes a tensor from numbers of the program."""
    may_draw: bool
    """It may draw random numbers, depending on its arguments."""
    is_allocation: bool
    """It allocates memory without writing to it."""
    has_effect: bool
    """It writes into its arguments, or talks to other ranks."""


@functools.cache
def traits(func: Any) -> Traits:
    """Return the traits of an operator, computed once."""

    def has(key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))

    reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    packets = (aten.index, aten.index_put, aten.index_put_, aten.repeat_interleave, aten._linalg_check_errors)
    return Traits(
        is_composite=has("CompositeImplicitAutograd") and not has("CPU"),
        may_wait=bool(reads) or func.overloadpacket in packets,
        is_unfinished=is_unfinished(func),
        changes_view=torch.Tag.inplace_view in func.tags,
        is_constant=func in _CONSTANTS,
        may_draw=torch.Tag.nondeterministic_seeded in func.tags,
        is_allocation=func in _ALLOCATIONS,
        has_effect=func._schema.is_mutable or is_collective(func),
    )


# Overloads that write into given tensors ----------------------------------------------------

_OUT_DIFFERS = frozenset({aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default})


@attrs.frozen
class OutOverload:
    """An overload that writes into given tensors."""

    op: Any
    names: tuple[str, ...]
    """The arguments that it writes into, one for each result."""


@functools.cache
def out_overload(func: Any) -> OutOverload | None:
    """Return the overload that does the same into given tensors, or None where that is not sure.

    Some operators that are neither core nor pointwise compute other values then, in the last bit or
    completely: ``_linalg_svd``, ``linalg_qr``, ``binary_cross_entropy`` (torch 2.13).
    """
    is_common = torch.Tag.core in func.tags or torch.Tag.pointwise in func.tags
    if not is_common or func in _OUT_DIFFERS or func._schema.is_mutable:
        return None

    def signature(arguments: Any) -> list[tuple[str, str, bool]]:
        return [(a.name, str(a.type), a.kwarg_only) for a in arguments if not a.is_out]

    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [argument for argument in other._schema.arguments if argument.is_out]
        if (
            len(outs) == len(func._schema.returns)
            and all(str(argument.type) == "Tensor" for argument in outs)
            and signature(other._schema.arguments) == signature(func._schema.arguments)
        ):
            return OutOverload(other, tuple(argument.name for argument in outs))
    return None


# Collectives: on a GPU their wait is an edge of the graph; here each replay waits on the host ---


def is_collective(operator: Any) -> bool:
    """Say whether an operator is a collective of ``torch.distributed``."""
    return bool(operator.namespace == "c10d")


def is_unfinished(operator: Any) -> bool:
    """Return True for a functional collective: its result arrives later."""
    return bool(operator.namespace == "_c10d_functional")


def plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without groups and reductions, which are objects that differ between processes."""
    return tuple(each for each in arguments if not isinstance(each, torch.ScriptObject))


def run_collective(operator: Any, arguments: Any, named: Any) -> None:
    """Run it, and wait until its tensors hold the result."""
    result = operator._op(*arguments, **named)
    work = result[-1] if isinstance(result, tuple | list) else result
    work.wait()


# Refusals ----------------------------------------------------------------------------------

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
