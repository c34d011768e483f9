"""Comparison: nothing that differs goes unsaid."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.analysis.diff import diff
from capture_planner.modes import GraphMode, Reason
from capture_planner.records.plan import Plan
from capture_planner.testing import arbitrary_plans, plans

TRAFFIC = "sha256:" + "7" * 64


@given(plans() | arbitrary_plans())
def test_diff_of_equal_plans_is_empty(plan):
    """Equal plans have no differences."""
    assert diff(plan, attrs.evolve(plan)) == ()


@given(arbitrary_plans(), arbitrary_plans())
def test_diff_of_different_plans_is_not_empty(old, new):
    """And the same number of words in neither direction is needed: each way says something."""
    assert bool(diff(old, new)) == bool(diff(new, old)) == (old != new)


@st.composite
def changed(draw):
    """A plan, and the same with one field of one role or waiver changed."""
    plan: Plan = draw(plans())
    index = draw(st.integers(0, len(plan.roles) - 1))
    role = plan.roles[index]
    options = [attrs.evolve(role, requested=mode) for mode in GraphMode if mode is not role.requested]
    options += [attrs.evolve(role, mode=mode) for mode in GraphMode if mode is not role.mode]
    options += [attrs.evolve(role, entries=role.entries + role.entries[:1])] if role.entries else []
    options += [attrs.evolve(role, inputs=role.inputs[1:]), attrs.evolve(role, groups=role.groups * 2)]
    for number, waiver in enumerate(role.waivers):
        for other in (
            attrs.evolve(waiver, first=waiver.first + 1),
            attrs.evolve(waiver, reason=Reason.BUDGET if waiver.reason is not Reason.BUDGET else Reason.SIZES),
        ):
            options.append(attrs.evolve(role, waivers=(*role.waivers[:number], other, *role.waivers[number + 1 :])))
    if len(role.decisions) > 1:
        options.append(attrs.evolve(role, decisions=role.decisions[1:]))
    other = draw(st.sampled_from(options))
    return plan, attrs.evolve(plan, roles=(*plan.roles[:index], other, *plan.roles[index + 1 :]))


@given(changed())
def test_diff_finds_one_changed_field(pair):
    """A shifted waiver, another reason, another request, a graph listed twice: each is said."""
    old, new = pair
    changes = diff(old, new)
    assert changes
    assert all(change.message for change in changes)


@given(arbitrary_plans().filter(lambda plan: plan.forecast is not None), arbitrary_plans())
def test_diff_names_the_measurements_that_changed(old, new):
    """Another traffic is a change, whatever else there is; so are measurements where there were none."""
    other = attrs.evolve(new, forecast=attrs.evolve(old.forecast, traffic=TRAFFIC))
    (change,) = (each for each in diff(old, other) if each.subject == "forecast")
    assert change.message.startswith("sizes go by another traffic;")
    (change,) = (each for each in diff(old, attrs.evolve(new, forecast=None)) if each.subject == "forecast")
    assert change.message == "sizes no longer go by measurements"
