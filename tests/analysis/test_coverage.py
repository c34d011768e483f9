"""Cells: what they say of the batches in them; that they are complete is law 1."""

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.analysis.coverage import coverage, nearest_group_misses
from capture_planner.modes import GraphMode, Role
from capture_planner.testing import arbitrary_plans, plans

ANY_PLAN = plans(max_reqs=64) | arbitrary_plans()


@given(ANY_PLAN)
def test_cell_padding_is_the_padding_of_its_batches(plan):
    """The worst is at its first batch, and the share is between none and all."""
    for cell in coverage(plan).cells:
        assert cell.first <= cell.last
        assert cell.min_reqs <= cell.max_reqs
        assert cell.min_loras <= cell.max_loras
        if cell.entry is None:
            assert (cell.padded, cell.worst) == (0.0, 1.0)
        else:
            tokens = cell.entry.num_tokens
            assert cell.worst == tokens / (cell.first * (cell.query_len or 1))
            assert 0 <= cell.padded < 1
            assert tokens >= cell.last * (cell.query_len or 1)


@given(ANY_PLAN)
def test_coverage_cells_do_not_overlap(plan):
    """No batch is in two cells of one query length and chain."""
    seen = set()
    for cell in coverage(plan).cells:
        key = (cell.role, cell.query_len, cell.first, cell.min_reqs, cell.min_loras)
        assert key not in seen
        seen.add(key)


@given(plans(max_reqs=64), st.sampled_from(Role))
def test_nearest_group_misses_nothing_without_speculation(plan, role):
    """With one query length, the nearest size is the right one."""
    if role in {r.role for r in plan.roles} and plan.speculative is None and plan.lora is None:
        assert nearest_group_misses(plan, role) == ()


@given(ANY_PLAN)
def test_nearest_group_misses_have_a_full_graph(plan):
    """What another engine misses is there to be found."""
    for role in plan.roles:
        if nearest_group_misses(plan, role.role):
            assert any(entry.mode is GraphMode.FULL for entry in role.entries)
