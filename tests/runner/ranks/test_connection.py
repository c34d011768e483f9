"""How long a store outlives its rank: until all that can still read the verdict have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from capture_planner_runner.ranks.connection import Patience

RANKS = st.sets(st.integers(1, 5))
SECONDS = st.floats(0, 10)


@given(missing=RANKS, blamed=RANKS, dead=RANKS, waited=SECONDS, grace=SECONDS, seconds=SECONDS)
def test_only_ranks_that_can_still_read_are_waited_for(missing, blamed, dead, waited, grace, seconds):
    patience = Patience(seconds=seconds, blamed=blamed, grace=grace, gone=lambda: dead)
    reads = {rank for rank in missing if rank not in dead and (rank not in blamed or waited <= grace)}
    assert patience.waits_for(missing, waited) == (len(reads) > 0 and waited <= seconds)
