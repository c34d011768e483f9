"""What is overwritten before a forward: all that it must not depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from capture_planner.modes import Role
from capture_planner.runtime.execution.fields import Extents, poison, tensor_of
from capture_planner.runtime.execution.role import RoleRun

SOURCES = ("outputs", "pool", "workspace", "null page", "free pages")
"""Where garbage stands, beside the fields, which are named by their keys. The pages are the world's."""


class Garbage:
    """Puts garbage everywhere but in the sources that are ``spared``."""

    def __init__(self, spared: Iterable[str] = ()) -> None:
        self._spared = frozenset(spared)
        self._turns: Counter[Role] = Counter()

    def before(self, role: RoleRun, *, filled: bool) -> None:
        """Overwrite what a forward must not depend on; fields only where they are filled after it."""
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
        """Overwrite what lies past the extents of a forward whose fields are filled."""
        self._fields(role, extents)

    def _fields(self, role: RoleRun, beyond: Extents | None) -> None:
        """Overwrite fields past some extents, or as a whole: with the least number, or the largest.

        At every third turn they are left as the steps before left them. What is out of bounds below is to
        some a mark to skip a row, what is stale is in bounds, and a runner that is told that all is spoilt
        does not show what it forgets to clean: each hides what the others show. A turn is two forwards
        long, so that one follows another undisturbed.
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
    """Fill with NaN, or with the largest integer that there is."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        poison(tensor)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
