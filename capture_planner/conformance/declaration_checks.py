"""Check what a backend declares without torch: the answers must not depend on when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capture_planner.conformance.failure import Check, Failure
from capture_planner.conformance.scene import Scene, Shape
from capture_planner.conformance.subject import Subject
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records.backend import Attention
from capture_planner.records.plan import RolePlan


def check_declared(subject: Subject, shapes: Sequence[Shape]) -> list[Failure]:
    """Return the failures of declarations for these shapes."""
    return [
        Failure(check=Check.DECLARED, message=message, role=role)
        for shape in shapes
        for role, message in _wrong(subject, shape)
    ]


def _wrong(subject: Subject, shape: Shape) -> Iterator[tuple[Role, str]]:
    backend, environment = subject.registry[subject.backend], subject.environment
    scene = Scene(shape=shape, drafts=2, num_tokens=24, size_tokens=(24,))
    spec = scene.spec(subject.backend)
    try:
        plan = make_plan(spec, environment, subject.registry)
        for role in plan.roles:
            attention = Attention.of(plan, role.role, layers=1, window=None)

            def ask(role: RolePlan = role, attention: Attention = attention) -> tuple[object, ...]:
                entries, limits = role.entries, plan.limits
                return (
                    backend.workspace(role.role, attention, environment, entries, limits),
                    backend.refresh(role.role, attention, environment),
                    backend.padding(role.role, attention, environment),
                    backend.support(role.role, attention, environment),
                )

            for name, once, again in zip(_CALLS, ask(), ask(), strict=True):
                if once != again:
                    yield role.role, f"{name} is not pure: a second call returns another value"
    except CapturePlannerError as error:
        yield Role.TARGET, str(error)


_CALLS = ("workspace", "refresh", "padding", "support")
