"""What a stage comes to on several ranks: the same on all of them, whatever happened on one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import RankError
from capture_planner_runner.ranks.outcomes import StageOutcome, on_every_rank, refuse_other_states
from capture_planner_runner.ranks.peers import ALONE
from support.rank_threads import on_ranks

FAULTS = {"memory": torch.OutOfMemoryError("no room"), "error": ValueError("odd"), "none": None}


@given(st.lists(st.sampled_from(sorted(FAULTS)), min_size=2, max_size=5))
def test_all_ranks_come_to_the_same(faults):
    """An error stops all, and else what does not fit on one is left out by all; each names the ranks that it is of."""

    def work(peers):
        fault = FAULTS[faults[peers.place.rank]]

        def stage():
            if fault is not None:
                raise fault
            return peers.place.rank

        return on_every_rank(peers, "stage", stage)

    found = on_ranks(len(faults), work)
    broken = tuple(rank for rank, fault in enumerate(faults) if fault == "error")
    unfit = [rank for rank, fault in enumerate(faults) if fault == "memory"]
    for rank, outcome in enumerate(found):
        if rank in broken:
            assert outcome is FAULTS["error"]
        elif broken:
            assert isinstance(outcome, RankError)
            assert outcome.ranks == broken
        elif unfit:
            assert outcome == StageOutcome(None, "; ".join(f"rank {each}: no room" for each in unfit))
        else:
            assert outcome == StageOutcome(rank)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=5))
def test_ranks_with_other_collectives_than_most_are_named(calls):
    """Graphs with other collectives in them would wait for each other at a replay."""
    found = on_ranks(
        len(calls),
        lambda peers: on_every_rank(peers, "capture", lambda: None, state=lambda: f"{calls[peers.place.rank]} calls"),
    )
    usual = max(calls, key=lambda each: (calls.count(each), -calls.index(each)))
    others = tuple(rank for rank, each in enumerate(calls) if each != usual)
    for outcome in found:
        if others:
            assert isinstance(outcome, RankError)
            assert outcome.ranks == others
        else:
            assert outcome == StageOutcome(None)


def test_an_error_that_is_not_awaited_leaves_at_once():
    """Other ranks may be inside of a collective: no exchange comes before it."""

    def stage():
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        on_every_rank(ALONE, "warm-up", stage, awaits=())


def test_equal_values_are_no_difference():
    """Of one rank or of many."""
    refuse_other_states("topic", ["a"])
    refuse_other_states("topic", ["a", "a"])
    with pytest.raises(RankError, match="rank 1 has b; rank 0 has a"):
        refuse_other_states("topic", ["a", "b", "a"])
