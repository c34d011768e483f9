"""Taps: persistent buffers that keep what passes through a forward, also inside a graph.

A copy into a tap is an operator of the forward: captured with it, and run at every replay. So a tap
reads a graph from the inside, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import torch

from capture_planner_runner.execution.fields import poison


@attrs.frozen
class TapKey:
    """One tensor of a forward."""

    step: int
    """Number of the draft decode in a chain; 0 outside of chains."""
    layer: int | None
    """Layer of the model; None outside of layers."""
    name: str

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer}, {self.name}"


class Taps:
    """The buffers of one role, each made when something is kept in it for the first time: in a warm-up."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._buffers: dict[TapKey, torch.Tensor] = {}
        self._is_on = True

    def keep(self, key: TapKey, tensor: torch.Tensor) -> None:
        """Copy ``tensor [rows, ...]`` to the front of its buffer, which has rows for the largest graph."""
        if not self._is_on:
            return
        if key not in self._buffers:
            rows = max(self._rows, len(tensor))
            self._buffers[key] = tensor.new_zeros(rows, *tensor.shape[1:])
        self._buffers[key][: len(tensor)].copy_(tensor)

    def kept(self, steps: int) -> Iterator[tuple[TapKey, torch.Tensor]]:
        """Yield the buffers of the first ``steps`` steps, in the order of computation."""
        return ((key, buffer) for key, buffer in self._buffers.items() if key.step < steps)

    def poison(self) -> None:
        """Overwrite all of it, so that nothing of an earlier forward is taken for what a graph computed."""
        for buffer in self._buffers.values():
            poison(buffer)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Keep nothing: for forwards that no graph serves, which may have more rows than any graph."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True
