"""The caches of requests, by layer: paged keys and values, and the states of recurrent layers.

Page 0 is the null page, and row 0 of the states the null state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch

from capture_planner.errors import RunError
from capture_planner.plugins.backend import NULL_PAGE, LayerCache
from capture_planner.records.backend import Attention
from capture_planner.records.plan import Plan
from capture_planner_runner.execution.recurrent import StateCache


@attrs.frozen(kw_only=True)
class PageFormat:
    """Division of the KV cache into pages."""

    page_size: int
    """Tokens per page."""
    num_pages: int
    """Pages, the null page included."""

    def pages(self, tokens: int) -> int:
        """Return the pages that ``tokens`` tokens take."""
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


def state_caches(plan: Plan, width: int, dtype: torch.dtype, device: torch.device) -> tuple[StateCache, ...]:
    """Make the pool of states of each recurrent layer, zeroed: ``[rows, positions, width]``, of float32 at least."""
    if plan.states is None or plan.model.recurrent is None:
        return ()
    shape = (plan.states.rows, plan.states.positions, width)
    kind, purpose = torch.promote_types(dtype, torch.float32), f"the states of {plan.states.rows} requests"
    layers = range(plan.model.recurrent.layers)
    return tuple(StateCache(states=allocated(shape, kind, device, purpose)) for _ in layers)


def allocated(shape: Sequence[int], dtype: torch.dtype, device: torch.device, what: str) -> torch.Tensor:
    """Return zeros; raises ``RunError`` that says what they are for where there is no memory for them."""
    try:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        size = math.prod(shape) * dtype.itemsize
        raise RunError(f"there is no memory for {what}: {size:,} bytes; give it less") from error


class PagePool:
    """The free pages, or the free rows of a pool of states; number 0 is never free.

    The last page returned is handed out first, so that bugs of reuse show early.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, NULL_PAGE, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return ``count`` pages; the caller has checked ``free``."""
        assert count <= len(self._free), "more pages asked for than are free"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: list[int]) -> None:
        self._free += pages
