"""Decode context parallelism: who stores what, and which plans can be run. The reference's tests merge its parts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RunError
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.model import DraftModel, Method, Speculative
from capture_planner.records.spec import Parallel
from capture_planner_runner.execution.context import ContextRanks, refuse_context
from support.rank_threads import collectives
from support.worlds import CPU, INSTALLED, spec_of


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_ranks_store_each_position_once_and_know_how_many_they_have(ranks, size, lengths):
    """In the slots of their part of each page; the null page is of every rank."""
    page = ranks * size
    slots = torch.arange(page, 5 * page)
    places = []
    for rank in range(ranks):
        mine = ContextRanks(collectives(ranks)[rank], ranks)
        stored = mine.stored(slots)
        places += [(rank, slot) for slot in stored.tolist() if slot >= size]
        assert not mine.stored(torch.zeros(3, dtype=torch.int64)).any()
        own = [sum(position % ranks == rank for position in range(length)) for length in lengths]
        assert mine.lengths(np.array(lengths, np.int32)).tolist() == own
        assert stored[stored > 0].tolist() == [*range(size, 5 * size)]
    assert len(places) == len(set(places)) == len(slots)


PLAN = make_plan(replace(spec_of(k=0), parallel=Parallel()), CPU, INSTALLED)


def refusal(kv_heads, drafts, tensor, context):
    """Return why a plan of so many heads is refused; empty: it is not."""
    speculative = drafts and Speculative(method=Method.EAGLE, num_tokens=1, model=DraftModel(num_kv_heads=drafts))
    model = replace(PLAN.model, num_heads=12, num_kv_heads=kv_heads)
    plan = replace(PLAN, model=model, speculative=speculative, parallel=Parallel(tensor=tensor, decode_context=context))
    try:
        refuse_context(plan)
    except RunError as error:
        return str(error)
    return ""


@given(st.sampled_from((1, 2, 3)), st.sampled_from((None, 1, 2)), st.sampled_from((1, 2, 4, 6, 12)))
def test_ranks_that_share_the_kv_hold_the_same_heads(kv_heads, drafts, tensor):
    """Neighbours of equal numbers, of target and drafter; a refusal names the numbers that one of them has."""
    for context in range(1, tensor + 2):
        copies = [max(tensor // heads, 1) for heads in {kv_heads, drafts or kv_heads}]
        works = context == 1 or all(tensor % (heads * context) == 0 for heads in {kv_heads, drafts or kv_heads})
        says = refusal(kv_heads, drafts, tensor, context)
        assert (says == "") == works
        if says:
            named = [int(number) for number in says.rpartition("plan it with ")[2].split(" or ")]
            assert any(named == [size for size in range(1, most + 1) if most % size == 0] for most in copies)
            assert context not in named


def test_a_page_is_shared_evenly():
    """Or its tokens would be of other ranks in another page."""
    plan = replace(PLAN, parallel=Parallel(tensor=3, decode_context=3))
    with pytest.raises(RunError, match="3 decode-context ranks cannot share a page of 16 tokens; give --page-size a"):
        ContextRanks.of(plan, collectives(3)[0], 16)
