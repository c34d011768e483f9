"""Operators that read device values on the host, which no graph can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


def is_mask(index: torch.Tensor | None) -> bool:
    """Return True for an index of booleans, on whose values the shape of the result depends."""
    # uint8 was the dtype of masks before bool, and torch still takes it for one.
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def reads_host(operator: Any, arguments: Sequence[Any]) -> bool:
    """Say whether an operator of torch reads device values on the host; indexing does by masks only."""
    if operator is torch.ops.aten.index.Tensor:
        return any(map(is_mask, arguments[1]))
    return not _TAGS.isdisjoint(operator.tags)
