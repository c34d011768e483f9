"""FlashInfer's own plan of a step, against which a benchmark compares this backend's preparation.

An engine that keeps no plan calls ``plan`` of a wrapper before each replay. ``Stock`` makes that call
on a separate wrapper with separate memory, so that no graph is affected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from capture_planner.plugins.backend import Attention
from capture_planner_flashinfer.selection import KernelFamily, wrapper_family
from capture_planner_flashinfer.wrappers import Array, GroupShape, PageLists

FLOATS = 512 << 20
"""Least bytes of the float workspace. FlashInfer recommends 128 MiB, which 256 requests of 6 tokens
overflow (16 query heads of 128, 0.6.9)."""


class Stock:
    """The wrappers that a user of FlashInfer would plan: one for each (requests, query length)."""

    def __init__(
        self, library: Any, attention: Attention, shape: GroupShape, floats: int, pages: int, device: torch.device
    ) -> None:
        """Allocate nothing yet. ``floats``: bytes of the group's workspace; ``pages``: most per request."""
        self._library, self._shape, self._device = library, shape, device
        self._family, self._pages = wrapper_family(attention), pages
        self._floats = max(floats, FLOATS)
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[int, int], Any] = {}

    def plan(self, host: Mapping[str, Array], num_reqs: int, query_len: int) -> Callable[[], None]:
        """Return a call that plans one batch. Its page lists are made before, so that timing it times the plan.

        Offsets stay on the host, where the planner reads them, and page numbers go to the device: the
        cheapest way to call ``plan``.
        """
        wrapper = self._wrapper(num_reqs, query_len)
        lists = PageLists.of(host, self._shape.page_size)
        pages = (
            torch.from_numpy(lists.kv_indptr),
            lists.indices.to(self._device),
            torch.from_numpy(lists.last_page_len),
        )
        rest, options = self._shape.arguments(), self._shape.options(None)
        if self._family is KernelFamily.PREFILL:
            # The first plan fixes the most rows of any later one, so plan as many as the graph has.
            queries = torch.arange(num_reqs + 1, dtype=torch.int32) * query_len
            return lambda: wrapper.plan(queries, *pages, *rest, causal=True, **options)
        return lambda: wrapper.plan(*pages, *rest, **options)

    def release(self) -> None:
        """Drop wrappers and memory."""
        self._wrappers.clear()
        self._workspace = None

    def _wrapper(self, num_reqs: int, query_len: int) -> Any:
        if (num_reqs, query_len) not in self._wrappers:
            self._wrappers[num_reqs, query_len] = self._new_wrapper(num_reqs)
        return self._wrappers[num_reqs, query_len]

    def _new_wrapper(self, num_reqs: int) -> Any:
        # Only `bench` needs it, so not before its first call. FlashInfer expects zeros at first use.
        if self._workspace is None:
            self._workspace = torch.zeros(self._floats, dtype=torch.uint8, device=self._device)
        starts, queries, indices, last = (
            torch.zeros(size, dtype=torch.int32, device=self._device)
            for size in (num_reqs + 1, num_reqs + 1, num_reqs * self._pages, num_reqs)
        )
        if self._family is KernelFamily.PREFILL:
            return self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=queries,
                paged_kv_indptr_buf=starts,
                paged_kv_indices_buf=indices,
                paged_kv_last_page_len_buf=last,
                backend="fa2",
            )
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._family is KernelFamily.TENSOR_CORE,
            paged_kv_indptr_buffer=starts,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
            backend="fa2",
        )
