"""Law 4, reachability: what no batch can reach is not planned."""

from hypothesis import given

from capture_planner.analysis.coverage import coverage
from capture_planner.testing import arbitrary_plans, plans
from support import reference


def _reached(plan, role):
    return {reference.dispatch(plan, batch) for batch in reference.admissible(plan, role)} - {None}


@given(plans(max_reqs=17, max_tokens=96))
def test_every_entry_serves_some_batch(plan):
    """Law 4, by enumeration of all admissible batches."""
    for role in plan.roles:
        idle = set(role.entries) - _reached(plan, role)
        assert not idle, [str(entry) for entry in idle]


@given(plans(max_reqs=17, max_tokens=96) | arbitrary_plans(max_tokens=96))
def test_coverage_finds_the_reachable_entries(plan):
    """Law 4: ``Coverage.reached`` is what enumeration reaches."""
    walked = coverage(plan)
    for role in plan.roles:
        assert walked.reached(role.role) == _reached(plan, role)


@given(plans(max_reqs=512))
def test_no_entry_is_planned_twice(plan):
    """Law 4: of two equal graphs one could not be reached."""
    for role in plan.roles:
        assert len(set(role.entries)) == len(role.entries)
