"""Law 1, coverage: every admissible batch maps to an entry or a waiver."""

from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.analysis.coverage import coverage
from capture_planner.modes import GraphMode, Reason
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_families, most_tokens, query_len_of
from capture_planner.testing import arbitrary_plans, plans
from support import reference


@given(plans(max_reqs=17, max_tokens=96))
def test_every_admissible_batch_has_an_entry_or_a_waiver(plan):
    """Law 1, by enumeration: each role, request count, query length and adapter count."""
    for role in plan.roles:
        for batch in reference.admissible(plan, role):
            entry = reference.dispatch(plan, batch)
            assert entry is not None or reference.is_waived(role, batch), (str(role.role), batch)


@given(plans(max_reqs=17, max_tokens=96))
def test_nothing_is_waived_that_a_graph_serves(plan):
    """Law 1: a waiver is no larger than what it is for; one of mixed batches counts tokens alone.

    So where a backend takes fewer requests than tokens, whether a mixed batch is served depends on both: its waiver
    begins where a batch of as many requests as tokens is not served any more.
    """
    for role in plan.roles:
        for batch in reference.admissible(plan, role):
            if reference.dispatch(plan, batch) is None or not reference.is_waived(role, batch):
                continue
            if reference.is_decode(batch):
                # Of a varying decode it depends on its tokens whether a graph of mixed batches holds them.
                most = query_len_of(role.role, plan, batch.num_reqs)
                assert varies(plan, role, batch.num_reqs), batch
                assert batch.num_tokens < batch.num_reqs * most, batch
                assert reference.dispatch(plan, batch).tokens_each is None, batch
                continue
            waivers = [w for w in role.waivers if w.kind is Kind.MIXED and w.first <= batch.num_tokens <= w.last]
            assert {waiver.reason for waiver in waivers} == {Reason.BACKEND_CAP}, batch
            assert batch.num_reqs < min(waiver.first for waiver in waivers), batch


@given(plans(max_reqs=17, max_tokens=96) | arbitrary_plans(max_tokens=96))
def test_coverage_finds_exactly_the_holes_that_enumeration_finds(plan):
    """Law 1: the cells that ``check`` walks have a hole where, and only where, some batch has one."""
    cells = coverage(plan).uncovered
    for role in plan.roles:
        holes = {
            _kind(plan, role, reference.is_decode(batch), batch.num_reqs, batch.query_len)
            for batch in reference.admissible(plan, role)
            if reference.dispatch(plan, batch) is None and not reference.is_waived(role, batch)
        }
        found = {_kind(plan, role, c.query_len is not None, c.first, c.query_len) for c in cells if c.role is role.role}
        assert found == holes


def _kind(plan, role, is_decode, num_reqs, query_len):
    """Whether batches are decodes, and of how many tokens each; where they vary, of how many at most."""
    if is_decode and varies(plan, role, num_reqs):
        query_len = f"up to {query_len_of(role.role, plan, num_reqs)}"
    return is_decode, query_len


def varies(plan, role, num_reqs):
    """Whether decodes of so many requests vary in length, by the meaning of the plan's fields."""
    speculative = plan.speculative
    return (
        speculative is not None and role.role in speculative.varying_decodes and reference.scheduled_k(plan, num_reqs)
    )


@given(plans(max_reqs=17, max_tokens=96) | arbitrary_plans(max_tokens=96))
def test_each_batch_lies_in_a_cell_with_its_answer(plan):
    """Law 1: coverage and dispatch are one truth; a batch is answered as its cell says."""
    cells = {}
    for cell in coverage(plan).cells:
        cells.setdefault((cell.role, cell.query_len is not None), []).append(cell)
    for role in plan.roles:
        for batch in reference.admissible(plan, role):
            is_decode = reference.is_decode(batch)
            extent = batch.num_reqs if is_decode else batch.num_tokens
            found = [
                cell
                for cell in cells.get((role.role, is_decode), ())
                if cell.first <= extent <= cell.last
                and cell.min_reqs <= batch.num_reqs <= cell.max_reqs
                and cell.min_loras <= batch.active_loras <= cell.max_loras
                and (not is_decode or _scheduled(plan, role, cell, batch))
            ]
            exact = [cell for cell in found if cell.query_len == batch.query_len and not cell.varies]
            entry = reference.dispatch(plan, batch)
            if exact:
                assert {cell.entry for cell in exact} == {entry}, batch
                continue
            longest = reference.longest_of(batch)
            ends = [cell for cell in found if cell.varies and cell.query_len >= longest > 0]
            assert ends, batch
            # Of fewer tokens than the largest decode of its cell, it may have a nearer graph.
            cell = min(ends, key=lambda cell: cell.query_len)
            assert cell.entry is None or entry.cost <= cell.entry.cost, batch


def _scheduled(plan, role, cell, batch):
    """Whether a decode cell and a batch are of one chain length, where two overlap in request counts."""
    return reference.chain_length(plan, role.role, cell.last) == reference.chain_length(plan, role.role, batch.num_reqs)


@given(plans(max_reqs=64))
def test_the_largest_decode_is_itself_a_size_unless_waived(plan):
    """Law 1: a uniform family with a full graph ends in its ceiling, or the rest is waived."""
    for role in plan.roles:
        for family in decode_families(role.role, plan):
            most = family.requests.intervals[-1][1]
            sizes = [e.num_reqs for e in role.entries if e.tokens_each == family.query_len]
            waived = [w for w in role.waivers if family.query_len in (w.query_len, w.max_query_len) and w.last >= most]
            if role.mode.is_separate and not waived:
                piecewise = [e.num_tokens for e in role.entries if e.tokens_each is None]
                assert max([0, *sizes]) >= most or max([0, *piecewise]) >= most * family.query_len


@given(plans(max_reqs=64), st.data())
def test_waived_batch_has_a_message(plan, data):
    """Law 1: what is left eager on purpose has a waiver with a sentence, found by dispatch."""
    waivers = [(role.role, waiver) for role in plan.roles for waiver in role.waivers]
    assume(waivers)
    _, waiver = data.draw(st.sampled_from(waivers))
    assert waiver.message
    assert waiver.reason not in (Reason.UNCOVERED, Reason.NOT_ADMISSIBLE)
    assert waiver.first <= waiver.last


@given(plans(max_reqs=64))
def test_adjacent_ranges_are_waived_together(plan):
    """Law 1: for the same reason and of the same query length, one waiver has them all."""
    for role in plan.roles:
        kinds = [(w.kind, w.query_len, w.max_query_len, w.max_loras, w.reason, w.message) for w in role.waivers]
        ends = {(*kind, w.last + 1) for kind, w in zip(kinds, role.waivers, strict=True)}
        starts = {(*kind, w.first) for kind, w in zip(kinds, role.waivers, strict=True)}
        assert not ends & starts


@given(plans(max_reqs=64))
def test_a_mode_of_none_waives_everything(plan):
    """Law 1: without graphs, each kind of batch of the role is waived."""
    for role in plan.roles:
        if role.mode is GraphMode.NONE:
            assert not role.entries
            waived = [(w.query_len or w.max_query_len, w.first, w.last) for w in role.waivers]
            for family in decode_families(role.role, plan):
                for first, last in family.requests.intervals:
                    assert any(q == family.query_len and a <= first and last <= b for q, a, b in waived)
            if role.role != "draft_decode":
                assert (None, 1, most_tokens(role.role, plan)) in waived
