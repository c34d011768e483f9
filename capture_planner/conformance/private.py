"""The buffers that a backend keeps for itself: no contract names them, and a finding should."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import torch

from capture_planner.runtime.execution.fields import tensor_of
from capture_planner.runtime.runner import Runner

DEPTH = 3
"""How far tensors are looked for: in attributes, and in containers and values that attributes hold."""


def private_buffers(runner: Runner) -> Mapping[str, torch.Tensor]:
    """Return the tensors that executors hold and that are not the runner's, by role, group and attribute."""
    roles = runner.parts.roles.values()
    own = {tensor_of(held).untyped_storage().data_ptr() for role in roles for held in role.persistent()}
    own |= {weight.untyped_storage().data_ptr() for weight in _weights(runner)}
    found: dict[str, torch.Tensor] = {}
    for role in roles:
        for group in role.groups:
            for name, tensor in _tensors(group.executor, DEPTH):
                storage = tensor.untyped_storage().data_ptr()
                if storage not in own and tensor.numel():
                    own.add(storage)
                    found[f"private buffer {name} of {role.role.value}, group {group.plan.name}"] = tensor
    return found


def _weights(runner: Runner) -> Iterator[torch.Tensor]:
    for role in runner.parts.roles.values():
        for _, module, attribute in role.body.weights():
            yield getattr(module, attribute)


def _tensors(value: object, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that an object holds, each with the path to it."""
    for name, each in _parts(value):
        if isinstance(each, torch.Tensor):
            yield name, each
        elif depth > 1:
            for rest, tensor in _tensors(each, depth - 1):
                yield f"{name}{rest if rest.startswith('[') else '.' + rest}", tensor


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in list(value.items()))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, (str, bytes, torch.Tensor, type)) or type(value).__module__.startswith("capture_planner."):
        return
    else:
        names = [*getattr(value, "__dict__", {}), *(name for name in getattr(type(value), "__slots__", ()))]
        yield from ((name, getattr(value, name)) for name in dict.fromkeys(names) if hasattr(value, name))


@attrs.frozen
class Kept:
    """What private buffers held after the capture, to be put back before each forward."""

    values: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @classmethod
    def of(cls, runner: Runner, names: Collection[str]) -> Kept:
        """Return the values of the named buffers now."""
        wanted = [tensor for name, tensor in private_buffers(runner).items() if name in names] if names else []
        return cls(tuple((tensor, tensor.clone()) for tensor in wanted))

    def restore(self) -> None:
        """Put them back."""
        for tensor, value in self.values:
            tensor.copy_(value)
