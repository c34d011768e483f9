"""FlashInfer's wrappers, each with the inputs of its last plan.

A plan is arithmetic on the host that ends in a copy from pinned memory to the wrapper's plan
workspace. FA2's plan depends only on the page counts and query lengths of the batch, so it is skipped
while those stay the same. Read in ``decode.py``, ``prefill.py`` and ``scheduler.cuh`` of 0.6.9 and
0.7.2.post1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.plugins.backend import LayerCache

Array = np.ndarray[Any, Any]
Module = Any
"""FlashInfer, whose type annotations are not reliable."""


@attrs.frozen(kw_only=True)
class GroupShape:
    """What all plans of a group share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    """Tokens before its own that a query sees; -1: all."""
    dtype: torch.dtype
    """Of queries and cache."""

    def arguments(self) -> tuple[int, int, int, int]:
        """Return the positional arguments of a plan after the page lists."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.page_size

    def options(self, softcap: float | None) -> dict[str, Any]:
        """Return the keyword arguments of a plan.

        A plan serves all layers of a group, whose scales differ: it is made for a scale of 1, and ``run``
        passes the layer's own as the scale of its queries.
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
    """One batch in the form that wrappers take, on the host."""

    kv_indptr: Array
    """``int32[num_reqs + 1]``: where the pages of each request begin in ``indices``."""
    last_page_len: Array
    """``int32[num_reqs]``: tokens in the last page; 0 for a request without pages."""
    indices: torch.Tensor
    """``int32[pages]``: page numbers, request by request."""
    qo_indptr: Array
    """``int32[num_reqs + 1]``: where the queries of each request begin."""

    @classmethod
    def of(cls, host: Mapping[str, Array], page_size: int) -> PageLists:
        """Make the lists from the common fields of a step."""
        lengths, table = host["seq_lens"], host["block_table"]
        counts = -(-lengths // page_size)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        used = table[np.arange(table.shape[1]) < counts[:, None]].astype(np.int32)
        return cls(
            kv_indptr=starts,
            # 0 without pages: with any other number, host and device disagree about the length of an empty request.
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


class PlannedWrapper:
    """A wrapper and its last plan. Subclasses define what a plan depends on, and how it is made."""

    def __init__(self, wrapper: Module, shape: GroupShape, memory: Memory) -> None:
        # Replaces the plan workspaces that the constructor allocated. The method accepts no pinned
        # memory and allocates some, hence the attribute, which SGLang 0.5.23 uses too.
        wrapper.reset_workspace_buffer(memory.floats, memory.ints)
        wrapper._pin_memory_int_workspace_buffer = memory.pinned
        self._wrapper, self._shape, self._memory = wrapper, shape, memory
        self._copied = _fence(memory.ints.device)
        self._planned_from: tuple[object, ...] | None = None
        self.layout: tuple[int, ...] = ()
        """The numbers of the last plan: grid, tile, offsets into the workspaces."""

    def plan(self, host: Mapping[str, Array], softcap: float | None) -> bool:
        """Plan for a batch from its padded host fields; return whether a new plan was needed.

        A plan lives in the workspace, so a write there invalidates it: torch counts the writes to a
        tensor and its views. ``host`` pads a field when it is read, which costs more than comparing it,
        so fields that no plan depends on are not read before a plan is made.
        """
        read = self._reads(host)
        planned_from = (softcap, self._memory.ints._version, *(array.tobytes() for array in read))
        if planned_from == self._planned_from:
            return False
        # Until the new plan is whole: an error in it leaves the workspaces half written.
        self._planned_from = None
        self._make(host, read, softcap)
        self.layout = tuple(int(number) for number in self._wrapper._plan_info)
        self._planned_from = planned_from
        return True

    def _reads(self, host: Mapping[str, Array]) -> tuple[Array, ...]:
        """Return the fields that a plan depends on: equal values make an equal plan."""
        raise NotImplementedError

    def _make(self, host: Mapping[str, Array], read: tuple[Array, ...], softcap: float | None) -> None:
        """Plan for a batch; ``read`` is what ``_reads`` returned."""
        raise NotImplementedError

    def _staged(self, plan: Callable[..., object], *args: object, **options: Any) -> object:
        """Call a planner of the library, once the copy of the last plan has left the pinned memory."""
        # The last plan may still be copied from where the next one is written (mini-sglang#103).
        if self._copied is not None:
            self._copied.synchronize()
        result = plan(*args, **options)
        if self._copied is not None:
            self._copied.record()
        return result

    def run(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, scale: float) -> None:
        """Attend with ``query`` to ``out``, both ``[num_tokens, num_heads, head_dim]``."""
        self._wrapper.run(query, (cache.keys, cache.values), q_scale=scale, out=out)


class DecodeGraph(PlannedWrapper):
    """A decode wrapper under capture: one token a request.

    It has its own ramp of query offsets, which covers every planned row; padded rows attend to no key.
    """

    def __init__(
        self,
        library: Module,
        shape: GroupShape,
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
            paged_kv_indptr_buffer=fields["paged_kv_indptr"][: num_reqs + 1],  # its length fixes the batch
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=fields["paged_kv_last_page_len"][:num_reqs],
            # FA3's plan depends on the lengths themselves, and would be made anew for every step.
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
            # Copies no list, as the runner has filled the registered buffers. It reuses the module of
            # the last full plan, which was chosen by the softcap.
            self._staged(self._library.fast_decode_plan, self._wrapper, *pages, *rest, **options)
        else:
            self._staged(self._wrapper.plan, *pages, *rest, **options)
            self._softcap = (softcap,)


class PrefillGraph(PlannedWrapper):
    """A prefill wrapper under capture: at most ``query_len`` tokens of each request."""

    def __init__(
        self,
        library: Module,
        shape: GroupShape,
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
        # The planner's last arguments: split size (-1: automatic), disable_split_kv, colocated blocks;
        # in versions whose decodes take several tokens, also a uniform query length (0: none).
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
            # The first plan fixes the most rows of any later one, and with them the grid and the tile.
            # The plan below corrects the buffers.
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
        """Plan as ``fast_decode_plan`` does, which has no prefill counterpart in FlashInfer.

        It calls the planner of the last full plan, and copies no list, as the runner has filled the
        registered buffers. ``_qo_indptr_last``, which a launch compares, is kept up to date.
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
            self._num_reqs * self._query_len,  # the most rows, as at capture: the grid follows from them
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

        The kernels read the number of rows from the device, and write only those. The library compares
        the rows passed here with the plan, at capture only.
        """
        out.zero_()
        super().run(query[: self._rows], cache, out[: self._rows], scale)


class EagerWrapper(PlannedWrapper):
    """A prefill wrapper without a graph, for prompts and decodes, planned for every step."""

    def __init__(self, library: Module, shape: GroupShape, memory: Memory) -> None:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(memory.floats, "NHD", backend="fa2")
        super().__init__(wrapper, shape, memory)

    def plan(self, host: Mapping[str, Array], softcap: float | None) -> bool:
        """Plan for a batch, always: the wrapper copies the lists of each step."""
        self._planned_from = None
        return super().plan(host, softcap)

    def _reads(self, host: Mapping[str, Array]) -> tuple[Array, ...]:
        return ()

    def _make(self, host: Mapping[str, Array], read: tuple[Array, ...], softcap: float | None) -> None:
        lists = PageLists.of(host, self._shape.page_size)
        self._staged(_plan_prefill, self._wrapper, self._shape, lists, softcap)


def _plan_prefill(wrapper: Module, shape: GroupShape, lists: PageLists, softcap: float | None) -> None:
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
    """Return an event for the copy of a plan; None on a CPU, where the copy is synchronous."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
