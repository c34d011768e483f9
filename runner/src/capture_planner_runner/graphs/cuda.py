"""CUDA graphs: FULL as one capture, PIECEWISE by ending and resuming capture at attention.

Everything runs on one stream that is not the default one, which captures do not take. Tensors that a
piecewise graph hands to attention are kept by address alone once they are captured, so that their
memory goes back to the pool for the graphs that follow.
"""

from __future__ import annotations

import gc
import os
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from capture_planner.errors import CaptureError, one_line
from capture_planner.records.fingerprint import Fingerprint, digest_of, kernel_name
from capture_planner_runner.graphs.graph import GraphPool, Leftover, leftover, own_address
from capture_planner_runner.graphs.reading import Reading


@attrs.frozen
class _Bytes:
    """Memory of another owner, as the array interface describes it."""

    pointer: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Collect no garbage for a while: a collection may free CUDA objects, which a capture does not survive."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def borrowed(pointer: int, size: int) -> torch.Tensor:
    """Return ``uint8[size]`` over memory on the current device, without owning it."""
    return torch.as_tensor(_Bytes(pointer, size), device="cuda")


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that does not keep it. A view would, by its base."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():  # nothing to borrow
        return tensor
    there = borrowed(storage.data_ptr(), storage.nbytes()).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(there, tensor.storage_offset(), tensor.size(), tensor.stride())


class CudaPool:
    """A pool of the caching allocator, private to graphs."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.handle = torch.cuda.graph_pool_handle()
        # Weak, since a graph that its role drops must go: only then does the allocator give up its memory.
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self._idle: tuple[int, list[torch.Tensor]] | None = None
        """What no live tensor owns, as it was with so many graphs: to ask the allocator takes long."""
        self._leftover: set[int] = set()
        """Addresses of blocks that tensors owned when a capture had ended."""

    def open(self) -> None:
        """Make it ready for a capture: what is idle is not known after it.

        The allocator gives a pool up with the last graph of it, and with torch 2.11 nothing can be
        captured into that one again: it goes on in a new one.
        """
        self._idle = None
        if not self._graphs:
            self.handle = torch.cuda.graph_pool_handle()

    def add(self, graph: CudaGraph) -> None:
        self._graphs.add(graph)

    @property
    def memory(self) -> int:
        """Bytes of the segments that the allocator holds for this pool."""
        return sum(segment["total_size"] for segment in self._segments())

    def poison(self) -> None:
        """Overwrite every block that no live tensor owns with ``0xFF``."""
        # After the last graph is gone, the allocator may free the segments, and with them the blocks that were listed.
        if self._idle is None or self._idle[0] != len(self._graphs):
            self._idle = len(self._graphs), [borrowed(*block) for block in self._blocks("inactive")]
        for block in self._idle[1]:
            block.fill_(255)

    def new_leftover(self) -> Leftover:
        """Return the blocks that live tensors own, without what was counted before."""
        owned = dict(self._blocks("active_allocated"))
        new = {address: size for address, size in owned.items() if address not in self._leftover}
        found = leftover(new, own_address, "cuda")
        # Asked again: what garbage and frames let go of meanwhile may be another tensor's next time.
        self._leftover = {address for address, _ in self._blocks("active_allocated")}
        return found

    def _blocks(self, state: str) -> Iterator[tuple[int, int]]:
        """Yield address and bytes of each block in a state."""
        for segment in self._segments():
            # A segment lists its blocks in the order of their addresses, without gaps.
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == state:
                    yield address, block["size"]
                address += block["size"]

    def _segments(self) -> list[dict[str, Any]]:
        # Of all pools: asked for one, torch 2.11 gives a reference too many back of the numbers that name
        # it, which ends the process once they are no small ones, after some hundred pools.
        found = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return [segment for segment in found if tuple(segment["segment_pool_id"]) == tuple(self.handle)]


@attrs.define(eq=False)
class CudaGraph:
    """One captured forward: CUDA graphs, with what runs between them."""

    parts: list[torch.cuda.CUDAGraph | Callable[[], object]]
    memory: int = 0
    """Bytes of segments by which it grew its pool."""
    alone: int = 0
    """Peak of its tensors in bytes; a separate pool would round up to segments."""
    leftover: Leftover = attrs.Factory(Leftover)

    @property
    def pieces(self) -> int:
        return sum(isinstance(part, torch.cuda.CUDAGraph) for part in self.parts)

    def dump(self, stem: Path) -> list[Path]:
        """Write each piece as Graphviz, by ``torch.cuda.CUDAGraph.debug_dump``."""
        graphs = [part for part in self.parts if isinstance(part, torch.cuda.CUDAGraph)]
        files = [stem.with_name(f"{stem.name}.{number}.dot") for number in range(len(graphs))]
        for graph, file in zip(graphs, files, strict=True):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "DEBUG: calling ", UserWarning)  # two notices of each call
                graph.debug_dump(str(file))
        return files

    def fingerprint(self) -> Fingerprint:
        """Return its nodes and kernels. Raises ``CaptureError`` without cuda-bindings, or where the driver refuses."""
        driver = load_driver()
        pieces = [part for part in self.parts if isinstance(part, torch.cuda.CUDAGraph)]
        return Fingerprint.of_pieces([fingerprint_of(piece.raw_cuda_graph(), driver) for piece in pieces])

    def replay(self) -> None:
        """Launch each piece, and run what is between them."""
        for part in self.parts:
            if isinstance(part, torch.cuda.CUDAGraph):
                part.replay()
            else:
                part()


class CudaGraphs:
    """Captures CUDA graphs on one device and one stream, which become the current ones.

    Without ``accounts`` the device's memory is not read around captures, which takes longer than they do.
    """

    def __init__(self, device: torch.device, *, accounts: bool = True) -> None:
        device = torch.empty(0, device=device).device  # with its index, which set_device asks for
        # Calls below that name no device, such as those for memory, are about the current one.
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Weights and buffers may still be written on the stream that was current before.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(self._stream)
        self._open: CudaGraph | None = None
        self._pool: CudaPool | None = None
        self._accounts = accounts
        # Without torch's caching allocator nothing is captured: everything runs eager.
        self._first = None if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ else self._rehearse(device)

    def __reduce__(self) -> tuple[Callable[..., CudaGraphs], tuple[torch.device]]:
        """Pickle what makes another one: streams and graphs are of one process."""
        return partial(CudaGraphs, accounts=self._accounts), (self._stream.device,)

    def _rehearse(self, device: torch.device) -> CudaGraph:
        """Capture two pieces of nothing, to be kept: what a process does once must not be in the first graph.

        As long as there is a graph, torch keeps the state that its random numbers have in graphs, 1,024 bytes.
        """
        element = torch.zeros(1, device=device)

        def forward() -> None:
            element.zero_()
            self.split(lambda tensor: None, (element,), ())
            element.zero_()

        return self.capture(forward, self.pool())

    def reading(self) -> Reading | None:
        """Wait for the device, give back what no tensor owns, and read its memory."""
        if not self._accounts:
            return None
        torch.cuda.synchronize()
        # Freed blocks that the allocator caches would count as used.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return Reading(used=total - free, held=torch.cuda.memory_reserved())

    def settle(self) -> None:
        torch.cuda.synchronize()

    def pool(self, limit: int | None = None) -> CudaPool:
        """Make a pool. A limit is checked after each capture: the allocator knows none."""
        return CudaPool(limit)

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> CudaGraph:
        assert isinstance(pool, CudaPool), "pools are made here"
        if self._open is not None:
            raise CaptureError("a capture began inside another; capture one forward at a time")
        # What still runs, as a kernel that is being compiled does, would become part of the capture (sglang#33795).
        torch.cuda.synchronize()
        pool.open()
        graph = CudaGraph([])
        self._open, self._pool = graph, pool
        try:
            # Until memory is read again: garbage of before would be taken off what the capture made.
            with nothing_collected():
                reserved, alive = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
                # The peak is of the whole process: without a reset, an earlier capture's would be counted.
                torch.cuda.reset_peak_memory_stats()
                try:
                    self._begin()
                    forward()
                    self._end()
                # Ctrl-C too: if the stream is left capturing, every later synchronization fails.
                except BaseException:
                    self._abandon()
                    raise
                torch.cuda.synchronize()
                graph.memory = torch.cuda.memory_reserved() - reserved
                graph.alone = torch.cuda.max_memory_allocated() - alive
                has_leftover = torch.cuda.memory_allocated() > alive
        except RuntimeError as error:
            # torch has no error class of its own for what a capture forbids, so the message decides.
            if "capturing" in str(error):
                raise CaptureError(f"the forward did what no graph can hold: {one_line(error)[:300]}") from error
            raise
        finally:
            self._open = self._pool = None
        # A graph that was refused may have left segments: one that fits into them still fits.
        if pool.limit is not None and graph.memory and pool.memory > pool.limit:
            held = pool.memory
            # The traceback keeps this frame, and with it the memory of a graph that is still named.
            del graph
            raise torch.OutOfMemoryError(f"the pool holds {held:,} bytes with this graph, and may hold {pool.limit:,}")
        # The allocator's list of blocks takes long to read, and few captures leave a tensor behind.
        if has_leftover:
            graph.leftover = pool.new_leftover()
        pool.add(graph)
        return graph

    def split(
        self, between: Callable[..., object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        if self._open is None:
            raise CaptureError("a split outside of a capture; only a forward that is captured is split")
        self._end()
        between(*reads, *writes)
        self._open.parts.append(partial(between, *map(alias, (*reads, *writes))))
        self._begin()

    def _begin(self) -> None:
        assert self._open is not None and self._pool is not None, "a capture is under way"
        # Kept, since a fingerprint is read from it; the executable graph is another.
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # In mode global, a CUDA call of another thread, such as NCCL's proxy, invalidates the capture (vllm#46253).
        graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
        self._open.parts.append(graph)

    def _end(self) -> None:
        assert self._open is not None, "a capture is under way"
        last = self._open.parts[-1]
        assert isinstance(last, torch.cuda.CUDAGraph), "a capture ends with what it began"
        last.capture_end()
        # A graph that is kept is not instantiated when its capture ends; the first replay would do it, and take longer.
        last.instantiate()

    def _abandon(self) -> None:
        """Leave a capture that broke; the graph is of no use any more."""
        if torch.cuda.is_current_stream_capturing():
            try:
                self._end()
            except RuntimeError:
                # The capture was invalid already; ending it says so, and that is what it is for.
                torch.cuda.synchronize()


_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_DIMENSIONS = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")


def load_driver() -> Any:
    """Return the driver's bindings; raises ``CaptureError`` where they are not installed."""
    try:
        from cuda.bindings import driver  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise CaptureError(f"graphs cannot be read, since cuda-bindings is missing ({error}); install it") from error
    return driver


def fingerprint_of(graph: int, driver: Any) -> Fingerprint:
    """Return the fingerprint of a ``cudaGraph_t``; raises ``CaptureError`` where the driver refuses.

    A node is digested with its kernel's name and launch dimensions and with the digests of the nodes before it, so that
    the order in which the driver lists nodes does not matter. Kernel arguments are not read: they hold addresses.
    """
    nodes = _read(driver, graph)
    labels = _labels(nodes)
    kernels = Counter(node.kernel for node in nodes.values() if node.kernel)
    count = sum(node.nodes for node in nodes.values())
    return Fingerprint(nodes=count, kernels=dict(sorted(kernels.items())), topology=digest_of(*sorted(labels.values())))


@attrs.frozen
class GraphNode:
    """One node, without addresses."""

    label: str
    """Its type; of a kernel also the name and the dimensions."""
    kernel: str
    """Empty for other nodes."""
    before: tuple[int, ...]
    """The nodes that it depends on."""
    nodes: int = 1
    """1, and of a child graph its own nodes too."""


def _labels(nodes: Mapping[int, GraphNode]) -> dict[int, str]:
    """Return a digest of each node with all that comes before it."""
    labels: dict[int, str] = {}
    pending = list(nodes)  # a stack: a recursion could be as deep as the graph is long
    while pending:
        key = pending[-1]
        missing = [] if key in labels else [other for other in nodes[key].before if other not in labels]
        if missing:
            pending += missing
            continue
        pending.pop()
        if key not in labels:
            labels[key] = digest_of(nodes[key].label, *sorted(labels[other] for other in nodes[key].before))
    return labels


def _read(driver: Any, graph: int) -> dict[int, GraphNode]:
    """Return the nodes of a graph by their handles."""

    def call(name: str, *arguments: Any) -> tuple[Any, ...]:
        status, *values = getattr(driver, name)(*arguments)
        if int(status):
            raise CaptureError(f"the CUDA driver does not describe a graph: {name} returns {status}")
        return tuple(values)

    handle = driver.CUgraph(graph)
    # Asked without room for handles, the driver says how many there are.
    count = call("cuGraphGetNodes", handle)[-1]
    handles = call("cuGraphGetNodes", handle, count)[0][:count] if count else []
    before: dict[int, list[int]] = {int(node): [] for node in handles}
    edges = call("cuGraphGetEdges", handle)[-1]
    if edges:
        starts, ends, *_ = call("cuGraphGetEdges", handle, edges)  # newer bindings add the data of each edge
        for start, end in zip(starts[:edges], ends[:edges], strict=True):
            before[int(end)].append(int(start))
    found = {}
    for node in handles:
        (kind,) = call("cuGraphNodeGetType", node)
        name = kind.name.removeprefix("CU_GRAPH_NODE_TYPE_")
        if name == "KERNEL":
            (parameters,) = call("cuGraphKernelNodeGetParams", node)
            kernel = _kernel(parameters, call)
            dimensions = [getattr(parameters, dimension) for dimension in _DIMENSIONS]
            label = f"{name} {kernel} {dimensions}"
            found[int(node)] = GraphNode(label, kernel_name(kernel), tuple(before[int(node)]))
        elif name == "GRAPH":
            inner = fingerprint_of(int(call("cuGraphChildGraphNodeGetGraph", node)[0]), driver)
            label = f"{name} {inner.topology}"
            found[int(node)] = GraphNode(label, "", tuple(before[int(node)]), 1 + inner.nodes)
        else:
            found[int(node)] = GraphNode(name, "", tuple(before[int(node)]))
    return found


def _kernel(parameters: Any, call: Callable[..., tuple[Any, ...]]) -> str:
    """Return the name of a kernel, which a node has as a function of a module or as a kernel of a library."""
    if int(parameters.func):
        (name,) = call("cuFuncGetName", parameters.func)
    elif int(parameters.kern):
        (name,) = call("cuKernelGetName", parameters.kern)
    else:
        return "kernel without a handle"
    # Names that contain an address differ in every process, and fingerprints must not.
    return _ADDRESS.sub("0x", name.decode(errors="replace"))
