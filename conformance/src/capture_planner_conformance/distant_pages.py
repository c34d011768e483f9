"""Caches whose pages lie so far apart that the offsets of most of them do not fit into 32 bits."""

from __future__ import annotations

import gc
import math
import mmap
from collections.abc import Sequence

import attrs
import torch

from capture_planner.errors import RunError, one_line
from capture_planner_runner.serving.states import PageFormat

SPAN = 1 << 33
"""Elements from the first page to the end on a host, where memory that is not touched takes none: three of four pages
begin beyond 31 bits, and half of them beyond 32."""

DEVICE_SPAN = 3 << 30
"""On a GPU, where all of it is taken: 12 GiB at four bytes. A third of the pages begins beyond 31 bits."""

_ALIGNMENT = 256
"""Of the first page of a tensor, in bytes, as torch's allocators align it."""


@attrs.frozen(kw_only=True)
class DistantPages(PageFormat):
    """Pages of all layers in one block, as engines have them that move a page of all layers at once.

    A page of a tensor begins ``stride`` bytes after the one before it, which is far more than a page has.
    """

    memory: torch.Tensor
    """``uint8[num_pages * stride]``"""
    stride: int
    _taken: list[int] = attrs.field(factory=list)
    """Bytes at the beginning of each stride that the pages of one tensor have."""

    @classmethod
    def reserved(cls, pages: PageFormat, dtype: torch.dtype, device: torch.device) -> DistantPages:
        """Return such a format with memory for tensors of this dtype; raises ``RunError`` where there is too little."""
        span = SPAN if device.type == "cpu" else DEVICE_SPAN
        stride = -(-span * dtype.itemsize // pages.num_pages // _ALIGNMENT) * _ALIGNMENT
        size = pages.num_pages * stride
        if device.type == "cuda":
            # The block of an earlier scene may be garbage, or the allocator's: other processes need the memory, too.
            gc.collect()
            torch.cuda.empty_cache()
        try:
            memory = _reserved(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)
        except (OSError, MemoryError, RuntimeError) as error:
            where = "of address space" if device.type == "cpu" else f"on {device}"
            # Without the cause: the suite takes it for a refusal.
            reason = one_line(error)
            message = f"pages that lie far apart take {size >> 30} GiB {where}, which are not free: {reason}"
            raise RunError(message) from None
        return cls(page_size=pages.page_size, num_pages=pages.num_pages, memory=memory, stride=stride)

    def tensor(self, page: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        begin, strides = sum(self._taken), [math.prod(page[axis:]) for axis in range(1, len(page) + 1)]
        self._taken.append(-(-math.prod(page) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
        apart = self.stride // dtype.itemsize
        shape, begin = (self.num_pages, *page), begin // dtype.itemsize
        return self.memory.view(dtype).as_strided(shape, (apart, *strides), begin).zero_()


def _reserved(size: int) -> torch.Tensor:
    """Return ``uint8[size]`` on the host, of which each part is zero, and takes no memory until it is touched."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        raise OSError("this system commits memory before it is touched")
    # Python has the flag since 3.13.
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    # With huge pages, each touched page of the cache would take a huge page of memory.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        held.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(held, dtype=torch.uint8)
