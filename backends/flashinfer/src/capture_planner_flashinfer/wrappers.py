"""FlashInfer's wrappers, each with what its last plan was made from.

A plan is arithmetic on the host that ends in a copy from pinned memory to the wrapper's plan
workspace. FA2's plan depends on the page counts and query lengths of the batch and on nothing else
of it, so it is left out where those are as they were. Read in ``decode.py``, ``prefill.py`` and
``scheduler.cuh`` of 0.6.9 and 0.7.2.post1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.runtime.contract import LayerCache

Array = np.ndarray[Any, Any]
Module = Any
"""FlashInfer, which has no type annotations that can be relied on."""

NO_ROWS = np.zeros(0, dtype=np.int32)
"""Query offsets of a decode: its wrapper has a ramp of its own."""


@attrs.frozen(kw_only=True)
class Shape:
    """What all plans of a group have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    """Tokens before its own that a query sees; -1: all."""
    dtype: torch.dtype

    def arguments(self) -> tuple[int, int, int, int]:
        """Return what a plan takes by position after the page lists."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.page_size

    def options(self, softcap: float | None) -> dict[str, Any]:
        """Return what a plan takes by keyword.

        The scale differs by layer and a plan does not: it is planned as 1, and ``run`` is given the
        layer's own as the scale of its queries, which the wrappers multiply in.
        """
        return {
            "window_left": self.window_left,
            "logits_soft_cap": softcap,
            "sm_scale": 1.0,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


@attrs.frozen(kw_only=True, eq=False)
class PageLists:
    """One batch as the wrappers take it, on the host."""

    kv_indptr: Array
    """``int32[R + 1]``: where the pages of each request begin in ``indices``."""
    last_page_len: Array
    """``int32[R]``: tokens in the last page; 0 of a request without pages."""
    indices: torch.Tensor
    """``int32[pages]``: on the device where the wrapper's own buffer holds them, else on the host."""
    qo_indptr: Array = NO_ROWS
    """``int32[R + 1]``: where the queries of each request begin; empty for decodes of one token."""

    @classmethod
    def of(cls, host: Mapping[str, Array], page_size: int) -> PageLists:
        """Make the lists of an eager step from its common fields."""
        lengths, table = host["seq_lens"], host["block_table"]
        counts = -(-lengths // page_size)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        used = table[np.arange(table.shape[1]) < counts[:, None]].astype(np.int32)
        return cls(
            kv_indptr=starts,
            last_page_len=(lengths - np.maximum(counts - 1, 0) * page_size).astype(np.int32),
            indices=torch.from_numpy(used),
            qo_indptr=host["query_start_loc"].astype(np.int32),
        )


@attrs.frozen(kw_only=True, eq=False)
class Memory:
    """A wrapper's parts of the group's workspace, ``uint8`` each."""

    floats: torch.Tensor
    """Shared by all wrappers of the group, so no two of them may run at once."""
    ints: torch.Tensor
    """This wrapper's plan, on the device."""
    pinned: torch.Tensor
    """Where the host writes the plan before it is copied."""


class Planned:
    """A wrapper and its last plan. Subclasses say how it is planned."""

    def __init__(self, wrapper: Module, shape: Shape, memory: Memory) -> None:
        # The constructors allocate plan workspaces of their own, which this frees again. The method
        # takes no pinned memory and makes some each time; SGLang 0.5.23 reads the same attribute.
        wrapper.reset_workspace_buffer(memory.floats, memory.ints)
        wrapper._pin_memory_int_workspace_buffer = memory.pinned
        self._wrapper, self._shape, self._memory = wrapper, shape, memory
        self._copied = _event() if memory.ints.is_cuda else None
        self._made_from: tuple[object, ...] | None = None
        self.layout: tuple[int, ...] = ()
        """The last plan's numbers: grid, tile, offsets into the workspaces."""

    def plan(self, lists: PageLists, softcap: float | None) -> bool:
        """Plan for a batch, and return whether that was needed.

        A plan lives in the workspace, so it is made again when somebody has written there: torch
        counts the writes to a tensor and its views.
        """
        made_from = (
            softcap,
            self._memory.ints._version,
            lists.kv_indptr.tobytes(),
            lists.qo_indptr.tobytes(),
        )
        if made_from == self._made_from:
            return False
        if self._copied is not None:
            # The copy of the last plan may still be reading the pinned memory.
            self._copied.synchronize()
        self._made_from = None
        self._make(lists, softcap)
        if self._copied is not None:
            self._copied.record()
        self.layout = tuple(int(number) for number in self._wrapper._plan_info)
        self._made_from = made_from
        return True

    def _make(self, lists: PageLists, softcap: float | None) -> None:
        raise NotImplementedError

    def run(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, scale: float) -> None:
        """Attend with ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``."""
        self._wrapper.run(query, (cache.keys, cache.values), q_scale=scale, out=out)


class DecodeGraph(Planned):
    """A decode wrapper under capture: one token a request.

    Its ramp of query offsets is its own and covers every planned row, so padded rows run on no key.
    """

    def __init__(
        self,
        library: Module,
        shape: Shape,
        memory: Memory,
        fields: Mapping[str, torch.Tensor],
        num_reqs: int,
        *,
        tensor_cores: bool,
    ) -> None:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            memory.floats,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=fields["paged_kv_indptr"][: num_reqs + 1],
            paged_kv_indices_buffer=fields["paged_kv_indices"],
            paged_kv_last_page_len_buffer=fields["paged_kv_last_page_len"][:num_reqs],
            backend="fa2",
        )
        super().__init__(wrapper, shape, memory)
        self._library = library
        self._softcap: tuple[float | None] | None = None

    def _make(self, lists: PageLists, softcap: float | None) -> None:
        pages = (torch.from_numpy(lists.kv_indptr), lists.indices, torch.from_numpy(lists.last_page_len))
        options = self._shape.options(softcap)
        if self._softcap == (softcap,):
            # Copies no list: the runner has filled the registered buffers. Takes the module of the
            # full plan before, and that one was chosen by the softcap.
            self._library.fast_decode_plan(self._wrapper, *pages, *self._shape.arguments(), **options)
        else:
            self._wrapper.plan(*pages, *self._shape.arguments(), **options)
            self._softcap = (softcap,)


class PrefillGraph(Planned):
    """A prefill wrapper under capture: at most ``query_len`` tokens of each request."""

    def __init__(
        self,
        library: Module,
        shape: Shape,
        memory: Memory,
        fields: Mapping[str, torch.Tensor],
        num_reqs: int,
        query_len: int,
    ) -> None:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            memory.floats,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=fields["qo_indptr"][: num_reqs + 1],
            paged_kv_indptr_buf=fields["paged_kv_indptr"][: num_reqs + 1],
            paged_kv_indices_buf=fields["paged_kv_indices"],
            paged_kv_last_page_len_buf=fields["paged_kv_last_page_len"][:num_reqs],
            backend="fa2",
        )
        super().__init__(wrapper, shape, memory)
        self._num_reqs, self._query_len = num_reqs, query_len
        self._rows = 0
        self._has_covered = False

    def _make(self, lists: PageLists, softcap: float | None) -> None:
        rows = int(lists.qo_indptr[-1])
        if not self._has_covered:
            # The first plan fixes the most rows that any later one may have, and with it the grid
            # and the tile. The plan below puts the buffers right again.
            self._has_covered = True
            if rows < self._num_reqs * self._query_len:
                self._plan_pages(self._largest(lists), softcap)
        self._plan_pages(lists, softcap)
        self._rows = rows

    def _largest(self, lists: PageLists) -> PageLists:
        empty = np.zeros(self._num_reqs + 1, dtype=np.int32)
        return PageLists(
            kv_indptr=empty,
            last_page_len=empty[1:],
            indices=lists.indices[:0],
            qo_indptr=np.arange(self._num_reqs + 1, dtype=np.int32) * np.int32(self._query_len),
        )

    def _plan_pages(self, lists: PageLists, softcap: float | None) -> None:
        _plan_prefill(self._wrapper, self._shape, lists, softcap)

    def run(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, scale: float) -> None:
        """Attend; rows that no request owns at a replay become zero.

        The kernels read from the device how many rows there are and write those alone. Only the
        library compares the rows given here with the plan, and it does so at capture.
        """
        out.zero_()
        super().run(query[: self._rows], cache, out[: self._rows], scale)


class Eager(Planned):
    """A prefill wrapper without a graph: prompts and decodes alike, planned anew for every step."""

    def __init__(self, library: Module, shape: Shape, memory: Memory) -> None:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(memory.floats, "NHD", backend="fa2")
        super().__init__(wrapper, shape, memory)

    def plan(self, lists: PageLists, softcap: float | None) -> bool:
        """Plan for a batch, always: the wrapper's lists are copies of this step's."""
        self._made_from = None
        return super().plan(lists, softcap)

    def _make(self, lists: PageLists, softcap: float | None) -> None:
        _plan_prefill(self._wrapper, self._shape, lists, softcap)


def _plan_prefill(wrapper: Module, shape: Shape, lists: PageLists, softcap: float | None) -> None:
    wrapper.plan(
        torch.from_numpy(lists.qo_indptr),
        torch.from_numpy(lists.kv_indptr),
        lists.indices,
        torch.from_numpy(lists.last_page_len),
        *shape.arguments(),
        causal=True,
        **shape.options(softcap),
    )


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
