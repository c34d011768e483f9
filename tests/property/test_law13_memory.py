"""Law 13 under a bound on memory, where only the largest size of a ladder takes of it."""

from __future__ import annotations

from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records.backend import Support
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.profile import CostCurve, GraphCost, Profile
from capture_planner.records.spec import Budget, Limits, Policy, Sizes, Spec
from capture_planner.testing import FakeBackend, PlanInputs
from support.measured import GPU, MODEL, decodes


def test_a_smaller_size_of_the_same_time_takes_less_of_the_memory() -> None:
    """Law 13: all sizes from 2 to 8 take the same time, and the memory holds a largest one of 3 tokens."""
    spec = Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=2, max_num_tokens=8),
        mode=GraphMode.PIECEWISE,
        backend="alpha",
        sizes=Sizes(policy=Policy.MEASURED, objective="mean"),
        budget=Budget(memory=15 << 20),
    )
    times = {GraphMode.PIECEWISE: (1.0, 5.0, 5.0), GraphMode.NONE: (50.0, 50.0, 50.0)}
    known = Profile(
        source="test",
        date="2026-11-22T12:00:00Z",
        device=GPU,
        model=MODEL,
        curves=tuple(
            CostCurve(role=Role.TARGET, mode=mode, tokens=(1, 2, 8), milliseconds=each) for mode, each in times.items()
        ),
        graphs=(GraphCost(role=Role.TARGET, mode=GraphMode.PIECEWISE, mib=0.0, mib_per_token=5.0, seconds=0.0),),
    )
    support = dict.fromkeys(Role, Support(level=GraphSupport.ALWAYS, reason="any"))
    registry = Registry(
        [RegisteredBackend(backend=FakeBackend(name="alpha", supports=support), distribution="d", version="1")]
    )
    inputs = PlanInputs(
        spec=spec,
        environment=Environment(name="h100", device=GPU),
        registry=registry,
        measurements=Measurements(traffic=decodes({1: 5, 2: 9}, 1), profile=known),
    )
    plan = inputs.plan()
    assert [entry.num_tokens for entry in reversed(plan.roles[0].entries)] == [1, 3]
    assert plan.forecast is not None
    assert plan.forecast.mib == 15
