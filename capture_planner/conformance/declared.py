"""What a backend declares without torch: asked in any order, any number of times, it says the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capture_planner.conformance.finding import Check, Finding
from capture_planner.conformance.scene import Scene, Shape
from capture_planner.conformance.stage import Tested
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records.backend import Attention
from capture_planner.records.plan import RolePlan


def check_declared(tested: Tested, shapes: Sequence[Shape]) -> list[Finding]:
    """Return what is wrong with the declarations for these shapes."""
    return [
        Finding(check=Check.DECLARED, says=says, role=role)
        for shape in shapes
        for role, says in _wrong(tested, shape)
    ]


def _wrong(tested: Tested, shape: Shape) -> Iterator[tuple[Role, str]]:
    backend, environment = tested.registry[tested.backend], tested.environment
    scene = Scene(shape=shape, drafts=2, num_tokens=24, size_tokens=(24,))
    spec = scene.spec(tested.backend)
    try:
        plan = make_plan(spec, environment, tested.registry)
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
                    yield role.role, f"{name} is not pure: asked again, it answers otherwise"
    except CapturePlannerError as error:
        yield Role.TARGET, str(error)


_CALLS = ("workspace", "refresh", "padding", "support")
