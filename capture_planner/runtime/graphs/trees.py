"""The arguments and results of operators: tensors and numbers in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    if kind is torch.Tensor or kind is OwnTensor or issubclass(kind, torch.Tensor):
        return change(tree)
    if issubclass(kind, (list, tuple)):
        return kind([item if type(item) in _LEAVES else mapped(item, change) for item in tree])
    if issubclass(kind, dict):
        return {name: mapped(item, change) for name, item in tree.items()}
    return tree


def tensors_of(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors of arguments or of a result, in order."""
    found: list[torch.Tensor] = []
    _collect(trees, found)
    return found


def _collect(trees: Iterable[Any], found: list[torch.Tensor]) -> None:
    for tree in trees:
        if type(tree) in _LEAVES:
            continue
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            _collect(tree, found)
        elif isinstance(tree, dict):
            _collect(tree.values(), found)
