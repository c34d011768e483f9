"""What stands for vLLM's device group and support levels in the oracle."""

from __future__ import annotations

import enum

import torch


class Support(enum.Enum):
    """Stands for the engine's support levels, of which only the order counts here."""

    UNIFORM_BATCH = 2
    ALWAYS = 3


class FirstAllReduce(Exception):
    """Raised in the all-reduce of the first pass, when a rank has said what it has."""


class Group:
    """Stands for the data-parallel group: the first pass collects, the second answers with the sum."""

    def __init__(self) -> None:
        self.said: list[torch.Tensor] = []
        self.total: torch.Tensor | None = None

    @property
    def cpu_group(self) -> Group:
        return self

    def cpu_all_reduce_(self, tensor: torch.Tensor) -> None:
        if self.total is None:
            self.said.append(tensor.clone())
            raise FirstAllReduce
        tensor.copy_(self.total)
