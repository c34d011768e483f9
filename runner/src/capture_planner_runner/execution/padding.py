"""Fill and pad: one table for a step, a row a field; applied in torch here, in one kernel on a GPU.

A row says what is real, and how far the fill goes after it. Fills that are the same at every step
are written only where the step before left something else; those that follow the batch (the real
total, the last value) go to the end of the buffer each time. So nothing past the real extent ever
keeps a value of an earlier batch, whatever extents a graph was captured with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from capture_planner.errors import RunError
from capture_planner.records.backend import Axis, Bound, Fill
from capture_planner_runner.execution.fields import Extents, FieldBuffer

Values = Mapping[str, np.ndarray[Any, Any]]
"""The real values of a step by field name: a vector, or the rows and columns of a table in use."""


@attrs.define(eq=False)
class Write:
    """One row of the table: where it goes, what is real, and how far to fill."""

    buffer: FieldBuffer
    real: np.ndarray[Any, Any] | None
    """``[rows]`` or ``[rows, columns]``; None for a field whose values its backend writes itself."""
    rows: int
    """Rows that hold a real value or are filled."""
    columns: int
    """The same for columns; 1 of a vector."""
    fill: int


def table(buffers: Iterable[FieldBuffer], values: Values, num_tokens: int) -> list[Write]:
    """Return the writes that bring ``buffers`` from the last step to this one.

    ``num_tokens`` is the real total. A field that ``values`` does not have is its backend's own: all
    of it is filled before the backend writes.
    """
    writes = []
    for buffer in buffers:
        if buffer.is_frozen:
            continue
        real = values.get(buffer.field.name)
        if real is None or buffer.constant is None:
            # Its backend writes it, or its fill follows the batch: fill to the end of the buffer.
            buffer.spoil()
        rows, columns = buffer.dirty_rows, buffer.dirty_columns
        if real is not None:
            height, width = len(real), real.shape[1] if real.ndim == 2 else 1
            if real.ndim != buffer.tensor.dim() or height > buffer.rows or width > buffer.columns:
                room = list(buffer.tensor.shape)
                raise RunError(f"{buffer.key} has room for {room}, and this step has {list(real.shape)}")
            # Also fill what the step before wrote behind this step's values.
            buffer.dirty_rows, buffer.dirty_columns = height, width
            rows, columns = max(rows, height), max(columns, width)
        writes.append(Write(buffer, real, rows, columns, fill_of(buffer, real, num_tokens)))
    return writes


def fill_of(buffer: FieldBuffer, real: np.ndarray[Any, Any] | None, num_tokens: int) -> int:
    """Return what goes after the real values of a step."""
    if buffer.constant is not None:
        return buffer.constant
    if buffer.field.fill is Fill.REAL_TOTAL:
        return num_tokens
    if buffer.field.fill is Fill.REPEAT_LAST:
        return int(real[-1]) if real is not None and len(real) else 0
    raise RunError(
        f"the field {buffer.key} is filled with its worst case, which no step can know; "
        "declare it frozen and on the host, or give it another fill"
    )


def apply(writes: Sequence[Write]) -> None:
    """Bring the buffers up to date, on any device: as arrays on a host, else with torch operators."""
    for write in writes:
        target: Any = write.buffer.tensor if write.buffer.array is None else write.buffer.array
        real, rows = write.real, 0
        if real is not None:
            rows = len(real)
            values = real if write.buffer.array is not None else torch.from_numpy(np.ascontiguousarray(real))
            if real.ndim == 1:
                target[:rows] = values
            else:
                columns = real.shape[1]
                target[:rows, :columns] = values
                # A table may have been wider in the step before.
                if write.columns > columns:
                    target[:rows, columns : write.columns] = write.fill
        # Rows behind the real ones: the padding of this step, and what the step before left.
        if write.rows > rows:
            if target.ndim == 1:
                target[rows : write.rows] = write.fill
            else:
                target[rows : write.rows, : write.columns] = write.fill


@attrs.frozen(kw_only=True)
class Bounds:
    """Exclusive upper bounds of index fields: the number of items that each indexes."""

    reqs: int
    pages: int
    slots: int
    states: int
    positions: int
    vocabulary: int
    workspace: int

    def of(self, bound: Bound, extents: Extents) -> int:
        """Return the first value that is out of range."""
        if bound is Bound.TOKENS:
            return extents.tokens
        if bound is Bound.REQUESTS:
            return self.reqs
        number: int = getattr(self, bound.value)
        return number


def out_of_bounds(
    buffer: FieldBuffer, held: np.ndarray[Any, Any], real: np.ndarray[Any, Any] | None, extents: Extents, bounds: Bounds
) -> str | None:
    """Return a sentence about the first value of an index field's ``held``, real or padding, that is out of bounds.

    A fill of -1 says skip, and is in order in padding alone. An offset past the end of the tokens is
    in order where the field holds offsets (one more than requests).
    """
    field = buffer.field
    assert field.indexes is not None, "asked of index fields"
    top = bounds.of(field.indexes, extents) + (field.axis is Axis.REQUEST_PLUS_ONE)
    wrong = (held < 0) | (held >= top)
    # A field that its backend writes has no real values on the host, so everything counts as padding.
    padded = np.ones(held.shape, dtype=np.bool_)
    if real is not None:
        padded[tuple(slice(length) for length in real.shape)] = False
    skips = field.fill is Fill.CONSTANT and field.value == -1
    if skips:
        wrong &= ~(padded & (held == -1))
    if not wrong.any():
        return None
    place = tuple(int(index) for index in np.argwhere(wrong)[0])
    allowed = f"at least 0 and less than {top}"
    if padded[place] and skips:
        allowed += ", or its fill of -1"
    return (
        f"{buffer.key}[{', '.join(map(str, place))}] is {held[place]}, {'padding' if padded[place] else 'a real value'}"
        f"; it indexes {field.indexes.value}, so it must be {allowed}"
    )


def check_bounds(buffers: Iterable[FieldBuffer], values: Values, extents: Extents, bounds: Bounds) -> None:
    """Check every real and padded value of the index fields, up to the extents that a step reads.

    Raises ``RunError`` with the field, the place, the value and the bound. Reads the device: for debugging.
    """
    for buffer in buffers:
        if buffer.field.indexes is None or buffer.is_frozen:
            continue
        held = buffer.view(extents).cpu().numpy()
        wrong = out_of_bounds(buffer, held, values.get(buffer.field.name), extents, bounds)
        if wrong is not None:
            raise RunError(wrong)
