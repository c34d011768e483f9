"""Collectives on the device, among the ranks that share one model: the sum after a layer, the choice of a token."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist

from capture_planner.errors import RunError
from capture_planner.records.text import counted


class Collectives:
    """Collectives in the forward of a model: here of one on a single rank. Graphs hold these calls."""

    rank: int = 0
    """Rank among the tensor-parallel ranks."""
    size: int = 1
    calls: int = 0
    """Number of collectives so far, in graphs and outside: equal on all ranks, or they wait for each other."""
    facts: Mapping[str, str] = MappingProxyType({})
    """Algorithm of sums, for the report; empty for a model on one rank."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, of the shape of ``partial``, which may be overwritten."""
        return partial

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, ``[size, *part.shape]``."""
        return part.unsqueeze(0)

    def keep(self, graph: object) -> None:
        """Register a graph that holds calls: their buffers live as long as the graph."""

    def release(self) -> None:
        """Free the buffers of the calls. Raises ``RunError`` while a graph holds calls."""


WHOLE = Collectives()
"""Collectives of a model on one rank: no communication."""


class GroupCollectives(Collectives):
    """Over a group of torch.distributed: NCCL on GPUs, which CUDA graphs hold, or gloo on CPUs."""

    def __init__(self, group: dist.ProcessGroup, reason: str | None = None) -> None:
        """Take a group; ``reason``: why it replaces the requested algorithm."""
        self.rank, self.size, self.calls = dist.get_rank(group), dist.get_world_size(group), 0
        backend = dist.get_backend(group)
        self.facts = {"all-reduce": backend + (f", as {reason}" if reason else "")}
        self._group = group
        self._graphs: weakref.WeakSet[object] = weakref.WeakSet()

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        dist.all_reduce(partial, group=self._group)
        return partial

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        _gather(whole, part.contiguous(), group=self._group)
        return whole.view(self.size, *part.shape)

    def keep(self, graph: object) -> None:
        self._graphs.add(graph)

    def release(self) -> None:
        # The end of a process group waits for what graphs hold of it (pytorch#115388).
        if self._graphs:
            gc.collect()  # graphs that only a cycle refers to
        if self._graphs:
            raise RunError(
                f"{counted(len(self._graphs), 'graph')} with collectives in them are still there; leave the runner "
                "before its ranks part"
            )


_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The name of torch 2.13, or of those before it."""
