"""A stand-in for FlashInfer on a CPU, for its executor's calls and plans.

It has the signatures and the checks of FlashInfer 0.6.9's wrappers, and works as they do: a plan goes
from pinned memory to the plan workspace, and a launch reads it from there together with the registered
buffers, both as they are when it runs. A plan that is stale is an error. Launches are operators, so
that core's recorded graphs hold them.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from capture_planner_flashinfer import kernels
from capture_planner_flashinfer.workspace import INT_WORKSPACE
from capture_planner_runner.graphs.recorded import RecordedGraphs

CPU = torch.device("cpu")
FENCES: list[tuple[str, int]] = []
"""Plans that were written to pinned memory, and the waits and records of those who guard it, in order."""
SEMAPHORES = 8 << 20


def numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's memory, as a kernel has it: reads and writes pass torch by."""
    size = tensor.numel() * tensor.element_size()
    storage: Any = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    dtypes: dict[torch.dtype, Any] = {torch.int32: np.int32, torch.uint8: np.uint8, torch.uint16: np.uint16}
    values: np.ndarray[Any, Any] = np.frombuffer(storage, dtype=dtypes[tensor.dtype])
    return values.reshape(tensor.shape)


def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: np.ndarray[Any, Any],
    visible: np.ndarray[Any, Any],
    softcap: float,
    scale: float,
) -> torch.Tensor:
    """Attend one request: its queries ``[q, H, D]`` to ``slots int[L]``, where ``visible bool[q, L]``."""
    group = query.shape[1] // keys.shape[2]
    where = torch.from_numpy(slots)
    sides = (side.flatten(0, 1)[where].float().repeat_interleave(group, 1) for side in (keys, values))
    key, value = sides
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~torch.from_numpy(visible), -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


@torch.library.custom_op("standin::wrapper", mutates_args=("out",))
def launch_wrapper(
    floats: torch.Tensor,
    ints: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last: torch.Tensor,
    out: torch.Tensor,
    reqs: int,
    causal: bool,
    window: int,
    softcap: float,
    scale: float,
) -> None:
    """Run the planned tiles: for each request, those of its queries that the plan has."""
    plan, offsets, pages = numbers(ints).view(np.int32), numbers(indptr), numbers(indices)
    rows, page_size = numbers(starts), keys.shape[1]
    assert plan[0] == reqs, "the plan workspace holds no plan of this wrapper"
    planned_rows, planned_pages = plan[1 : reqs + 1], plan[reqs + 1 : 2 * reqs + 1]
    for request in range(reqs):
        first, stop = rows[request], rows[request + 1]
        mine = pages[offsets[request] : offsets[request + 1]]
        assert planned_rows[request] == stop - first, "the plan is of other queries"
        assert planned_pages[request] == len(mine), "the plan is of other page counts"
        length = max(len(mine) - 1, 0) * page_size + numbers(last)[request]
        slots = (mine[:, None].astype(np.int64) * page_size + np.arange(page_size)).ravel()[:length]
        own = length - (stop - first) + np.arange(stop - first)[:, None]
        key = np.arange(length)
        visible = (key <= own) | (not causal)
        if window >= 0:
            visible = visible & (key >= own - window)
        out[first:stop] = attend_rows(query[first:stop], keys, values, slots, visible, softcap, scale)
    numbers(floats)[:] = 255


class Wrapper:
    """What the decode and the prefill wrapper have in common."""

    tensor_cores = True

    def __init__(self, floats: torch.Tensor, backend: str, use_cuda_graph: bool) -> None:
        assert backend == "fa2", "another scheduler would plan differently under a graph"
        assert floats.data_ptr() % 16 == 0
        self.floats, self.is_graph = floats, use_cuda_graph
        self.ints = torch.zeros(INT_WORKSPACE, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros_like(self.ints)
        self.starts = torch.zeros(0, dtype=torch.int32)
        self.indptr = self.indices = self.last = self.starts
        self.max_rows: int | None = None
        self.options: dict[str, Any] = {}
        self.full_plans = self.fast_plans = 0
        self._plan_info: list[int] | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert int_workspace_buffer.numel() == INT_WORKSPACE
        assert int_workspace_buffer.data_ptr() % 16 == 0
        self.floats, self.ints = float_workspace_buffer, int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace_buffer)

    def register(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> None:
        if not self.is_graph:
            self.indptr, self.indices, self.last = indptr.clone(), indices.clone(), last.clone()
            return
        assert len(last) == len(self.last), "the batch size is fixed"
        assert len(indices) <= len(self.indices)
        self.indptr.copy_(indptr)
        self.last.copy_(last)
        self.indices[: len(indices)].copy_(indices)

    def schedule(self, starts: torch.Tensor, indptr: torch.Tensor) -> None:
        """Write the plan to pinned memory, and copy it as a device does: unseen by torch."""
        FENCES.append(("plan", self._pin_memory_int_workspace_buffer.data_ptr()))
        reqs = len(starts) - 1
        plan = np.concatenate(([reqs], np.diff(starts.numpy()), np.diff(indptr.numpy()))).astype(np.int32)
        assert (plan >= 0).all()
        pinned = numbers(self._pin_memory_int_workspace_buffer).view(np.int32)
        pinned[: len(plan)] = plan
        numbers(self.ints).view(np.int32)[: len(plan)] = pinned[: len(plan)]
        rows = int(starts[-1])
        self._plan_info = [reqs if self.is_graph else len(plan), self.max_rows or rows, int(self.is_graph)]

    def launch(self, query: torch.Tensor, cache: Any, q_scale: float, out: torch.Tensor, causal: bool) -> None:
        assert self._plan_info is not None, "run before plan"
        assert out.shape == query.shape
        options = self.options
        assert (query.dtype, cache[0].dtype) == (options["q_data_type"], options["kv_data_type"])
        launch_wrapper(
            self.floats, self.ints, query, *cache, self.starts, self.indptr, self.indices, self.last, out,
            len(self.last), causal, options["window_left"], options["logits_soft_cap"] or 0.0,
            options["sm_scale"] * q_scale,
        )  # fmt: skip


class Decode(Wrapper):
    """``BatchDecodeWithPagedKVCacheWrapper``: one token a request."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, backend, use_cuda_graph)
        assert (kv_layout, use_cuda_graph) == ("NHD", True)
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last, self.tensor_cores = paged_kv_last_page_len_buffer, use_tensor_cores
        assert len(self.indptr) == len(self.last) + 1
        self.starts = torch.arange(len(self.indptr), dtype=torch.int32)

    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        self.full_plans += 1
        self.register(indptr, indices, last_page_len)
        self.options = options
        self.schedule(self.starts, indptr)

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, q_scale: float, out: torch.Tensor) -> None:
        assert len(q) == len(self.last), "one row a request"
        self.launch(q, paged_kv_cache, q_scale, out, causal=False)


class Prefill(Wrapper):
    """``BatchPrefillWithPagedKVCacheWrapper``: any number of tokens a request."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        super().__init__(float_workspace_buffer, backend, use_cuda_graph)
        if use_cuda_graph:
            self.starts, self.indptr = qo_indptr_buf, paged_kv_indptr_buf
            self.indices, self.last = paged_kv_indices_buf, paged_kv_last_page_len_buf
            assert len(self.starts) == len(self.indptr) == len(self.last) + 1
        self._qo_indptr_last = 0
        self._cached_module: Any = None

    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool,
        **options: Any,
    ) -> None:  # fmt: skip
        assert causal
        self.full_plans += 1
        self._qo_indptr_last = rows = int(qo_indptr[-1])
        self._cached_module = SimpleNamespace(plan=self.planner)
        if self.is_graph:
            self.max_rows = rows if self.max_rows is None else self.max_rows
            assert rows <= self.max_rows, "more rows than the first plan had"
            self.starts.copy_(qo_indptr)
        else:
            self.starts = qo_indptr.clone()
        self.register(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.options = options
        self.schedule(qo_indptr, paged_kv_indptr)

    def planner(
        self, floats: Any, ints: Any, pinned: Any, qo_indptr: Any, indptr: Any, lengths: Any, rows: int,
        reqs: int, heads: int, kv_heads: int, page_size: int, is_graph: bool, width: int, v_width: int,
        causal: bool, window_left: int, *ending: Any,
    ) -> list[int]:  # fmt: skip
        """Plan as the library's compiled planner does: every argument by position, and none left out."""
        mine = (self.floats, self.ints, self._pin_memory_int_workspace_buffer)
        assert [t.data_ptr() for t in (floats, ints, pinned)] == [t.data_ptr() for t in mine]
        assert (rows, reqs, is_graph, causal) == (self.max_rows, len(self.last), True, True)
        assert width == v_width
        assert (window_left, ending) == (self.options["window_left"], ENDINGS[has_uniform()])
        assert len(qo_indptr) == len(indptr) == len(lengths) + 1
        counts = np.diff(indptr.numpy())
        assert (np.diff(qo_indptr.numpy()) <= lengths.numpy()).all()
        assert (-(-lengths.numpy() // page_size) == counts).all()
        self.fast_plans += 1
        self.schedule(qo_indptr, indptr)
        assert self._plan_info is not None
        return self._plan_info

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *, q_scale: float, out: torch.Tensor) -> None:
        assert len(q) == self._qo_indptr_last, "as many rows as the last plan had"
        self.launch(q, paged_kv_cache, q_scale, out, causal=True)


def fast_decode_plan(
    self: Decode, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int,
    head_dim: int, page_size: int, **options: Any,
) -> None:  # fmt: skip
    """Plan without a copy of any list, with the module of the full plan before."""
    assert self.full_plans, "it needs a full plan first"
    assert (options["logits_soft_cap"] is None) == (self.options["logits_soft_cap"] is None)
    assert indptr.device == last_page_len.device == CPU
    self.fast_plans += 1
    self.options = options
    self.schedule(self.starts, indptr)


def newer_fast_decode_plan(
    self: Decode, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int,
    head_dim: int, page_size: int, *, q_len_per_req: int = 1, **options: Any,
) -> None:  # fmt: skip
    """The same since 0.7.1, when planners learned of uniform queries."""
    fast_decode_plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options)


ENDINGS = {False: (-1, False, 0), True: (-1, False, 0, 0)}
"""What a planner takes last: split size, no split, colocated blocks, and since 0.7.1 the uniform query."""


def has_uniform() -> bool:
    """Say whether the library that is installed now is 0.7.1 or newer."""
    return bool(sys.modules["flashinfer"].fast_decode_plan is newer_fast_decode_plan)


@torch.library.custom_op("standin::kernel", mutates_args=("out",))
def launch_kernel(
    workspace: torch.Tensor,
    counters: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    mask: torch.Tensor | None,
    query_len: int,
    window: int,
    scale: float,
) -> None:
    """Run a kernel without a plan; its counters must be zero, and it leaves them so."""
    assert not numbers(counters).any(), "somebody wrote to the counters"
    page_size = keys.shape[1]
    for request, length in enumerate(numbers(lengths)):
        slots = numbers(table)[request][:, None].astype(np.int64) * page_size + np.arange(page_size)
        own = length - query_len + np.arange(query_len)[:, None]
        key = np.arange(length)
        visible = key <= own
        if query_len > 1:
            assert mask is not None
            words = np.ascontiguousarray(numbers(mask)[request]).view(np.uint8)
            bits = np.unpackbits(words, axis=1, bitorder="little")[:, :query_len].astype(bool)
            visible = key < length - query_len + np.zeros_like(own)
            visible[:, max(length - query_len, 0) :] = bits
        if window >= 0:
            visible = visible & (key >= own - window)
        rows = slice(request * query_len, (request + 1) * query_len)
        out[rows] = attend_rows(query[rows], keys, values, slots.ravel()[:length], visible, 0.0, scale)
    numbers(workspace)[:] = 255


def old_kernel(
    query: Any, kv_cache: Any, workspace_buffer: Any, block_tables: Any, seq_lens: Any, max_seq_len: int,
    bmm1_scale: float = 1.0, bmm2_scale: float = 1.0, window_left: int = -1, out: Any = None,
    kv_layout: str = "HND", backend: str = "auto", q_len_per_req: int = 1, mask: Any = None,
) -> None:  # fmt: skip
    """``trtllm_batch_decode_with_kv_cache`` of 0.6.9: counters are the head of the workspace."""
    assert backend != "xqa", "it splits sequences, whose blocks all write the output (flashinfer#4161)"
    size = 132 * 4 + 16
    assert (kv_layout, bmm2_scale, query.is_contiguous(), block_tables.is_contiguous()) == ("NHD", 1.0, True, True)
    launch_kernel(
        workspace_buffer[size:], workspace_buffer[:size], query, *kv_cache, block_tables, seq_lens, out,
        causal_mask(seq_lens, q_len_per_req), q_len_per_req, window_left, bmm1_scale,
    )  # fmt: skip


def xqa(
    q: Any, k_cache: Any, v_cache: Any, page_table: Any, seq_lens: Any, output: Any, workspace_buffer: Any,
    semaphores: Any, num_kv_heads: int, page_size: int, sinks: Any = None, q_scale: float = 1.0,
    kv_scale: float = 1.0, sliding_win_size: int = 0, kv_layout: str = "NHD", sm_count: int | None = None,
    enable_pdl: bool | None = None, rcp_out_scale: float = 1.0, q_seq_len: int = 1, mask: Any = None,
) -> None:  # fmt: skip
    """``flashinfer.xqa`` of 0.6.9: ``[batch, beam, (query,) heads, width]``, and lengths ``[batch, beam]``."""
    *_, heads, width = q.shape
    batch = len(q)
    assert (sm_count or 132) // (batch * num_kv_heads) <= 1, "each block writes the output (flashinfer#4161)"
    assert (q.shape[1:-2], q.is_contiguous()) == ((1, q_seq_len) if q_seq_len > 1 else (1,), True)
    assert (k_cache.shape[2], seq_lens.shape, len(semaphores)) == (num_kv_heads, (batch, 1), SEMAPHORES)
    launch_kernel(
        workspace_buffer, semaphores, q.reshape(-1, heads, width), k_cache, v_cache, page_table, seq_lens[:, 0],
        output[:, 0], mask, q_seq_len, sliding_win_size - 1, q_scale / width**0.5,
    )  # fmt: skip


def new_kernel(
    query: Any, kv_cache: Any, workspace_buffer: Any, block_tables: Any, seq_lens: Any, max_seq_len: int,
    bmm1_scale: float = 1.0, bmm2_scale: float = 1.0, window_left: int = -1, out: Any = None,
    kv_layout: str = "HND", backend: str = "auto", q_len_per_req: int = 1, mask: Any = None,
    multi_ctas_kv_counter_buffer: Any = None,
) -> None:  # fmt: skip
    """The same of 0.7: counters are an argument, and all of the workspace is scratch."""
    assert backend == "trtllm-gen"
    launch_kernel(
        workspace_buffer, multi_ctas_kv_counter_buffer, query, *kv_cache, block_tables, seq_lens, out,
        causal_mask(seq_lens, q_len_per_req), q_len_per_req, window_left, bmm1_scale,
    )  # fmt: skip


def causal_mask(lengths: torch.Tensor, query_len: int) -> torch.Tensor | None:
    """Return the mask that trtllm-gen needs no argument for."""
    return kernels._causal(query_len, len(lengths)) if query_len > 1 else None


def standin(kernel: Any = old_kernel) -> Any:
    """Return a stand-in for the ``flashinfer`` package."""
    library: Any = ModuleType("flashinfer")
    library.BatchDecodeWithPagedKVCacheWrapper = Decode
    library.BatchPrefillWithPagedKVCacheWrapper = Prefill
    library.fast_decode_plan = fast_decode_plan
    library.decode = ModuleType("flashinfer.decode")
    library.decode.trtllm_batch_decode_with_kv_cache = kernel
    library.xqa = xqa
    return library


def recorded(forward: Any) -> Any:
    """Capture a recorded graph, which runs on the very tensors of the forward."""
    graphs = RecordedGraphs()
    return graphs.capture(forward, graphs.pool()).replay


def graphs_of(rig: Any) -> dict[tuple[int, int], Any]:
    """Return the stand-in wrappers of a rig's graphs, by batch shape."""
    return {shape: planned._wrapper for shape, planned in rig.executor._wrappers.items() if shape}
