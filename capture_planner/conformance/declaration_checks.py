"""Check what a backend declares without torch: the answers must not depend on when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from capture_planner.conformance.failure import Check, Failure
from capture_planner.conformance.scene import Scene, Shape
from capture_planner.conformance.subject import Subject
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records.backend import Attention
from capture_planner.records.plan import Plan


def check_declared(subject: Subject, shapes: Sequence[Shape]) -> list[Failure]:
    """Return the failures of declarations for these shapes."""
    return [
        Failure(check=Check.DECLARED, message=message, role=role)
        for shape in shapes
        for role, message in _wrong(subject, shape)
    ]


def declared_plan(subject: Subject, shape: Shape) -> Plan:
    """Return a plan with every role; raises ``PlanningError`` for declarations that are not well formed."""
    scene = Scene(shape=shape, drafts=2, num_tokens=24, size_tokens=(24,))
    return make_plan(scene.spec(subject.backend), subject.environment, subject.registry)


def _wrong(subject: Subject, shape: Shape) -> Iterator[tuple[Role, str]]:
    backend, environment = subject.registry[subject.backend], subject.environment
    try:
        plan = declared_plan(subject, shape)
        for role in plan.roles:
            asked = role.role, Attention.of(plan, role.role, layers=1, window=None), environment
            calls: dict[str, Callable[[], object]] = {
                "workspace": partial(backend.workspace, *asked, role.entries, plan.limits),
                "refresh": partial(backend.refresh, *asked),
                "padding": partial(backend.padding, *asked),
                "support": partial(backend.support, *asked),
            }
            once = {name: call() for name, call in calls.items()}
            for name, call in calls.items():
                if call() != once[name]:
                    yield role.role, f"{name} is not pure: a second call returns another value"
    except CapturePlannerError as error:
        yield Role.TARGET, str(error)
