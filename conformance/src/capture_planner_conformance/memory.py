"""The memory of a runner: garbage in what a forward must not depend on, canaries in what it must leave as it is.

Before a forward ``Garbage`` overwrites everything that it must not read. ``Snapshot`` holds the canaries: an output
stays valid until its last declared reader has run, and a buffer until its owner writes it. A forward of one role, from
any graph of the pool, writes its own outputs and fields up to its extents, its own workspace, and the slots and states
of its requests. All else is compared bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from capture_planner.modes import Role
from capture_planner_runner.execution.fields import Extents, poison, tensor_of
from capture_planner_runner.execution.inputs import Array
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.execution.updates import LENGTHS
from capture_planner_runner.numerics.tolerance import INTEGERS
from capture_planner_runner.runner import Runner

SOURCES = ("outputs", "pool", "workspace", "null page", "free pages", "padded rows")
"""Places of garbage, in addition to the fields, which go by their keys. Pages are the world's, rows the probe's; with
the pages go states: of the null row, and of rows that no request owns."""


class Garbage:
    """Writes garbage everywhere except to the ``spared`` sources."""

    def __init__(self, spared: Iterable[str] = ()) -> None:
        self._spared = frozenset(spared)
        self._turns: Counter[Role] = Counter()

    def before(self, role: RoleRun, *, filled: bool) -> None:
        """Overwrite outputs, pool and workspace; fields only if they are filled afterwards."""
        self._turns[role.role] += 1
        if not filled:
            self.fields(role)
        if "outputs" not in self._spared:
            for held in role.body.outputs():
                poison(tensor_of(held))
        if "pool" not in self._spared and role.graphs.pool is not None:
            role.graphs.pool.poison()
        if "workspace" not in self._spared:
            for group in role.groups:
                group.workspace.fill_(255)

    def fields(self, role: RoleRun, beyond: Extents | None = None) -> None:
        """Overwrite fields beyond some extents, or entirely, with the smallest number or the largest.

        Every third turn leaves them as earlier steps did. Each kind hides what the others show: a number below
        all bounds can mean "skip this row", a stale one is within bounds, and a runner that knows its fields
        to be overwritten cleans what it otherwise forgets. A turn is two forwards, so that one follows another
        undisturbed.
        """
        turn = self._turns[role.role] // 2 % 3
        if turn == 2:
            return
        for buffer in role.fields:
            if not buffer.is_frozen and buffer.key not in self._spared:
                rows = 0 if beyond is None else beyond.rows(buffer.field)
                (poison if turn else poison_high)(buffer.tensor[rows:])
                buffer.spoil()


def poison_high(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with the largest integer of the dtype."""
    # torch.iinfo has no bool.
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        poison(tensor)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


class Outputs:
    """Copies of the attention outputs of each layer, to see which rows were written."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Role, int], torch.Tensor] = {}

    @contextmanager
    def marked(self, role: RoleRun, layer: int, out: torch.Tensor) -> Iterator[None]:
        """Mark an output before attention, and copy it afterwards; in a graph, at each replay."""
        out.view(INTEGERS[out.itemsize]).fill_(mark(out))
        yield
        key = role.role, layer
        # Made in the warm-up before a capture, so it is not in the graph's memory.
        if key not in self._copies:
            self._copies[key] = out.new_zeros(role.fields.capacity.tokens, out[0].numel())
        self._copies[key][: len(out)].copy_(out.flatten(1))

    def of(self, role: RoleRun) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield, for each layer that attended, its output ``[rows, width]`` of the last forward."""
        rows = role.attention.seen_rows()
        for (of, layer), copy in self._copies.items():
            if of is role.role:
                yield layer, copy[:rows]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers that are equal where bits are, NaNs included."""
    return tensor.contiguous().view(INTEGERS[tensor.itemsize])


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """Return the values of tensors, which a GPU sends in one copy: each copy waits for the processes that share it."""
    sent = torch.cat([bits(tensor).view(-1).view(torch.uint8) for tensor in tensors.values()]).cpu().numpy()
    found, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        found[name] = sent[begin:end].view(dtype).reshape(tensor.shape)
    return found


def mark(tensor: torch.Tensor) -> int:
    """Return the integer that an output holds before attention, bit by bit: no kernel computes it."""
    return int.from_bytes(b"\x7b" * tensor.itemsize, "little")


# Canaries.

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
    def of(cls, canaries: tuple[Canary, ...]) -> Snapshot:
        """Take the bytes of canaries."""
        return cls(canaries, _joined(canaries))

    def changed(self) -> str | None:
        """Return the name of a canary that is not as it was."""
        now = _joined(self.canaries)
        if torch.equal(now, self.content):
            return None
        first, end = int((now != self.content).nonzero()[0]), 0
        for name, tensor in self.canaries:
            end += len(tensor)
            if first < end:
                return name
        raise AssertionError("a changed byte is in a canary")


def canaries_of(runner: Runner, role: RoleRun, extents: Extents) -> tuple[Canary, ...]:
    """Return everything that a forward of ``role`` at these extents must not change, as views ``uint8[bytes]``."""
    return tuple(
        (name, tensor.detach().view(-1).view(torch.uint8))
        for other in runner.roles.values()
        for name, tensor in (_own(role, extents) if other is role else _others(other, role))
        if tensor.nbytes <= LARGEST
    )


def _own(role: RoleRun, extents: Extents) -> Iterator[Canary]:
    """Yield what a forward of a role leaves of its own buffers: all that is not written, or not so far."""
    name = role.role.value
    for buffer in role.fields:
        # A key with a dot is of a field that a backend declared, and may write itself.
        if buffer.is_frozen or ("." not in buffer.key and buffer.field.name not in MOVED_FIELDS):
            yield f"{name}.{buffer.key}", buffer.tensor
        elif "." not in buffer.key:
            yield f"{name}.{buffer.key} behind the padding", buffer.tensor[extents.rows(buffer.field) :]
    for output, holder, attribute in role.body.outputs():
        # The draft state is checked apart, request by request.
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
    return torch.cat([tensor for _, tensor in canaries])


# Buffers that a backend keeps for itself: no contract names them, and a finding should.

DEPTH = 3
"""How far tensors are looked for: in attributes, and in containers and values that attributes hold."""

_OURS = ("capture_planner.", "capture_planner_runner.", "capture_planner_conformance.")
"""Modules of ours, whose values are not a backend's."""


def private_buffers(runner: Runner) -> Mapping[str, torch.Tensor]:
    """Return the tensors that executors hold and that are not the runner's, by role, group and attribute."""
    roles = runner.roles.values()
    # Compared by storage: a view of the runner's memory is not a buffer of the backend.
    own = {tensor_of(held).untyped_storage().data_ptr() for role in roles for held in role.persistent()}
    own |= {weight.untyped_storage().data_ptr() for role in roles for _, weight in _weights(role)}
    found: dict[str, torch.Tensor] = {}
    for role in roles:
        for group in role.groups:
            for name, tensor in _tensors(group.executor, DEPTH):
                storage = tensor.untyped_storage().data_ptr()
                if storage not in own and tensor.numel():
                    own.add(storage)
                    found[f"private buffer {name} of {role.role.value}, group {group.plan.name}"] = tensor
    return found


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
    elif isinstance(value, (str, bytes, torch.Tensor, type)) or type(value).__module__.startswith(_OURS):
        return
    else:
        names = [*getattr(value, "__dict__", {}), *(name for name in getattr(type(value), "__slots__", ()))]
        # A name in `__slots__` may have no value yet.
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
