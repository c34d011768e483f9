"""What outlives a capture: tensors in a graph's memory that something in Python still refers to.

A frame that has ended does not count: nothing reads its variables any more. An exception that a library keeps, such as
the ``ImportError`` of an optional module, keeps the frames of all its callers, with every tensor in them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FrameType, FunctionType
from typing import Any

import attrs
import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (tuple, list, dict, set, CellType, FunctionType)
_DEPTH = 4
"""How many containers may lie between a tensor and a frame, or a tensor and an object that has a name."""


@attrs.frozen
class Leftover:
    """Tensors that a forward made and that outlived its capture: the next replay overwrites them."""

    size: int = 0
    """In bytes."""
    holders: tuple[str, ...] = ()
    """What refers to them, in words."""


def leftover(sizes: Mapping[int, int], key_of: Callable[[torch.Tensor], int], device: str) -> Leftover:
    """Return what of a graph's memory is referred to, once garbage and frames that have ended let go of it.

    It looks at all objects of the process. A tensor that no Python object refers to is not seen.

    :param sizes: bytes of each storage that the graph made, by its key.
    :param key_of: the key of a tensor's storage.
    :param device: the type of the tensors' device.
    """

    def living() -> list[torch.Tensor]:
        plain = (each for each in gc.get_objects() if type(each) in _PLAIN)
        return [
            each
            for each in plain
            if each.device.type == device and each.layout is torch.strided and key_of(each) in sizes
        ]

    gc.collect()
    _end_frames(living())
    left = living()
    holders = {name for tensor in left for name in _names(tensor, (id(left),), _DEPTH)}
    return Leftover(sum(sizes[key] for key in {key_of(tensor) for tensor in left}), tuple(sorted(holders)))


def _end_frames(level: list[Any]) -> None:
    """Clear the frames that refer to these objects, also through containers. Those that still run are no referrers."""
    for _ in range(_DEPTH):
        referrers = [each for each in gc.get_referrers(*level) if each is not level]
        level.clear()
        for each in referrers:
            if type(each) is FrameType:
                each.clear()
        level = [each for each in referrers if type(each) in _CONTAINERS]


def _names(held: object, own: tuple[int, ...], depth: int) -> Iterator[str]:
    """Yield what refers to an object, with the attribute; ``own``: ids of lists of this search."""
    referrers = gc.get_referrers(held)
    for referrer in referrers:
        if id(referrer) in own or type(referrer) is FrameType:
            continue
        owners = [referrer]
        if isinstance(referrer, dict):
            owners = [each for each in gc.get_referrers(referrer) if getattr(each, "__dict__", None) is referrer]
        elif type(referrer) in _CONTAINERS:
            owners = []
        for owner in owners:
            names = [name for name, value in getattr(owner, "__dict__", {}).items() if value is held]
            label = str(getattr(owner, "__name__", type(owner).__name__))
            yield from [f"{label}.{name}" for name in names] or [label]
        if not owners and depth > 1:
            yield from _names(referrer, (*own, id(referrers)), depth - 1)
