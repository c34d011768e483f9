"""Law 5, uniform means decode: exactly that query length, or up to it where decodes vary, and past the prompt."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.testing import arbitrary_plans, batches, plans

ANY_PLAN = plans(max_reqs=64) | arbitrary_plans()


def _entry(plan, batch):
    return Dispatcher(plan).dispatch(batch).entry


@given(ANY_PLAN, st.data())
def test_a_uniform_entry_serves_only_its_own_query_length(plan, data):
    """Law 5: every request has exactly the entry's query length."""
    batch = data.draw(batches(plan))
    entry = _entry(plan, batch)
    if entry is not None and entry.query_len is not None:
        assert batch.query_len == entry.query_len
        assert batch.num_tokens == batch.num_reqs * entry.query_len


@given(ANY_PLAN, st.data())
def test_a_prompt_of_decode_shape_is_no_decode(plan, data):
    """Law 5: with a request inside its prompt, no uniform entry is taken."""
    batch = attrs.evolve(data.draw(batches(plan)), past_prompt=False)
    entry = _entry(plan, batch)
    assert entry is None or entry.tokens_each is None


@given(ANY_PLAN, st.data())
def test_a_varying_entry_serves_decodes_of_up_to_its_length(plan, data):
    """Law 5: every request is past its prompt, and the longest is known and no longer than the entry's."""
    batch = data.draw(batches(plan))
    entry = _entry(plan, batch)
    if entry is not None and entry.max_query_len is not None:
        longest = batch.query_len or batch.max_query_len
        assert batch.past_prompt
        assert longest <= entry.max_query_len
        assert longest <= batch.num_tokens <= batch.num_reqs * longest


@given(ANY_PLAN, st.data())
def test_requests_of_different_lengths_are_no_decode(plan, data):
    """Law 5: without one query length for all, no uniform entry is taken, whatever the total."""
    batch = attrs.evolve(data.draw(batches(plan)), query_len=None)
    entry = _entry(plan, batch)
    assert entry is None or entry.query_len is None


@given(ANY_PLAN, st.data(), st.integers(-3, 3).filter(bool))
def test_a_wrong_total_is_no_decode(plan, data, off):
    """Law 5: a query length that does not multiply to the tokens is not believed."""
    batch = data.draw(batches(plan))
    query_len = batch.query_len or 1
    wrong = attrs.evolve(batch, query_len=query_len, num_tokens=batch.num_reqs * query_len + off)
    entry = _entry(plan, wrong)
    assert entry is None or entry.query_len is None
