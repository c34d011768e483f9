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
from capture_planner.runtime.padding import Write

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
        self.table = self.bytes.view(np.int64)
        self.of = {name: self.bytes.view(name) for name in ("uint8", "bool", "int32", "int64", "float32")}


@attrs.frozen(kw_only=True)
class Packed:
    """How much of the staging a step takes, and how large its largest write is."""

    bytes: int
    elements: int


def pack(writes: Sequence[Write], staging: Staging) -> Packed:
    """Write the table of ``writes`` into ``staging``, and after it their real values.

    The table has a row of 9 int64 for each write: destination address, offset of the values in the
    staging in bytes, elements between rows of the destination, real rows, real columns, rows and
    columns to touch, the fill's bits, bytes an element. Values are converted to the buffer's type.
    Nothing but ``staging`` changes. Writes are no larger than their buffers: ``padding.table`` sees to it.
    """
    rows: list[int] = []
    at, largest = len(writes) * _COLUMNS * 8, 0
    for write in writes:
        tensor, real, dtype = write.buffer.tensor, write.real, write.buffer.field.dtype
        size = tensor.itemsize
        shape = (0, 0) if real is None else real.shape if real.ndim == 2 else (len(real), 1)
        rows += (tensor.data_ptr(), at, tensor.stride(0), *shape)
        rows += (write.rows, write.columns, _bits(write.fill, dtype), size)
        largest = max(largest, write.rows * write.columns)
        if real is not None:
            first = at // size
            staging.of[dtype][first : first + real.size].reshape(real.shape)[...] = real
            at += -(-real.size * size // _ALIGNMENT) * _ALIGNMENT
    staging.table[: len(rows)] = rows
    return Packed(bytes=at, elements=largest)


def _bits(fill: int, dtype: str) -> int:
    """Return the fill as the kernel stores it: the low bytes of an integer."""
    return int(np.float32(fill).view(np.int32)) if dtype == "float32" else fill


class FusedPadding:
    """Brings the buffers of a step up to date with one copy and one kernel launch."""

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
                "capture_planner.runtime.fused is imported it needs the CPU"
            )
        self.staging_bytes, self.max_writes = staging_bytes, max_writes
        room = -(-staging_bytes // _ALIGNMENT) * _ALIGNMENT + max_writes * (_COLUMNS * 8 + _ALIGNMENT)
        pinned = device.type == "cuda"
        self._staged = [Staging(torch.zeros(room, dtype=torch.uint8, pin_memory=pinned)) for _ in range(2)]
        # A staging buffer is written again two steps later: its copy must have run by then, or the
        # device gets the values of a later step (mini-sglang#103).
        self._copied = [torch.cuda.Event() for _ in self._staged] if pinned else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self._device = torch.zeros(room, dtype=torch.uint8, device=device)

    def apply(self, writes: Sequence[Write]) -> None:
        """Bring the buffers of ``writes`` up to date, in the order of the current stream.

        The writes may be of any number of roles; no two may be to one buffer. Raises ``RunError``
        where there are more of them, or more values, than there is room for.
        """
        values = sum(
            write.real.size * write.buffer.tensor.itemsize for write in writes if write.real is not None
        )
        if len(writes) > self.max_writes or values > self.staging_bytes:
            raise RunError(
                f"a step of {len(writes)} writes with {values} bytes of values; there is room for "
                f"{self.max_writes} writes and {self.staging_bytes} bytes; reserve more"
            )
        turn = self._turn = 1 - self._turn
        if self._copied:
            self._copied[turn].synchronize()
        packed = pack(writes, self._staged[turn])
        if not packed.elements:
            return
        self._device[: packed.bytes].copy_(self._staged[turn].memory[: packed.bytes], non_blocking=True)
        if self._copied:
            self._copied[turn].record()
        grid = (-(-packed.elements // _BLOCK), len(writes))
        # The kernel computes with no floats; Triton 3.9 warns where a launch leaves their rules open.
        _fill_and_pad[grid](self._device, width=_COLUMNS, block=_BLOCK, enable_fp_fusion=False)


@triton.jit  # type: ignore[untyped-decorator]
def _fill_and_pad(staging: tl.tensor, width: tl.constexpr, block: tl.constexpr) -> None:
    # Numbers added to ``row`` are the places of ``pack``'s columns.
    row = staging.to(tl.pointer_type(tl.int64)) + tl.program_id(1) * width
    first = tl.program_id(0) * block
    elements = (tl.load(row + 5) * tl.load(row + 6)).to(tl.int32)
    if first >= elements:
        return
    places = first + tl.arange(0, block)
    size = tl.load(row + 8)
    if size == 8:
        _write(staging, row, places, elements, tl.int64)
    elif size == 4:
        _write(staging, row, places, elements, tl.int32)
    else:
        _write(staging, row, places, elements, tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def _write(
    staging: tl.tensor, row: tl.tensor, places: tl.tensor, elements: tl.tensor, element: tl.constexpr
) -> None:
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
