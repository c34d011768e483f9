"""Contract audits: the runner treats one declared field wrongly, to see whether that matters.

A declaration is a promise that the runner keeps at every step: so many elements, along that axis, with that
fill. An audit breaks one promise at a time. If real rows change, the declaration is needed, and the smallest
batch that shows it is reported. If no attack on a backend's own field matters, the field is over-declared: it
costs a copy at every step.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import attrs
import numpy as np
import torch

from capture_planner.conformance.machine import play
from capture_planner.conformance.scene import Arrive, Case, RunBatch, Scene, Shape, dumps
from capture_planner.conformance.stage import Stage
from capture_planner.conformance.subject import Subject
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.backend import Axis, Bound
from capture_planner.records.batch import Entry
from capture_planner.runtime.execution.fields import FieldBuffer, poison
from capture_planner.runtime.execution.inputs import ForwardStep, StepInputs
from capture_planner.runtime.execution.padding import Write
from capture_planner.runtime.execution.role import ForwardTimes, RoleRun
from capture_planner.runtime.runner import Runner


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


class Verdict(enum.Enum):
    """The result of all attacks on one field."""

    NEEDED = "needed"
    UNREAD = "not read"
    """No attack matters, and the field is the runner's own."""
    OVER_DECLARED = "over-declared"
    """No attack matters, and the backend declared it."""


@attrs.frozen(kw_only=True)
class AuditResult:
    """One attack on one field."""

    role: Role
    group: str = ""
    field: str
    axis: str = ""
    declared_by: str = ""
    """The backend's name, or ``runner``."""
    attack: Attack
    matters: bool = False
    message: str = ""
    """What changed."""
    batch: str = ""
    entry: Entry | None = None
    case: str = ""
    """The smallest case that shows it."""


def verdicts(audited: Sequence[AuditResult]) -> dict[tuple[Role, str], Verdict]:
    """Return the verdict on each field, by role and field."""
    found: dict[tuple[Role, str], Verdict] = {}
    for each in audited:
        key = (each.role, each.field)
        if each.matters:
            found[key] = Verdict.NEEDED
        else:
            unread = Verdict.UNREAD if each.declared_by == "runner" else Verdict.OVER_DECLARED
            found.setdefault(key, unread)
    return found


def audit(
    subject: Subject,
    shapes: Sequence[Shape],
    *,
    seed: int = 0,
    fields: Collection[str] = (),
    progress: Callable[[str, int], None] = lambda field, total: None,
) -> tuple[AuditResult, ...]:
    """Attack every field of every role of a backend that passes without attacks, or only ``fields``.

    ``progress`` is called before each attack with its name and the number of all.
    """
    cases = list(_cases(shapes[0], seed))
    with Stage(subject, cases[0].scene) as stage:
        records = [
            AuditResult(
                role=role.role,
                group=key.partition(".")[0] if "." in key else "",
                field=key,
                axis=buffer.field.axis.value,
                declared_by=_declarer(role, key, subject.backend),
                attack=attack,
            )
            for role in stage.runner.parts.roles.values()
            for key, buffer in _attackable(role).items()
            if not fields or buffer.field.name in fields
            for attack in Attack
        ]
    results = []
    for record in records:
        progress(f"{record.role.value} {record.field}: {record.attack.value}", len(records))
        results.append(_tried(subject, cases, record))
    return tuple(results)


def attack_case(subject: Subject, case: Case, role: Role, field: str, attack: Attack) -> AuditResult | None:
    """Run one case with one attack; return its result if it matters, else None.

    Raises ``RunError`` if the role has no such field.
    """
    return _attacked(subject, case, AuditResult(role=role, field=field, attack=attack))


def _attacked(subject: Subject, case: Case, record: AuditResult) -> AuditResult | None:
    errors: list[Exception] = []

    def tamper(runner: Runner) -> None:
        # An error here is the attack's own fault, and no evidence about the field.
        try:
            _tamper(runner, role=record.role, key=record.field, attack=record.attack)
        except Exception as error:
            errors.append(error)
            raise

    # Draft outputs stay in range: on a device, one invalid token id ends the process.
    spared = (record.field, "outputs")
    failure = play(subject, case, spared=spared, trusting=True, tamper=tamper).failure
    if errors:
        raise errors[0]
    if failure is None:
        return None
    return attrs.evolve(
        record,
        axis=record.axis or failure.axis,
        matters=True,
        message=f"{failure.check.value}: {failure.message}",
        batch=failure.batch,
        entry=failure.entry,
        case=dumps(case),
    )


def _tried(subject: Subject, cases: Sequence[Case], record: AuditResult) -> AuditResult:
    """Run all cases at once and, if that matters, one after the other, the smallest first."""
    for scene, of_scene in itertools.groupby(cases, key=lambda case: case.scene):
        alone = list(of_scene)
        steps = (*alone[0].steps[:-_PAIR], *(step for case in alone for step in case.steps[-_PAIR:]))
        together = Case(scene=scene, steps=steps)
        if _attacked(subject, together, record) is not None:
            for case in (*alone, together):
                if (result := _attacked(subject, case, record)) is not None:
                    return result
    return record


_PAIR = 2
"""The last two steps of a case: a large batch, then a small one."""


def _cases(shape: Shape, seed: int) -> Iterator[Case]:
    """Yield cases, the smallest first: a large batch that leaves values behind, then a small one."""
    for mode in (GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL):
        scene = Scene(
            shape=shape,
            mode=mode,
            num_reqs=4,
            num_tokens=20,
            size_tokens=(20,),
            size_reqs=(4,),
            drafts=2,
            fused=False,
            seed=seed,
        )
        before = tuple(Arrive(prompt=2, computed=max(2, shape.longest // 2 - 2 * index)) for index in range(4))
        large = RunBatch(rows=tuple((index, 3, 0) for index in range(4)))
        for count in (1, 2, 3):
            small = RunBatch(rows=tuple((index, 3, 0) for index in range(count)))
            yield Case(scene=scene, steps=(*before, large, small))
        uneven = RunBatch(rows=((2, 1, 0), (1, 2, 0)))
        yield Case(scene=scene, steps=(*before, large, uneven))


def _attackable(role: RoleRun) -> dict[str, FieldBuffer]:
    """Return the fields that a step writes, by key."""
    return {
        buffer.key: buffer for buffer in role.fields if not buffer.is_frozen and buffer.field.axis is not Axis.SCALAR
    }


def _declarer(role: RoleRun, key: str, backend: str) -> str:
    names = {field.name for group in role.plan.groups for field in group.padding.fields}
    return backend if "." in key or key in names else "runner"


# How each promise is broken.


def _tamper(runner: Runner, *, role: Role, key: str, attack: Attack) -> None:
    if role not in runner.parts.roles:
        raise RunError(f"the case has no role {role}; it has {', '.join(runner.parts.roles)}")
    run = runner.parts.roles[role]
    fields = _attackable(run)
    if key not in fields:
        raise RunError(f"{role} has no field {key!r} to attack; it has {', '.join(fields)}")
    buffer = fields[key]
    match attack:
        case Attack.STALE_TAIL:
            run.writes = functools.partial(_without_fill, run.writes, buffer)  # type: ignore[method-assign]
        case Attack.OTHER_FILL:
            buffer.constant = _another(runner, buffer)
        case Attack.OTHER_AXIS:
            along = Axis.REQUEST if buffer.field.axis is Axis.TOKEN else Axis.TOKEN
            buffer.field = replace(buffer.field, axis=along)
        case Attack.SHRUNK:
            run.replay_or_run = functools.partial(_cut, run.replay_or_run, buffer, run)  # type: ignore[method-assign]


def _without_fill(inner: Callable[[StepInputs], list[Write]], buffer: FieldBuffer, inputs: StepInputs) -> list[Write]:
    writes = inner(inputs)
    for write in writes:
        if write.buffer is buffer:
            write.rows = 0 if write.real is None else len(write.real)
            write.columns = 1 if write.real is None or write.real.ndim == 1 else write.real.shape[1]
    return writes


def _another(runner: Runner, buffer: FieldBuffer) -> int:
    """Return a fill that is in range and differs from the declared one."""
    if buffer.field.indexes is Bound.SLOTS:
        return runner.pages.page_size  # The first slot of the first page that a request owns.
    return 1 if buffer.constant is None or buffer.constant != 1 else 0


def _cut(
    inner: Callable[..., ForwardTimes], buffer: FieldBuffer, role: RoleRun, step: ForwardStep, started: float
) -> ForwardTimes:
    """Overwrite what follows the real extent: on a host with anything, on a device within bounds."""
    tail = buffer.tensor[step.real.rows(buffer.field) : step.extents.rows(buffer.field)]
    if tail.numel():
        if tail.device.type == "cpu":
            poison(tail)
        elif buffer.field.axis is not Axis.REQUEST_PLUS_ONE:
            # Wrong offsets would have a kernel read anywhere: not on a device.
            indexes, bounds = buffer.field.indexes, role.bounds
            # Slots are the null page's.
            below = {None: bounds.positions, Bound.SLOTS: bounds.slots // bounds.pages, Bound.TOKENS: 2}.get(indexes)
            if below is None and indexes is not None:
                below = bounds.of(indexes, step.extents)
            draw = np.random.default_rng(len(tail)).integers(0, below, tuple(tail.shape))
            tail.copy_(torch.from_numpy(draw).to(tail))
        buffer.spoil()
    return inner(step, started)
