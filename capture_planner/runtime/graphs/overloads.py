"""Overloads of operators that write into given tensors."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch

aten = torch.ops.aten

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

    Of operators that are neither core nor pointwise some compute otherwise then, to the last bit or
    altogether: ``_linalg_svd``, ``linalg_qr``, ``binary_cross_entropy`` (torch 2.13).
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
