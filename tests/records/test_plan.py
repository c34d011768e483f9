"""Plans: values that hold no decision twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import DispatchError, InvalidValue
from capture_planner.modes import Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.plan import Waiver
from capture_planner.records.spec import CaptureTiming
from capture_planner.testing import arbitrary_plans


@given(arbitrary_plans())
def test_plan_looks_up_roles_by_member_and_name(plan):
    """What is not planned is an error that lists what is."""
    planned = {role.role for role in plan.roles}
    for role in Role:
        if role in planned:
            assert plan.role(role) is plan.role(role.value)
        else:
            with pytest.raises(DispatchError, match=f"the plan has no role {role}; it has "):
                plan.role(role)
    assert plan.num_graphs == sum(len(role.entries) for role in plan.roles)


@given(arbitrary_plans())
def test_plan_rejects_duplicate_roles(plan):
    """A second plan of it is refused, with its place."""
    with pytest.raises(InvalidValue, match=rf"roles\[{len(plan.roles)}\].role: the role .* is planned twice"):
        replace(plan, roles=(*plan.roles, plan.roles[0]))


@given(arbitrary_plans(), st.data())
def test_role_plan_sorts_entries(plan, data):
    """They are kept in capture order."""
    role = data.draw(st.sampled_from(plan.roles))
    assert replace(role, entries=tuple(data.draw(st.permutations(role.entries)))) == role


@given(arbitrary_plans())
def test_a_graph_is_captured_at_start_or_on_first_use(plan):
    """What is to be captured on first use without a budget for it is refused with its place."""
    for place, role in enumerate(plan.roles):
        assert set(role.at_start).isdisjoint(role.lazy)
        assert set(role.at_start) | set(role.lazy) == set(role.entries)
        if role.lazy:
            with pytest.raises(InvalidValue, match=rf"roles\[{place}\]\.lazy: graphs on first use, and capture"):
                replace(plan, capture=CaptureTiming(), roles=plan.roles)
            break
    assert plan.num_lazy == sum(entry in role.lazy for role in plan.roles for entry in role.entries)


COUNT = st.integers(1, 6)


@given(st.sampled_from(Kind), st.none() | COUNT, COUNT, COUNT, COUNT, COUNT, st.integers(0, 3), st.sampled_from(Kind))
def test_waiver_covers_its_kind_and_extent(kind, query_len, first, last, num_reqs, each, loras, asked):
    """Requests of decodes, tokens of mixed batches, and adapters in between."""
    waiver = Waiver(
        kind=kind,
        query_len=query_len,
        first=first,
        last=last,
        min_loras=1,
        max_loras=2,
        reason=Reason.MODE,
        message="s",
    )
    batch = Batch(role=Role.TARGET, num_reqs=num_reqs, num_tokens=num_reqs * each, query_len=each, active_loras=loras)
    extent = num_reqs if asked is Kind.DECODE else num_reqs * each
    inside = first <= extent <= last and loras in (1, 2) and query_len in (None, each)
    assert waiver.covers(batch, asked) == (inside and kind is asked)
