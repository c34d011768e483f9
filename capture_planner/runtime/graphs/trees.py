"""The arguments and results of operators: tensors and numbers in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from capture_planner.runtime.graphs.pool import OwnTensor

_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that hold no tensor. Each operator's arguments are searched several times."""


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with each tensor, or place of one, changed."""
    kind = type(tree)
    if kind in _LEAVES:
        return tree
    if issubclass(kind, (torch.Tensor, OwnTensor)):
        return change(tree)
    if issubclass(kind, (list, tuple)):
        return kind([mapped(item, change) for item in tree])
    if issubclass(kind, dict):
        return {name: mapped(item, change) for name, item in tree.items()}
    return tree


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of arguments or of a result, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for item in tree if type(item) not in _LEAVES for tensor in tensors_of(item)]
