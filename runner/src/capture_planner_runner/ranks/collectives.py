"""Collectives on the device, among the ranks that share one model: the sum after a layer, the choice of a token."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from capture_planner.errors import RunError, one_line
from capture_planner.records.text import counted
from capture_planner_runner.ranks.peers import Peers


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


AllReduce = Literal["auto", "nccl", "symmetric"]
"""Algorithm of partial sums; ``auto``: symmetric memory for small tensors if the GPUs have it, else NCCL."""

LARGEST = 2 << 20
"""Limit of a tensor over symmetric memory in bytes, by default. On two H200, steps were faster than with NCCL up to
here, the largest size that was tried."""

MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of torch's kernel."""


class SymmetricCollectives(GroupCollectives):
    """Small all-reduces over symmetric memory, which the GPUs of one host share; everything else over NCCL.

    Each rank copies its part into a buffer that the others read, and sums what all have there: one launch, where NCCL
    takes several steps. So latency is less, and bandwidth too. No NVLink multicast is used.

    The buffers are allocated and exchanged here, before any capture (vllm#54626), and are there until ``release``,
    which refuses while there are graphs that hold their addresses (aiter#3838). Raises ``RunError`` where the GPUs
    cannot read each other's memory.
    """

    largest: int
    """Limit of a tensor over symmetric memory, in bytes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, largest: int = LARGEST) -> None:
        super().__init__(group)
        self.largest = largest
        self._name = group.group_name
        self.facts = {"all-reduce": f"symmetric memory up to {largest:,} bytes, then NCCL"}
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        with _without_multicast():
            try:
                for dtype in _DTYPES:
                    buffer = symmetric_memory.empty(largest // dtype.itemsize, dtype=dtype, device=device)
                    symmetric_memory.rendezvous(buffer, group)
                    self._buffers[dtype] = buffer
            except RuntimeError as error:
                reason = one_line(error)[:300]
                raise RunError(
                    f"the GPUs of these ranks have no symmetric memory: {reason}; use --all-reduce nccl"
                ) from error

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(partial.dtype)
        # All ranks must take the same path; dtype and size are equal on all of them.
        if buffer is None or partial.nbytes > self.largest or partial.nbytes % _ALIGNMENT:
            return super().all_reduce(partial)
        self.calls += 1
        # A view of the buffer that was exchanged: the other ranks read at its address.
        mine = buffer[: partial.numel()].view(partial.shape)
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(mine, partial.contiguous(), "sum", self._name)
        return total

    def release(self) -> None:
        super().release()
        self._buffers.clear()


_ALIGNMENT = 16
"""Bytes that a thread of the kernel moves at once; sizes must be multiples."""


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Say that buffers are exchanged without NVLink multicast, which the kernel does not use."""
    before = os.environ.get(MULTICAST)
    os.environ[MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[MULTICAST]
        else:
            os.environ[MULTICAST] = before


def collectives_of(peers: Peers, device: torch.device, choice: AllReduce = "auto") -> Collectives:
    """Return the collectives among the ranks that share this one's model.

    Raises ``RunError`` for ``symmetric`` where the GPUs have no symmetric memory; ``auto`` falls back to NCCL there.
    """
    group = peers.tensor_group()
    if group is None:
        return WHOLE
    if choice == "symmetric" and device.type != "cuda":
        raise RunError("--all-reduce symmetric needs GPUs; use --all-reduce auto")
    if choice == "nccl" or device.type != "cuda":
        return GroupCollectives(group)
    if choice == "symmetric":
        return SymmetricCollectives(group, device)
    reason = _absence(peers, device)
    found: Collectives | None = None
    if reason is None:
        try:
            found = SymmetricCollectives(group, device)
        except RunError as error:
            reason = str(error)
    # All ranks fall back, or none: one that calls NCCL and one that reads symmetric memory wait for each other.
    reasons = [each for each in peers.exchange("symmetric memory", reason) if each is not None]
    return GroupCollectives(group, str(reasons[0])) if reasons or found is None else found


def _absence(peers: Peers, device: torch.device) -> str | None:
    """Return why the ranks that share a model have no symmetric memory; the same on all of them."""
    place = peers.place
    # An exchange has the values of all ranks; this is the part of one replica.
    mine = slice(place.data * place.tensor_size, (place.data + 1) * place.tensor_size)
    number = torch.empty(0, device=device).device.index
    places = [str(each).rsplit(":", 1) for each in peers.exchange("devices", f"{place.host}:{number}")[mine]]
    is_near = len({host for host, _ in places}) == 1
    others = {int(other) for _, other in places} - {number}
    count = torch.cuda.device_count()
    is_able = is_near and all(other < count and torch.cuda.can_device_access_peer(number, other) for other in others)
    # Exchanged on all ranks, also by a replica on several hosts: another replica may be on one.
    able = peers.exchange("access to the memory of other GPUs", is_able)[mine]
    if not is_near:
        return "the ranks are on several hosts"
    return None if all(able) else "the GPUs cannot read each other's memory"
