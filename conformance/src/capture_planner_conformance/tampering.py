"""Attacks on what a field's declaration promises, one promise at a time."""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager

import attrs
import numpy as np
import torch

from capture_planner.errors import RunError
from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.backend import Axis, Bound, Fill
from capture_planner_runner.execution.fields import FieldBuffer, poison
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.padding import Write
from capture_planner_runner.execution.role import ForwardObserver, RoleRun
from capture_planner_runner.runner import Runner


class Attack(enum.Enum):
    """One way in which a runner could break what a field's declaration promises."""

    STALE_TAIL = "stale tail"
    """The padding holds values of an earlier, larger batch."""
    OTHER_FILL = "other fill"
    """The padding holds another value that is in range."""
    OTHER_AXIS = "other axis"
    """A field of requests extends along tokens, or vice versa."""
    SHRUNK = "shrunk"
    """The buffer ends at the real extent; other memory follows."""


class Tampering(ForwardObserver):
    """Breaks one promise of one field at every step of a runner.

    :param key: of the field's buffer in the role.
    """

    def __init__(self, role: Role, key: str, attack: Attack) -> None:
        self.error: Exception | None = None
        """What was wrong with the attack itself: no evidence about the field."""
        self._role, self._key, self._attack = role, key, attack

    @property
    def is_of_padding(self) -> bool:
        """Whether it leaves a forward without padding as it is."""
        return self._attack is not Attack.OTHER_AXIS

    def begin(self, runner: Runner) -> None:
        """Change what must change before the capture. Raises ``RunError`` if the role has no such field."""
        try:
            self._redeclare(runner)
        except Exception as error:
            self.error = error
            raise

    def writes(self, role: RoleRun, writes: list[Write]) -> list[Write]:
        """Return the writes; with a stale tail, those of the field end with its real values."""
        if self._attack is not Attack.STALE_TAIL or role.role is not self._role:
            return writes
        return [_without_fill(write) if write.buffer.key == self._key else write for write in writes]

    def forward(self, role: RoleRun, step: ForwardStep) -> AbstractContextManager[None]:
        """Cut the field before the forward, where it is attacked so."""
        if self._attack is Attack.SHRUNK and role.role is self._role:
            _cut(attackable(role)[self._key], role, step)
        return super().forward(role, step)

    def _redeclare(self, runner: Runner) -> None:
        roles = runner.roles
        if self._role not in roles:
            raise RunError(f"the case has no role {self._role}; it has {', '.join(roles)}")
        fields = attackable(roles[self._role])
        if self._key not in fields:
            raise RunError(f"{self._role} has no field {self._key!r} to attack; it has {', '.join(fields)}")
        buffer = fields[self._key]
        if self._attack is Attack.OTHER_FILL:
            buffer.redeclare(replace(buffer.field, fill=Fill.CONSTANT, value=_another(runner, buffer)))
        elif self._attack is Attack.OTHER_AXIS:
            along = Axis.REQUEST if buffer.field.axis is Axis.TOKEN else Axis.TOKEN
            buffer.redeclare(replace(buffer.field, axis=along))


def attackable(role: RoleRun) -> dict[str, FieldBuffer]:
    """Return the fields that a step writes, by key."""
    # A scalar has no padding.
    return {
        buffer.key: buffer for buffer in role.fields if not buffer.is_frozen and buffer.field.axis is not Axis.SCALAR
    }


def _without_fill(write: Write) -> Write:
    rows, columns = (0, 1) if write.real is None else (*write.real.shape, 1)[:2]
    return attrs.evolve(write, rows=rows, columns=columns)


def _another(runner: Runner, buffer: FieldBuffer) -> int:
    """Return a fill that is in range and differs from the declared one."""
    if buffer.field.indexes is Bound.SLOTS:
        return runner.pages.page_size  # The first slot of the first page that a request owns.
    return 1 if buffer.constant is None or buffer.constant != 1 else 0


def _cut(buffer: FieldBuffer, role: RoleRun, step: ForwardStep) -> None:
    """Overwrite what follows the real extent: on a host with anything, on a device within bounds."""
    tail = buffer.tensor[step.real.rows(buffer.field) : step.extents.rows(buffer.field)]
    if tail.numel():
        if tail.device.type == "cpu":
            poison(tail)
        elif buffer.field.axis is not Axis.REQUEST_PLUS_ONE:
            # Wrong offsets would have a kernel read anywhere: not on a device.
            indexes, bounds = buffer.field.indexes, role.bounds
            # Slots are those of the null page.
            below = {None: bounds.positions, Bound.SLOTS: bounds.slots // bounds.pages, Bound.TOKENS: 2}.get(indexes)
            if below is None and indexes is not None:
                below = bounds.of(indexes, step.extents)
            draw = np.random.default_rng(len(tail)).integers(0, below, tuple(tail.shape))
            tail.copy_(torch.from_numpy(draw).to(tail))
        # The next step must fill what was overwritten.
        buffer.spoil()
