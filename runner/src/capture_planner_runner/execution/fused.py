"""The table of a step applied in one copy and one kernel: what ``padding.apply`` does, on a GPU.

The host packs the table and all real values into one staging buffer. One copy brings it to the device,
and one Triton kernel reads a row of the table for each write and brings that buffer up to date. The
staging buffers are as old as the object: a step allocates nothing on the device.

This module alone imports Triton; import it where there is a GPU. For tests on a CPU,
``TRITON_INTERPRET=1`` must be in the environment when it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from capture_planner.errors import RunError
from capture_planner_runner.execution.padding import Write
from capture_planner_runner.graphs.cuda import nothing_collected

_COLUMNS = 9
_ALIGNMENT = 8
"""Values of every type start at a multiple of the widest."""

_BLOCK = 1024
"""Elements a program. A decode step's fields are mostly smaller: then the grid has a program a write."""


class Staging:
    """Host memory that one step is packed into, seen as each type of element."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        """``uint8[bytes]`` on the host, bytes a multiple of 8."""
        self.bytes = memory.numpy()
        self.filled = 0
        """Numbers of the table that the last step wrote."""
        self.table = self.bytes.view(np.int64)
        self.of = {name: self.bytes.view(name) for name in ("uint8", "bool", "int32", "int64", "float32")}


@attrs.frozen(kw_only=True)
class StagingUse:
    """Bytes of the staging that a step takes, and elements of its largest write."""

    bytes: int
    elements: int


def pack(writes: Sequence[Write], staging: Staging, max_writes: int) -> StagingUse:
    """Write the table of ``writes`` into ``staging``, and after it their real values.

    The table has a row of 9 int64 for each write: destination address, offset of the values in the
    staging in bytes, elements between rows of the destination, real rows, real columns, rows and
    columns to touch, the fill's bits, bytes an element. Values are converted to the buffer's type.
    The table has room for ``max_writes``, and rows that no write has touch nothing. Nothing but
    ``staging`` changes. Writes are no larger than their buffers: ``padding.table`` sees to it.
    """
    rows: list[int] = []
    at, largest = max_writes * _COLUMNS * 8, 0
    for write in writes:
        buffer, real = write.buffer, write.real
        tensor, dtype, elements = buffer.tensor, buffer.field.dtype, write.rows * write.columns
        size = tensor.itemsize
        if real is None:
            shape = (0, 0)
        else:
            count = real.size
            staging.of[dtype][at // size : at // size + count] = real.ravel()
            shape = real.shape if real.ndim == 2 else (count, 1)
        rows += (tensor.data_ptr(), at, tensor.stride(0), *shape)
        rows += (write.rows, write.columns, _bits(write.fill, dtype), size)
        if elements > largest:
            largest = elements
        if real is not None:
            at += -(-count * size // _ALIGNMENT) * _ALIGNMENT
    staging.table[: len(rows)] = rows
    # A replayed graph covers `max_writes` rows: rows left by an earlier, larger step must write nothing.
    staging.table[len(rows) : staging.filled] = 0
    staging.filled = len(rows)
    return StagingUse(bytes=at, elements=largest)


def _bits(fill: int, dtype: str) -> int:
    """Return the fill as the kernel stores it: the low bytes of an integer."""
    return int(np.float32(fill).view(np.int32)) if dtype == "float32" else fill


class FusedPadding:
    """Brings the buffers of a step up to date with one copy and one kernel launch.

    On a GPU these two are a graph themselves, for a few sizes each: launched one by one, they take the
    host five times as long.
    """

    def __init__(self, device: torch.device, staging_bytes: int, max_writes: int) -> None:
        """Allocate for steps of at most ``max_writes`` writes with ``staging_bytes`` of real values.

        The memory of all the fields together (``Fields.memory``) is always enough. Raises
        ``RunError`` where Triton cannot run on ``device`` in this process.
        """
        interpreted = not isinstance(_fill_and_pad, triton.runtime.JITFunction)
        if interpreted != (device.type == "cpu"):
            raise RunError(
                f"the fused padding kernel was {'interpreted' if interpreted else 'compiled'}, and the device is "
                f"{device}; compiled it needs a GPU, and with TRITON_INTERPRET=1 in the environment before "
                "capture_planner_runner.execution.fused is imported it needs the CPU"
            )
        self.staging_bytes, self.max_writes = staging_bytes, max_writes
        rows = max(max_writes, 1)
        room = -(-staging_bytes // _ALIGNMENT) * _ALIGNMENT + rows * (_COLUMNS * 8 + _ALIGNMENT)
        pinned = device.type == "cuda"
        self._staged = [Staging(torch.zeros(room, dtype=torch.uint8, pin_memory=pinned)) for _ in range(2)]
        # A staging buffer is written again two steps later: its copy must have run by then, or the
        # device gets the values of a later step (mini-sglang#103).
        self._copied = [torch.cuda.Event() for _ in self._staged] if pinned else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self._device = torch.zeros(room, dtype=torch.uint8, device=device)
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        if pinned:
            # Compiled here, with a table that touches nothing: not in a capture.
            self._launch(1, rows)

    def apply(self, writes: Sequence[Write]) -> None:
        """Bring the buffers of ``writes`` up to date, in the order of the current stream.

        The writes may be of any number of roles; no two may be to one buffer. Raises ``RunError``
        where there are more of them, or more values, than there is room for.
        """
        values = sum(write.real.size * write.buffer.tensor.itemsize for write in writes if write.real is not None)
        if len(writes) > self.max_writes or values > self.staging_bytes:
            raise RunError(
                f"a step of {len(writes)} writes with {values} bytes of values; there is room for "
                f"{self.max_writes} writes and {self.staging_bytes} bytes; reserve more"
            )
        turn = self._turn = 1 - self._turn
        if self._copied:
            self._copied[turn].synchronize()
        packed = pack(writes, self._staged[turn], self.max_writes)
        if not packed.elements:
            return
        blocks = -(-packed.elements // _BLOCK)
        if not self._copied:
            self._copy(turn, packed.bytes)
            self._launch(blocks, len(writes))
            return
        self._graph(turn, packed.bytes, blocks).replay()
        self._copied[turn].record()

    def _copy(self, turn: int, count: int) -> None:
        self._device[:count].copy_(self._staged[turn].memory[:count], non_blocking=True)

    def _launch(self, blocks: int, rows: int) -> None:
        # The kernel computes with no floats; Triton 3.9 warns where a launch leaves their rules open.
        _fill_and_pad[blocks, rows](self._device, width=_COLUMNS, block=_BLOCK, enable_fp_fusion=False)

    def _graph(self, turn: int, count: int, blocks: int) -> torch.cuda.CUDAGraph:
        """Return a graph that copies and covers at least so much, captured when it is first needed."""
        # By powers of two, so that a few graphs serve all steps.
        count = min(1 << (count - 1).bit_length(), len(self._device))
        # A graph holds the address of the staging that it copies from, so each of the two has graphs of its own.
        key = turn, count, 1 << (blocks - 1).bit_length()
        if key not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            # The default stream, which may be the current one, captures nothing.
            stream = torch.cuda.Stream(self._device.device)  # type: ignore[no-untyped-call]
            with nothing_collected(), torch.cuda.stream(stream):
                # In mode global, a CUDA call of another thread, such as NCCL's proxy, breaks the capture (vllm#46253).
                graph.capture_begin(capture_error_mode="thread_local")
                self._copy(turn, count)
                self._launch(key[2], self.max_writes)
                graph.capture_end()
            self._graphs[key] = graph
        return self._graphs[key]


@triton.jit  # type: ignore[untyped-decorator]
def _fill_and_pad(staging, width: tl.constexpr, block: tl.constexpr) -> None:
    # Numbers added to ``row`` are the places of ``pack``'s columns.
    row = staging.to(tl.pointer_type(tl.int64)) + tl.program_id(1) * width
    first = tl.program_id(0) * block
    elements = (tl.load(row + 5) * tl.load(row + 6)).to(tl.int32)
    if first >= elements:
        return
    places = first + tl.arange(0, block)
    size = tl.load(row + 8)
    # Values are moved and not computed with: any type of their width will do.
    if size == 8:
        _write(staging, row, places, elements, tl.int64)
    elif size == 4:
        _write(staging, row, places, elements, tl.int32)
    else:
        _write(staging, row, places, elements, tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _write(staging, row, places, elements, element: tl.constexpr) -> None:
    target = tl.load(row).to(tl.pointer_type(element))
    source = (staging + tl.load(row + 1)).to(tl.pointer_type(element))
    real_columns = tl.load(row + 4)
    columns = tl.load(row + 6).to(tl.int32)
    r = places // columns
    c = places % columns
    real = (r < tl.load(row + 3)) & (c < real_columns)
    value = tl.load(source + r * real_columns + c, mask=real, other=0)
    value = tl.where(real, value, tl.load(row + 7).to(element))
    tl.store(target + r * tl.load(row + 2) + c, value, mask=places < elements)
