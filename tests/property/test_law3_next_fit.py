"""Law 3, next fit: the cheapest compatible entry over all entries; total and deterministic."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode
from capture_planner.records.batch import Batch
from capture_planner.testing import arbitrary_plans, batches, plans
from support import reference

ANY_PLAN = plans(max_reqs=64) | arbitrary_plans()


@given(ANY_PLAN, st.data())
def test_dispatch_equals_a_scan_over_all_entries(plan, data):
    """Law 3: the fast dispatcher answers as the reference does, padding included."""
    dispatcher = Dispatcher(plan)
    for batch in data.draw(st.lists(batches(plan), min_size=1, max_size=30)):
        best = reference.dispatch(plan, batch)
        answer = dispatcher.dispatch(batch)
        assert answer.entry == best
        assert (answer.reason is None) == (best is not None)
        if best is not None:
            # Padded is never less than real, on both axes.
            assert answer.padded_tokens == best.num_tokens - batch.num_tokens >= 0
            padded_reqs = 0 if best.num_reqs is None else best.num_reqs - batch.num_reqs
            assert answer.padded_reqs == padded_reqs >= 0


@given(ANY_PLAN, st.data())
def test_entry_rejection_agrees_with_the_reference(plan, data):
    """Law 3: ``Entry.rejection`` and an independent statement of compatibility are one."""
    batch = reference.without_adapters(data.draw(batches(plan)))
    chain = reference.chain_length(plan, batch.role, batch.num_reqs)
    for entry in plan.role(batch.role).entries:
        assert (entry.rejection(batch, chain) is None) == reference.serves(entry, batch, chain)


@given(ANY_PLAN, st.data())
def test_dispatch_does_not_depend_on_earlier_batches(plan, data):
    """Law 3: deterministic; in any order, any number of times, and with nothing kept."""
    asked = data.draw(st.lists(batches(plan), min_size=1, max_size=20))
    shuffled = data.draw(st.permutations(asked * 2))
    one, other = Dispatcher(plan), Dispatcher(plan)
    for batch in shuffled:
        one.dispatch(batch)
    for batch in asked:
        assert one.dispatch(batch) == other.dispatch(batch) == Dispatcher(plan).dispatch(batch)


@given(ANY_PLAN, st.data())
def test_a_full_entry_is_never_passed_over_for_piecewise(plan, data):
    """Law 3: no nearer size of another query length hides a compatible FULL entry."""
    batch = reference.without_adapters(data.draw(batches(plan)))
    chain = reference.chain_length(plan, batch.role, batch.num_reqs)
    answer = Dispatcher(plan).dispatch(batch)
    if answer.mode is GraphMode.PIECEWISE:
        full = [entry for entry in plan.role(batch.role).entries if entry.mode is GraphMode.FULL]
        assert not any(reference.serves(entry, batch, chain) for entry in full)


WILD = st.integers(-(1 << 63), 1 << 63)


@given(ANY_PLAN, WILD, WILD, st.none() | WILD, st.none() | WILD, st.booleans(), WILD)
def test_dispatch_is_total(plan, num_reqs, num_tokens, query_len, max_query_len, past_prompt, loras):
    """Law 3: any numbers at all have an answer; what cannot be is not admissible."""
    role = plan.roles[0].role
    batch = Batch(
        role=role,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        query_len=query_len,
        past_prompt=past_prompt,
        active_loras=loras,
        max_query_len=max_query_len,
    )
    answer = Dispatcher(plan).dispatch(batch)
    assert answer.entry == reference.dispatch(plan, batch)
    assert (answer.entry is None) == (answer.reason is not None)


@given(ANY_PLAN, st.data())
def test_dispatch_counts_takes_role_names(plan, data):
    """Law 3: asking by the role's name changes nothing."""
    batch, dispatcher = data.draw(batches(plan)), Dispatcher(plan)
    counts = attrs.asdict(batch) | {"role": batch.role.value}
    by_name = dispatcher.dispatch_counts(**counts)
    assert by_name == dispatcher.dispatch(batch)


@given(ANY_PLAN, st.data())
def test_of_graphs_of_one_size_the_most_specific_is_taken(plan, data):
    """Law 3: a uniform graph before a varying one of the same extents, and both before one for any batch."""
    batch = data.draw(batches(plan))
    entry = Dispatcher(plan).dispatch(batch).entry
    size = None if entry is None else (entry.mode, entry.num_tokens, entry.num_reqs, entry.active_loras)
    chain = reference.chain_length(plan, batch.role, batch.num_reqs)
    for other in plan.role(batch.role).entries:
        alike = size == (other.mode, other.num_tokens, other.num_reqs, other.active_loras)
        if alike and reference.serves(other, reference.without_adapters(batch), chain):
            assert generality(entry) <= generality(other)


def generality(entry):
    """How many lengths a graph takes: one, several, or any."""
    return (entry.query_len is None) + (entry.query_len is None and entry.max_query_len is None)
