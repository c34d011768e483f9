"""Contract audits: the runner treats one declared field wrongly, to see whether that matters.

A declaration is a promise that the runner keeps at every step: so many elements, along that axis, with that
fill. An audit breaks one promise at a time. If real rows change, the declaration is needed, and the smallest
batch that shows it is reported. If no attack on a backend's own field matters, the field is over-declared: it
costs a copy at every step.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner_conformance.machine import play
from capture_planner_conformance.processes import Each
from capture_planner_conformance.scene import Arrive, Case, RunBatch, Scene, Shape, dumps
from capture_planner_conformance.stage import Subject
from capture_planner_conformance.tampering import Attack, Tampering, attackable
from capture_planner_runner.execution.role import RoleRun


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
    each: Each = map,
) -> tuple[AuditResult, ...]:
    """Attack every field of every role of a backend that passes without attacks, or only ``fields``.

    :param progress: called at each attack with its name and the number of all.
    :param each: ``map``, or one that works in other processes.
    """
    cases = list(_cases(shapes[0], seed))
    # Only to read which fields its roles have: no step runs.
    with subject.stage(subject, cases[0].scene) as stage:
        records = [
            AuditResult(
                role=role.role,
                group=key.partition(".")[0] if "." in key else "",
                field=key,
                axis=buffer.field.axis.value,
                declared_by=_declarer(role, key, subject.backend),
                attack=attack,
            )
            for role in stage.runner.roles.values()
            for key, buffer in attackable(role).items()
            if not fields or buffer.field.name in fields
            for attack in Attack
        ]
    results = []
    for result in each(partial(_tried, subject, cases), records):
        progress(f"{result.role.value} {result.field}: {result.attack.value}", len(records))
        results.append(result)
    return tuple(results)


def attack_case(subject: Subject, case: Case, role: Role, field: str, attack: Attack) -> AuditResult | None:
    """Run one case with one attack; return its result if it matters, else None.

    Raises ``RunError`` if the role has no such field.
    """
    played = _attacked(subject, case, AuditResult(role=role, field=field, attack=attack))
    return None if played is None else played[0]


def _attacked(subject: Subject, case: Case, record: AuditResult) -> tuple[AuditResult, int] | None:
    """Return the result of an attack that matters, and the steps before it does."""
    tampering = Tampering(record.role, record.field, record.attack)
    # Draft outputs stay in range: on a device, one invalid token id ends the process.
    played = play(subject, case, spared=(record.field, "outputs"), tampering=tampering)
    failure = played.failure
    if tampering.error is not None:
        raise tampering.error
    if failure is None:
        return None
    result = attrs.evolve(
        record,
        axis=record.axis or failure.axis,
        matters=True,
        message=f"{failure.check.value}: {failure.message}",
        batch=failure.batch,
        entry=failure.entry,
        case=dumps(case),
    )
    return result, played.log.steps.total()


def _tried(subject: Subject, cases: Sequence[Case], record: AuditResult) -> AuditResult:
    """Run all cases at once and, if that matters, the one that it came to alone."""
    for scene, of_scene in itertools.groupby(cases, key=lambda case: case.scene):
        alone = list(of_scene)
        before = alone[0].steps[:-_PAIR]
        together = Case(scene=scene, steps=(*before, *(step for case in alone for step in case.steps[-_PAIR:])))
        if (found := _attacked(subject, together, record)) is not None:
            result, ran = found
            # The number of steps that ran says which case failed.
            number = max(ran - len(before), 0) // _PAIR
            # Alone, that case may pass; then the combined one is reported.
            again = _attacked(subject, alone[number], record)
            return result if again is None else again[0]
    return record


_PAIR = 2
"""The last two steps of a case: a large batch, then a small one."""


def _cases(shape: Shape, seed: int) -> Iterator[Case]:
    """Yield cases, the smallest first: a large batch that leaves values behind, then a small one.

    In FULL mode one graph serves them all, so fewer of them show the same.
    """
    for mode, counts in ((GraphMode.FULL_AND_PIECEWISE, (1, 2, 3)), (GraphMode.FULL, (1,))):
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
        for count in counts:
            small = RunBatch(rows=tuple((index, 3, 0) for index in range(count)))
            yield Case(scene=scene, steps=(*before, large, small))
        uneven = RunBatch(rows=((2, 1, 0), (1, 2, 0)))
        yield Case(scene=scene, steps=(*before, large, uneven))


def _declarer(role: RoleRun, key: str, backend: str) -> str:
    names = {field.name for group in role.plan.groups for field in group.padding.fields}
    return backend if "." in key or key in names else "runner"
