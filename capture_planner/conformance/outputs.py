"""Attention outputs, marked before attention and copied after it, inside the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from capture_planner.modes import Role
from capture_planner.runtime.eager_check.agreement import INTEGERS
from capture_planner.runtime.execution.role import RoleRun
from capture_planner.runtime.executor import Scoring


class Outputs:
    """Copies of the attention outputs of each layer, to see which rows were written."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Role, int], torch.Tensor] = {}

    def watch(self, role: RoleRun) -> None:
        """Wrap the attention of a role; call it before the capture."""
        role.attention.attend = functools.partial(self._attend, role, role.attention.attend)  # type: ignore[method-assign]

    def of(self, role: RoleRun) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield, for each layer that attended, its output ``[rows, width]`` of the last forward."""
        rows = role.attention.seen_rows()
        for (of, layer), copy in self._copies.items():
            if of is role.role:
                yield layer, copy[:rows]

    def _attend(
        self,
        role: RoleRun,
        inner: Callable[..., None],
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        scoring: Scoring,
    ) -> None:
        out.view(INTEGERS[out.itemsize]).fill_(mark(out))
        inner(layer, query, keys, values, out, scoring)
        key = role.role, layer
        if key not in self._copies:
            self._copies[key] = out.new_zeros(role.fields.capacity.tokens, out[0].numel())
        self._copies[key][: len(out)].copy_(out.flatten(1))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers that are equal where bits are, NaNs included."""
    return tensor.contiguous().view(INTEGERS[tensor.itemsize])


def mark(tensor: torch.Tensor) -> int:
    """Return the integer that an output holds before attention, bit by bit: no kernel computes it."""
    return int.from_bytes(b"\x7b" * tensor.itemsize, "little")
