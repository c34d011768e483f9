"""All-reduces of small tensors in one kernel, over memory that the GPUs of one host share.

Each rank copies its part into a buffer that the others read, and sums what all have there: one launch, where NCCL takes
several steps. So latency is less, and bandwidth too: large tensors go through NCCL. No NVLink multicast is used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from capture_planner.errors import RunError
from capture_planner_runner.ranks.collectives import WHOLE, Collectives, GroupCollectives
from capture_planner_runner.ranks.peers import Peers

AllReduce = Literal["auto", "nccl", "symmetric"]
"""Algorithm of partial sums; ``auto``: symmetric memory for small tensors if the GPUs have it, else NCCL."""

LARGEST = 2 << 20
"""Limit of a tensor over symmetric memory in bytes, by default. On two H200, steps were faster than with NCCL up to
here, the largest size that was tried."""

MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

_DTYPES = (torch.bfloat16, torch.float32)
"""Dtypes of torch's kernel."""


class SymmetricCollectives(GroupCollectives):
    """Small all-reduces over symmetric memory, everything else over NCCL.

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
                reason = " ".join(str(error).split())[:300]
                raise RunError(
                    f"the GPUs of these ranks have no symmetric memory: {reason}; use --all-reduce nccl"
                ) from error

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(partial.dtype)
        if buffer is None or partial.nbytes > self.largest or partial.nbytes % _ALIGNMENT:
            return super().all_reduce(partial)
        self.calls += 1
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
    reasons = [each for each in peers.exchange("symmetric memory", reason) if each is not None]
    return GroupCollectives(group, str(reasons[0])) if reasons or found is None else found


def _absence(peers: Peers, device: torch.device) -> str | None:
    """Return why the ranks that share a model have no symmetric memory; the same on all of them."""
    place = peers.place
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
