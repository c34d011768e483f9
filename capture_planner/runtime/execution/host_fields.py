"""A step's metadata on the host, for backends that plan there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from capture_planner.runtime.execution import padding
from capture_planner.runtime.execution.fields import Extents, FieldBuffer
from capture_planner.runtime.execution.inputs import Array, StepInputs


class HostFields(Mapping[str, Array]):
    """A step's fields on the host, as one group declares them, padded when they are asked for."""

    def __init__(self, buffers: Mapping[str, FieldBuffer], inputs: StepInputs, seen: Extents, num_tokens: int) -> None:
        self._buffers, self._inputs, self._seen, self._num_tokens = buffers, inputs, seen, num_tokens

    def __getitem__(self, name: str) -> Array:
        value, buffer = self._inputs.declared[name], self._buffers.get(name)
        if buffer is None:
            return value
        rows = self._seen.rows(buffer.field)
        if rows <= len(value):
            return value[:rows]
        fill = padding.fill_of(buffer, value, self._num_tokens)
        return np.concatenate((value, np.full((rows - len(value), *value.shape[1:]), fill, value.dtype)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs.declared)

    def __len__(self) -> int:
        return len(self._inputs.declared)
