"""What attention leaves in its outputs, marked before and kept behind, inside the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from capture_planner.modes import Role
from capture_planner.runtime.eager_check.agreement import INTEGERS
from capture_planner.runtime.execution.role import RoleRun
from capture_planner.runtime.executor import Scoring


class Outputs:
    """What attention left in its outputs: marked before it, and copied behind it, inside the graph."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Role, int], torch.Tensor] = {}

    def watch(self, role: RoleRun) -> None:
        """Begin, before anything is captured."""
        role.attention.attend = functools.partial(self._attend, role, role.attention.attend)  # type: ignore[method-assign]

    def of(self, role: RoleRun) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield, for each layer that attended, its output ``[rows, width]`` of the last forward."""
        rows = role.attention.seen_rows()
        for (of, layer), kept in self._kept.items():
            if of is role.role:
                yield layer, kept[:rows]

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
        if key not in self._kept:
            self._kept[key] = out.new_zeros(role.fields.capacity.tokens, out[0].numel())
        self._kept[key][: len(out)].copy_(out.flatten(1))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers that are equal where bits are, NaNs included."""
    return tensor.contiguous().view(INTEGERS[tensor.itemsize])


def mark(tensor: torch.Tensor) -> int:
    """Return the integer whose bits stand in an output before attention: a number that no kernel makes."""
    return int.from_bytes(b"\x7b" * tensor.itemsize, "little")
