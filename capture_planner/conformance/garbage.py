"""Overwrite, before a forward, everything that it must not depend on; mark attention outputs inside the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from capture_planner.modes import Role
from capture_planner.runtime.eager_check.agreement import INTEGERS
from capture_planner.runtime.execution.fields import Extents, poison, tensor_of
from capture_planner.runtime.execution.role import RoleRun

SOURCES = ("outputs", "pool", "workspace", "null page", "free pages", "padded rows")
"""Places of garbage, in addition to the fields, which go by their keys. Pages are the world's, rows the probe's; with
the pages go states: of the null row, and of rows that no request owns."""


class Garbage:
    """Writes garbage everywhere except to the ``spared`` sources."""

    def __init__(self, spared: Iterable[str] = ()) -> None:
        self._spared = frozenset(spared)
        self._turns: Counter[Role] = Counter()

    def before(self, role: RoleRun, *, filled: bool) -> None:
        """Overwrite outputs, pool and workspace; fields only if they are filled afterwards."""
        self._turns[role.role] += 1
        if not filled:
            self.fields(role)
        if "outputs" not in self._spared:
            for held in role.body.outputs():
                poison(tensor_of(held))
        if "pool" not in self._spared and role.pool is not None:
            role.pool.poison()
        if "workspace" not in self._spared:
            for group in role.groups:
                group.workspace.fill_(255)

    def fields(self, role: RoleRun, beyond: Extents | None = None) -> None:
        """Overwrite fields beyond some extents, or entirely, with the smallest number or the largest.

        Every third turn leaves them as earlier steps did. Each kind hides what the others show: a number below
        all bounds can mean "skip this row", a stale one is within bounds, and a runner that knows its fields
        to be overwritten cleans what it otherwise forgets. A turn is two forwards, so that one follows another
        undisturbed.
        """
        turn = self._turns[role.role] // 2 % 3
        if turn == 2:
            return
        for buffer in role.fields:
            if not buffer.is_frozen and buffer.key not in self._spared:
                rows = 0 if beyond is None else beyond.rows(buffer.field)
                (poison if turn else poison_high)(buffer.tensor[rows:])
                buffer.spoil()


def poison_high(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with the largest integer of the dtype."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        poison(tensor)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


class Outputs:
    """Copies of the attention outputs of each layer, to see which rows were written."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Role, int], torch.Tensor] = {}

    @contextmanager
    def marked(self, role: RoleRun, layer: int, out: torch.Tensor) -> Iterator[None]:
        """Mark an output before attention, and copy it afterwards; in a graph, at each replay."""
        out.view(INTEGERS[out.itemsize]).fill_(mark(out))
        yield
        key = role.role, layer
        if key not in self._copies:
            self._copies[key] = out.new_zeros(role.fields.capacity.tokens, out[0].numel())
        self._copies[key][: len(out)].copy_(out.flatten(1))

    def of(self, role: RoleRun) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield, for each layer that attended, its output ``[rows, width]`` of the last forward."""
        rows = role.attention.seen_rows()
        for (of, layer), copy in self._copies.items():
            if of is role.role:
                yield layer, copy[:rows]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers that are equal where bits are, NaNs included."""
    return tensor.contiguous().view(INTEGERS[tensor.itemsize])


def mark(tensor: torch.Tensor) -> int:
    """Return the integer that an output holds before attention, bit by bit: no kernel computes it."""
    return int.from_bytes(b"\x7b" * tensor.itemsize, "little")
