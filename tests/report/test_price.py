"""The estimate of a plan: by its budget's own figures, by the nearest profile that ships, or a range; it says which."""

import attrs
import pytest

from capture_planner import codec
from capture_planner.codec import shipped
from capture_planner.engines.verdict import bill
from capture_planner.measuring.fits import predict
from capture_planner.records._base import replace
from capture_planner.records.spec import Budget
from capture_planner.records.text import counted, rounded_bytes
from capture_planner.report.plans import price_lines
from support.commands import PLAN

MADE = codec.load_plan(PLAN)
"""A plan for the shape of a profile that ships."""


def estimate(plan):
    line = next(iter(price_lines(plan)))
    assert line.startswith(f"estimate: {counted(plan.num_graphs, 'graph')} take ")
    return line


GPUS = [each for each in shipped.environments() if each.device.kind is MADE.environment.device.kind]


@pytest.mark.parametrize("environment", GPUS, ids=lambda each: each.name)
def test_the_nearest_profile_is_named_or_there_is_a_range(environment):
    """Its own prediction, where one of the device and the roles ships; else what check says."""
    plan = replace(MADE, environment=environment, forecast=None, budget=Budget())
    near = shipped.find_profile(environment, plan.model)
    if near is None:
        assert str(bill(role.role for role in plan.roles for _ in role.entries)) in estimate(plan)
    else:
        expected = predict(near.profile, plan)
        taken = f"{rounded_bytes(round(expected.memory_mib * (1 << 20)))} and {expected.seconds:.0f} s to capture"
        assert f"{taken}, by the profile {near.name}, {near.distance}" in estimate(plan)


def test_a_model_that_is_far_from_every_profile_has_a_range():
    """Nothing is taken from a model of a tenth of its size."""
    environment = codec.load_environment(shipped.shipped_environments()["h200"])
    model = attrs.evolve(MADE.model, name="other", num_layers=500)
    plan = replace(MADE, environment=environment, model=model, forecast=None, budget=Budget())
    assert "no profile of such a deployment ships" in estimate(plan)


def test_figures_of_the_budget_come_first():
    """An operator who gave them measured them."""
    budget = Budget(memory_per_graph=1 << 20, seconds_per_graph=1.0)
    plan = replace(MADE, forecast=None, budget=budget)
    assert f"{rounded_bytes(plan.num_graphs << 20)} and {plan.num_graphs} s to capture, at 1MiB" in estimate(plan)
