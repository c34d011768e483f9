"""The paged KV cache: tensors by layer, and a pool of pages. Page 0 is the null page."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.records.backend import Attention
from capture_planner.runtime.executor import NULL_PAGE, LayerCache


@attrs.frozen(kw_only=True)
class PageFormat:
    """How the cache is cut up."""

    page_size: int
    """Tokens a page."""
    num_pages: int
    """Pages, the null page included."""

    def pages(self, tokens: int) -> int:
        """Return the pages that so many tokens take."""
        return -(-tokens // self.page_size)

    @property
    def slots(self) -> int:
        """Slots in all, the null page's included."""
        return self.num_pages * self.page_size


def layer_cache(
    attention: Attention, pages: PageFormat, dtype: torch.dtype, device: torch.device, *, packed: bool = False
) -> LayerCache:
    """Make the cache of one layer, zeroed: ``[num_pages, page_size, num_kv_heads, head_dim]`` twice.

    :param packed: both are halves of one tensor, as vLLM 0.33 lays them out (LBNHC).
    """
    shape = (pages.num_pages, pages.page_size, attention.num_kv_heads, attention.head_dim)
    purpose = f"keys and values of {pages.num_pages} pages (--pages)"
    if packed:
        both = allocated((*shape[:-1], 2 * attention.head_dim), dtype, device, purpose)
        keys, values = both.chunk(2, dim=-1)
        return LayerCache(keys=keys, values=values, packed=both)
    keys, values = (allocated(shape, dtype, device, purpose) for _ in range(2))
    return LayerCache(keys=keys, values=values)


def allocated(shape: Sequence[int], dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
    """Return zeros; raises ``RunError`` that says what they are for where there is no memory for them."""
    try:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        size = math.prod(shape) * dtype.itemsize
        raise RunError(f"there is no memory for {what}: {size:,} bytes; give it less") from error


class PagePool:
    """The free pages. The last one returned is handed out first, so that reuse, and its bugs, come soon."""

    def __init__(self, num_pages: int) -> None:
        self._free = [page for page in range(num_pages - 1, -1, -1) if page != NULL_PAGE]

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return ``count`` pages; the caller has seen that there are so many."""
        assert count <= len(self._free), "more pages asked for than are free"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: list[int]) -> None:
        self._free += pages
