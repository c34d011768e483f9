"""What mutants of plans are made of: deployments without a fault, and ways to change their plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from capture_planner.analysis.lint.core import BugClass
from capture_planner.codec.shipped import find_environment
from capture_planner.modes import GraphSupport, Role
from capture_planner.planning import planner
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.environment import Environment
from capture_planner.records.model import Method, Model, Speculative
from capture_planner.records.plan import Plan, RolePlan
from capture_planner.records.spec import Limits, Sizes, Spec
from capture_planner.testing.strategies.machines import FakeBackend
from gallery.core import Mutant

MODEL = Model(name="m", num_layers=93, num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=32768)


@attrs.frozen(kw_only=True)
class PlanCase:
    """A spec, the machine it is for, and backends ``wide`` and ``narrow``: the latter has no full graphs."""

    spec: Spec
    environment: Environment
    registry: Registry

    def plan(self) -> Plan:
        """Plan it."""
        return planner.plan(self.spec, self.environment, self.registry)


def deployed(
    *,
    reqs: int,
    tokens: int,
    machine: str = "h100",
    drafts: int = 0,
    schedule: tuple[tuple[int, int, int], ...] = (),
    max_graphs: int | None = None,
    **changes: object,
) -> PlanCase:
    """Return a deployment of so many requests and tokens; ``max_graphs`` is what the backend can hold."""
    registry = Registry(
        RegisteredBackend(
            backend=FakeBackend(
                name=name, supports=dict.fromkeys(Role, Support(level=level, reason="told", max_graphs=max_graphs))
            ),
            distribution=name,
            version="1",
        )
        for name, level in (("wide", GraphSupport.ALWAYS), ("narrow", GraphSupport.NEVER))
    )
    speculative = Speculative(method=Method.EAGLE3, num_tokens=drafts, schedule=schedule) if drafts else None
    limits = Limits(max_num_reqs=reqs, max_num_tokens=tokens)
    plain = Spec(model=MODEL, limits=limits, backend="wide", speculative=speculative)
    return PlanCase(spec=replace(plain, **changes), environment=find_environment(machine), registry=registry)


def with_sizes(deployment: PlanCase, **sizes: Any) -> PlanCase:
    """Return the deployment with sizes chosen otherwise."""
    return attrs.evolve(deployment, spec=replace(deployment.spec, sizes=Sizes(**sizes)))


def on_role(plan: Plan, role: Role, change: Callable[[RolePlan], RolePlan]) -> Plan:
    """Return the plan with one role changed."""
    return replace(plan, roles=tuple(change(r) if r.role is role else r for r in plan.roles))


@attrs.frozen(kw_only=True)
class PlanMutant:
    """A mutant of a plan with its healthy twin."""

    mutant: Mutant
    healthy: Callable[[], Plan]
    """Makes the plan without the bug."""


def planted(
    name: str,
    bug_class: BugClass,
    *threads: str,
    says: str,
    healthy: PlanCase | Callable[[], Plan],
    plan: Callable[[], Plan],
) -> PlanMutant:
    """Return a mutant whose ``plan`` has the bug, and whose twin is ``healthy``."""
    return PlanMutant(
        mutant=Mutant(name=name, threads=threads, bug_class=bug_class, says=says, plan=plan),
        healthy=healthy.plan if isinstance(healthy, PlanCase) else healthy,
    )
