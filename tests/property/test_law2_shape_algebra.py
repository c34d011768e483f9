"""Law 2, shape algebra: tokens are requests times query length, by role."""

from hypothesis import given

from capture_planner.modes import GraphMode, Role
from capture_planner.testing import arbitrary_plans, plans
from support import reference


@given(plans(max_reqs=512))
def test_uniform_tokens_are_requests_times_query_length(plan):
    """Law 2: num_tokens == num_reqs * query_len in every uniform entry."""
    for role in plan.roles:
        for entry in role.entries:
            if entry.query_len is not None:
                assert entry.num_tokens == entry.num_reqs * entry.query_len


@given(plans(max_reqs=512) | arbitrary_plans())
def test_varying_tokens_are_requests_times_the_most(plan):
    """Law 2: num_tokens == num_reqs * max_query_len in every varying entry, which is FULL and not uniform."""
    for role in plan.roles:
        for entry in role.entries:
            if entry.max_query_len is not None:
                assert entry.num_tokens == entry.num_reqs * entry.max_query_len
                assert (entry.mode, entry.query_len) == (GraphMode.FULL, None)


@given(plans(max_reqs=512))
def test_varying_entries_are_of_the_roles_that_vary(plan):
    """Law 2: there are no uniform ones beside them, but of one token where nothing is drafted."""
    for role in plan.roles:
        varying = plan.speculative is not None and role.role in plan.speculative.varying_decodes
        more = reference.extra_rows(plan.speculative) if role.role is Role.DRAFT_PREFILL else 0
        assert varying or all(entry.max_query_len is None for entry in role.entries)
        assert not varying or {entry.query_len for entry in role.entries} <= {None, 1 + more}


@given(plans(max_reqs=512))
def test_query_lengths_are_those_of_the_role(plan):
    """Law 2: 1 + k for each scheduled k in target and draft prefill, which may have more rows, 1 in a draft decode."""
    ks = {0}
    if plan.speculative is not None:
        longest = plan.speculative.num_tokens
        ks = {min(k, longest) for _, _, k in plan.speculative.schedule} or {longest}
    for role in plan.roles:
        more = reference.extra_rows(plan.speculative) if role.role is Role.DRAFT_PREFILL else 0
        allowed = {1} if role.role is Role.DRAFT_DECODE else {1 + k + more for k in ks}
        assert {e.tokens_each for e in role.entries} - {None} <= allowed


@given(plans(max_reqs=512))
def test_only_full_graphs_hold_requests(plan):
    """Law 2: PIECEWISE pads tokens only; FULL has an extent on both axes."""
    for role in plan.roles:
        for entry in role.entries:
            assert (entry.num_reqs is None) == (entry.mode is GraphMode.PIECEWISE)


@given(plans(max_reqs=512))
def test_a_mixed_full_graph_holds_what_its_tokens_can(plan):
    """Law 2: requests of a mixed FULL graph are min(tokens, most requests, backend's cap)."""
    for role in plan.roles:
        caps = [g.support.max_num_reqs for g in role.groups if g.support.max_num_reqs]
        most = min([plan.limits.max_num_reqs, *caps])
        for entry in role.entries:
            if entry.mode is GraphMode.FULL and entry.tokens_each is None:
                assert entry.num_reqs == min(entry.num_tokens, most)


@given(plans(max_reqs=512))
def test_padded_tokens_divide_over_sequence_parallel_ranks(plan):
    """Law 2: alignment changes requests, never tokens alone."""
    step = plan.parallel.tensor if plan.parallel.sequence else 1
    for role in plan.roles:
        assert all(entry.num_tokens % step == 0 for entry in role.entries)
