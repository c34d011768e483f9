"""FlashInfer's wrappers, each with what its last plan was made from.

A plan is arithmetic on the host that ends in a copy from pinned memory to the wrapper's plan
workspace. FA2's plan depends on the page counts and query lengths of the batch and on nothing else
of it, so it is left out where those are as they were. Read in ``decode.py``, ``prefill.py`` and
``scheduler.cuh`` of 0.6.9 and 0.7.2.post1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.runtime.executor import LayerCache

Array = np.ndarray[Any, Any]
Module = Any
"""FlashInfer, which has no type annotations that can be relied on."""


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
    """``int32[pages]``, on the host."""
    qo_indptr: Array
    """``int32[R + 1]``: where the queries of each request begin."""

    @classmethod
    def of(cls, host: Mapping[str, Array], page_size: int) -> PageLists:
        """Make the lists of a step from its common fields."""
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
    """A wrapper and its last plan. Subclasses say what a plan depends on and how it is made."""

    def __init__(self, wrapper: Module, shape: Shape, memory: Memory) -> None:
        # The constructors allocate plan workspaces of their own, which this frees again. The method
        # takes no pinned memory and makes some each time; SGLang 0.5.23 reads the same attribute.
        wrapper.reset_workspace_buffer(memory.floats, memory.ints)
        wrapper._pin_memory_int_workspace_buffer = memory.pinned
        self._wrapper, self._shape, self._memory = wrapper, shape, memory
        self._copied = _fence(memory.ints.device)
        self._made_from: tuple[object, ...] | None = None
        self.layout: tuple[int, ...] = ()
        """The last plan's numbers: grid, tile, offsets into the workspaces."""

    def plan(self, host: Mapping[str, Array], softcap: float | None) -> bool:
        """Plan for a batch from its padded host fields, and return whether that was needed.

        A plan lives in the workspace, so it is made again when somebody has written there: torch
        counts the writes to a tensor and its views. A field is padded when it is asked for, which
        costs more than comparing it does: one that no plan depends on is left alone until then.
        """
        read = self._reads(host)
        made_from = (softcap, self._memory.ints._version, *(array.tobytes() for array in read))
        if made_from == self._made_from:
            return False
        self._made_from = None
        self._make(host, read, softcap)
        self.layout = tuple(int(number) for number in self._wrapper._plan_info)
        self._made_from = made_from
        return True

    def _reads(self, host: Mapping[str, Array]) -> tuple[Array, ...]:
        """Return what a plan depends on beside the group: equal values make an equal plan."""
        raise NotImplementedError

    def _make(self, host: Mapping[str, Array], read: tuple[Array, ...], softcap: float | None) -> None:
        """Plan for a batch of which ``read`` was read already."""
        raise NotImplementedError

    def _staged(self, plan: Callable[..., object], *args: object, **options: Any) -> object:
        """Make one plan of the library, when the copy of the last has left the pinned memory."""
        if self._copied is not None:
            self._copied.synchronize()
        made = plan(*args, **options)
        if self._copied is not None:
            self._copied.record()
        return made

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
        self._indices = fields["paged_kv_indices"]
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            memory.floats,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=fields["paged_kv_indptr"][: num_reqs + 1],
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=fields["paged_kv_last_page_len"][:num_reqs],
            backend="fa2",
        )
        super().__init__(wrapper, shape, memory)
        self._library = library
        self._softcap: tuple[float | None] | None = None

    def _reads(self, host: Mapping[str, Array]) -> tuple[Array, ...]:
        return (host["paged_kv_indptr"],)

    def _make(self, host: Mapping[str, Array], read: tuple[Array, ...], softcap: float | None) -> None:
        (starts,) = read
        pages = (
            torch.from_numpy(starts),
            self._indices[: int(starts[-1])],
            torch.from_numpy(host["paged_kv_last_page_len"]),
        )
        rest, options = self._shape.arguments(), self._shape.options(softcap)
        if self._softcap == (softcap,):
            # Copies no list: the runner has filled the registered buffers. Takes the module of the
            # full plan before, and that one was chosen by the softcap.
            self._staged(self._library.fast_decode_plan, self._wrapper, *pages, *rest, **options)
        else:
            self._staged(self._wrapper.plan, *pages, *rest, **options)
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
        self._indices = fields["paged_kv_indices"]
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            memory.floats,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=fields["qo_indptr"][: num_reqs + 1],
            paged_kv_indptr_buf=fields["paged_kv_indptr"][: num_reqs + 1],
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=fields["paged_kv_last_page_len"][:num_reqs],
            backend="fa2",
        )
        super().__init__(wrapper, shape, memory)
        self._num_reqs, self._query_len = num_reqs, query_len
        self._rows = 0
        self._softcap: tuple[float | None] | None = None
        # How its planner ends: split size (chosen), no split disabled, no colocated blocks; then, as
        # long as decodes have several tokens, no promise of a uniform query length.
        uniform = (0,) if "q_len_per_req" in inspect.signature(library.fast_decode_plan).parameters else ()
        self._ending = (-1, False, 0, *uniform)

    def _reads(self, host: Mapping[str, Array]) -> tuple[Array, ...]:
        return host["paged_kv_indptr"], host["qo_indptr"]

    def _make(self, host: Mapping[str, Array], read: tuple[Array, ...], softcap: float | None) -> None:
        starts, queries = read
        lists = PageLists(
            kv_indptr=starts,
            last_page_len=host["paged_kv_last_page_len"],
            indices=self._indices[: int(starts[-1])],
            qo_indptr=queries,
        )
        self._rows = int(queries[-1])
        if self._softcap == (softcap,):
            self._plan_fast(lists)
            return
        if self._softcap is None and self._rows < self._num_reqs * self._query_len:
            # The first plan fixes the most rows that any later one may have, and with it the grid
            # and the tile. The plan below puts the buffers right again.
            self._plan_fully(self._largest(), softcap)
        self._plan_fully(lists, softcap)
        self._softcap = (softcap,)

    def _largest(self) -> PageLists:
        empty = np.zeros(self._num_reqs + 1, dtype=np.int32)
        return PageLists(
            kv_indptr=empty,
            last_page_len=empty[1:],
            indices=self._indices[:0],
            qo_indptr=np.arange(self._num_reqs + 1, dtype=np.int32) * np.int32(self._query_len),
        )

    def _plan_fully(self, lists: PageLists, softcap: float | None) -> None:
        self._staged(_plan_prefill, self._wrapper, self._shape, lists, softcap)

    def _plan_fast(self, lists: PageLists) -> None:
        """Plan as ``fast_decode_plan`` does, for which FlashInfer has no prefill counterpart.

        It goes to the planner of the full plan before, and copies no list: the runner has filled the
        registered buffers. Those of the wrapper's notes that a launch compares are kept right.
        """
        counts = np.diff(lists.kv_indptr)
        lengths = np.maximum(counts - 1, 0) * self._shape.page_size + lists.last_page_len
        wrapper, memory, heads = self._wrapper, self._memory, self._shape
        wrapper._plan_info = self._staged(
            wrapper._cached_module.plan,
            memory.floats,
            memory.ints,
            memory.pinned,
            torch.from_numpy(lists.qo_indptr),
            torch.from_numpy(lists.kv_indptr),
            torch.from_numpy(lengths.astype(np.int32)),
            self._num_reqs * self._query_len,
            self._num_reqs,
            heads.num_heads,
            heads.num_kv_heads,
            heads.page_size,
            True,  # under a graph
            heads.head_dim,
            heads.head_dim,
            True,  # causal
            heads.window_left,
            *self._ending,
        )
        wrapper._qo_indptr_last = self._rows

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

    def plan(self, host: Mapping[str, Array], softcap: float | None) -> bool:
        """Plan for a batch, always: the wrapper's lists are copies of this step's."""
        self._made_from = None
        return super().plan(host, softcap)

    def _reads(self, host: Mapping[str, Array]) -> tuple[Array, ...]:
        return ()

    def _make(self, host: Mapping[str, Array], read: tuple[Array, ...], softcap: float | None) -> None:
        lists = PageLists.of(host, self._shape.page_size)
        self._staged(_plan_prefill, self._wrapper, self._shape, lists, softcap)


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


def _fence(device: torch.device) -> torch.cuda.Event | None:
    """Return what tells that a plan was copied; None where the host copies it itself."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
