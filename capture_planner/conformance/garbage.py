"""Overwrite, before a forward, everything that it must not depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from capture_planner.modes import Role
from capture_planner.runtime.execution.fields import Extents, poison, tensor_of
from capture_planner.runtime.execution.role import RoleRun

SOURCES = ("outputs", "pool", "workspace", "null page", "free pages")
"""Places of garbage, in addition to the fields, which go by their keys. Pages are the world's."""


class Garbage:
    """Writes garbage everywhere except to the ``spared`` sources."""

    def __init__(self, spared: Iterable[str] = ()) -> None:
        self._spared = frozenset(spared)
        self._turns: Counter[Role] = Counter()

    def before(self, role: RoleRun, *, filled: bool) -> None:
        """Overwrite outputs, pool and workspace; fields only if they are filled afterwards."""
        self._turns[role.role] += 1
        if not filled:
            self._fields(role, None)
        if "outputs" not in self._spared:
            for held in role.body.outputs():
                poison(tensor_of(held))
        if "pool" not in self._spared and role.pool is not None:
            role.pool.poison()
        if "workspace" not in self._spared:
            for group in role.groups:
                group.workspace.fill_(255)

    def beyond(self, role: RoleRun, extents: Extents) -> None:
        """Overwrite fields beyond the extents of a forward, once they are filled."""
        self._fields(role, extents)

    def _fields(self, role: RoleRun, beyond: Extents | None) -> None:
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
