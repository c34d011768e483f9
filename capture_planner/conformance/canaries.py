"""Canaries: persistent memory that a forward must leave as it is, since it belongs to others.

An output stays valid until its last declared reader has run, and a buffer until its owner writes it: a forward of
one role, from any graph of the pool, writes its own outputs and fields up to its extents, its own workspace, and the
slots and states of its requests. All else is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

from capture_planner.runtime.execution.fields import Extents, tensor_of
from capture_planner.runtime.execution.role import RoleRun
from capture_planner.runtime.execution.updates import LENGTHS
from capture_planner.runtime.runner import Runner

MOVED_FIELDS = ("input_ids", "positions", "slot_mapping", *LENGTHS)
"""Fields of a role that its own graphs advance."""

STATE = "draft_state."
"""The names of outputs that have a row for each request, where the others have one for each token."""

LARGEST = 1 << 20
"""Bytes of a canary: what is larger is a workspace of a library, which is no output."""

Canary = tuple[str, torch.Tensor]


@attrs.frozen(eq=False)
class Snapshot:
    """The canaries of one forward, and their bytes before it."""

    canaries: tuple[Canary, ...]
    content: torch.Tensor
    """``uint8[bytes]``, one canary after the other."""

    @classmethod
    def of(cls, runner: Runner, role: RoleRun, extents: Extents) -> Snapshot:
        """Take the bytes of everything that a forward of ``role`` at these extents must not change."""
        canaries = tuple(
            (name, tensor)
            for other in runner.parts.roles.values()
            for name, tensor in (_own(role, extents) if other is role else _others(other, role))
            if tensor.nbytes <= LARGEST
        )
        return cls(canaries, _joined(canaries))

    def changed(self) -> str | None:
        """Return the name of a canary that is not as it was."""
        now = _joined(self.canaries)
        if torch.equal(now, self.content):
            return None
        first, end = int((now != self.content).nonzero()[0]), 0
        for name, tensor in self.canaries:
            end += tensor.nbytes
            if first < end:
                return name
        raise AssertionError("a changed byte is in a canary")


def _own(role: RoleRun, extents: Extents) -> Iterator[Canary]:
    """Yield what a forward of a role leaves of its own buffers: all that is not written, or not so far."""
    name = role.role.value
    for buffer in role.fields:
        if buffer.is_frozen or ("." not in buffer.key and buffer.field.name not in MOVED_FIELDS):
            yield f"{name}.{buffer.key}", buffer.tensor
        elif "." not in buffer.key:
            yield f"{name}.{buffer.key} behind the padding", buffer.tensor[extents.rows(buffer.field) :]
    for output, holder, attribute in role.body.outputs():
        if not output.startswith(STATE):
            tensor = tensor_of((output, holder, attribute))
            yield f"{name}.{output} behind the padding", tensor[extents.tokens :]
    yield from _weights(role)


def _others(other: RoleRun, role: RoleRun) -> Iterator[Canary]:
    """Yield what belongs to another role: fields, outputs, weights and workspaces."""
    name = other.role.value
    for buffer in other.fields:
        yield f"{name}.{buffer.key}", buffer.tensor
    for output, holder, attribute in other.body.outputs():
        # Drafters share their state; whose row may change is checked apart.
        if not (output.startswith(STATE) and role.role.is_drafter):
            yield f"{name}.{output}", tensor_of((output, holder, attribute))
    for group in other.groups:
        yield f"{name}.{group.plan.name}.workspace", group.workspace
    yield from _weights(other)


def _weights(role: RoleRun) -> Iterator[Canary]:
    for name, module, attribute in role.body.weights():
        yield f"the weight {name} of {role.role.value}", getattr(module, attribute)


def _joined(canaries: tuple[Canary, ...]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in canaries])
