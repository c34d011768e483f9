"""What holds of an operator whatever its arguments are. It is asked at each call, and worked out once."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch

from capture_planner.runtime.graphs.collective import is_collective, is_unfinished

aten = torch.ops.aten

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
    """What a recording asks of an operator."""

    is_composite: bool
    """It is made of others on a CPU; then those are recorded."""
    may_wait: bool
    """Its host code may wait for device values: its arguments tell."""
    is_unfinished: bool
    """Its result arrives later."""
    changes_view: bool
    """It changes how a tensor looks at memory."""
    is_constant: bool
    """It makes a tensor of numbers that the program has."""
    may_draw: bool
    """It may draw random numbers: its arguments tell."""
    is_allocation: bool
    """It takes memory and writes nothing there."""
    has_effect: bool
    """It writes into its arguments, or talks to other ranks."""


@functools.cache
def traits(func: Any) -> Traits:
    """Return what holds of an operator."""

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
