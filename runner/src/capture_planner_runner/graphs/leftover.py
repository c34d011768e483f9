"""Tensors in a graph's memory that outlive its capture, because a Python object refers to them.

A frame that has ended does not count: nothing reads its variables any more. An exception that a library keeps, such as
the ``ImportError`` of an optional module, keeps the frames of all its callers, with every tensor in them.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Mapping
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import attrs
import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (tuple, list, dict, set, CellType, FunctionType)
_DEPTH = 4
"""Limit of objects between a tensor and a frame, or of containers between a tensor and a named object."""
_WIDTH = 64
"""Objects of a level that are followed to frames: the search takes time for each."""
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Frames that can go on."""


@attrs.frozen
class Leftover:
    """Tensors that a forward made and that outlived its capture: the next replay overwrites them."""

    size: int = 0
    """In bytes."""
    holders: tuple[str, ...] = ()
    """Names of the objects that refer to them."""


def leftover(sizes: Mapping[int, int], key_of: Callable[[torch.Tensor], int], device: str) -> Leftover:
    """Return the tensors in a graph's memory that are still referred to, after collecting garbage and ended frames.

    It looks at all objects of the process. A tensor that no Python object refers to is not seen.

    :param sizes: bytes of each storage that the graph made, by its key.
    :param key_of: the key of a tensor's storage.
    :param device: the type of the tensors' device.
    """
    if not sizes:
        return Leftover()

    def living() -> list[torch.Tensor]:
        plain = (each for each in gc.get_objects() if type(each) in _PLAIN)
        return [
            each
            for each in plain
            if each.device.type == device and each.layout is torch.strided and key_of(each) in sizes
        ]

    gc.collect()
    left = living()
    frames = _ended_frames(left)
    if frames:
        left.clear()
        for frame in frames:
            frame.clear()
        left = living()
    return Leftover(sum(sizes[key] for key in {key_of(tensor) for tensor in left}), _names(left, _holders(left)))


def own_address(tensor: torch.Tensor) -> int:
    """Return where the memory begins that a tensor owns; 0 of one over the memory of another, as pieces keep them."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.resizable() else 0


def _ended_frames(tensors: list[torch.Tensor]) -> list[FrameType]:
    """Return the frames that refer to tensors, also through other objects. A frame that runs is no referrer."""
    frames: list[FrameType] = []
    level: list[Any] = tensors
    for _ in range(_DEPTH):
        own = {id(tensors), id(level), id(frames)}
        referrers = [each for each in gc.get_referrers(*level[:_WIDTH]) if id(each) not in own] if level else []
        frames += [each for each in referrers if type(each) is FrameType and not each.f_code.co_flags & _SUSPENDS]
        level = [each for each in referrers if not isinstance(each, (FrameType, ModuleType, type))]
    return frames


def _holders(tensors: list[torch.Tensor]) -> list[Any]:
    """Return what refers to tensors, also through containers."""
    holders: list[Any] = []
    level: list[Any] = tensors
    for _ in range(_DEPTH):
        own = {id(tensors), id(level), id(holders)}
        referrers = [each for each in gc.get_referrers(*level) if id(each) not in own] if level else []
        holders += referrers
        level = [each for each in referrers if type(each) in _CONTAINERS]
    return holders


def _names(tensors: list[torch.Tensor], holders: list[Any]) -> tuple[str, ...]:
    """Return the attributes of objects, and variables of modules, that hold tensors or containers of them."""
    held = {id(each) for each in tensors} | {id(each) for each in holders if type(each) in _CONTAINERS}
    names = set()
    for holder in holders:
        if type(holder) not in _CONTAINERS:
            label = str(getattr(holder, "__name__", type(holder).__name__))
            found = [name for name, value in getattr(holder, "__dict__", {}).items() if id(value) in held]
            names |= {f"{label}.{name}" for name in found} or {label}
    return tuple(sorted(names))
