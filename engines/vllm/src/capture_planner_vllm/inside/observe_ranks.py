"""What vLLM's data-parallel ranks bring to a step: the vector that they sum (vllm/v1/worker/gpu/dp_utils.py, 0.33)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from capture_planner.measuring.recorder import RankShare
from capture_planner.modes import GraphMode

TOKENS, MODE, UNIFORM, LONGEST, _, REQUESTS, _ = range(7)
"""Rows of the vector; each has a column for each rank."""

_MODES = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)
"""Modes by the value of vLLM's ``CUDAGraphMode``."""


class ObservedGroup:
    """VLLM's group of data-parallel ranks, for one step: the sum is handed on, too."""

    def __init__(self, group: Any, take: Callable[[Any], None]) -> None:
        """:param take: called with a copy of the summed vector; must not raise."""
        self._group, self._take = group, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def cpu_all_reduce_(self, vector: Any) -> Any:
        """Sum as the group does."""
        result = self._group.cpu_all_reduce_(vector)
        # Summed in place: now each rank's column is in it.
        self._take(vector)
        return result


def shares(vector: Sequence[Sequence[int]]) -> tuple[RankShare, ...]:
    """Return what each rank brought, of a summed vector: int32[7, ranks]."""
    columns = zip(*(vector[row] for row in (REQUESTS, TOKENS, UNIFORM, LONGEST, MODE)), strict=True)
    return tuple(
        # A uniform length of 0 means that lengths differ, and a longest query of -1 that some request has a prompt.
        (reqs, tokens, uniform or None, bool(uniform) or longest >= 0, _MODES[mode])
        for reqs, tokens, uniform, longest, mode in columns
    )
