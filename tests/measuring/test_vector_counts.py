"""Vectors of data-parallel ranks are counted in bounded memory, and no step is lost."""

from collections import Counter
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.measuring import recorder
from capture_planner.measuring.recorder import VectorCounts
from capture_planner.modes import GraphMode, Reason, Role

SHARES = st.tuples(st.integers(1, 9), st.just(9), st.none(), st.just(True), st.sampled_from(GraphMode))
OUTCOMES = st.sampled_from([(0, None), (1, None), (None, Reason.RANK)])


@given(st.lists(st.tuples(st.sampled_from(Role), st.tuples(SHARES, SHARES), OUTCOMES), max_size=60), st.integers(1, 8))
def test_every_step_is_listed_or_counted(events, most):
    """With few kept apart: the sums by role stay, the listed ones are exact where nothing was forgotten."""
    steps = [(role, shares, *outcome) for role, shares, outcome in events]
    for known in (4, 1000):
        with mock.patch.object(recorder, "MAX_KNOWN", known):
            counts = VectorCounts()
            for each in steps:
                counts.add(each)
        exact = Counter(steps)
        for role in Role:
            listed, others = counts.vectors(role, most)
            own = Counter({each: count for each, count in exact.items() if each[0] is role})
            assert len(listed) <= most
            assert sum(each.steps for each in listed) + others == own.total()
            if known == 1000:
                taken = sorted((each.steps for each in listed), reverse=True)
                eager = sum(each.graph is None for each in listed)
                assert eager or taken == sorted(own.values(), reverse=True)[:most]


def test_half_of_a_full_list_is_left_to_eager_steps():
    """They are rare where a plan is good, and the ones to explain."""
    counts = VectorCounts()
    shares = [(reqs, reqs, 1, True, GraphMode.FULL) for reqs in range(1, 9)]
    for reqs, share in enumerate(shares):
        counts.add((Role.TARGET, (share, share), 0, None), 100 + reqs)
        counts.add((Role.TARGET, (share, shares[0]), None, Reason.RANK), 1)
    listed, others = counts.vectors(Role.TARGET, 4)
    assert [each.reason for each in listed] == [Reason.RANK, Reason.RANK, None, None]
    assert [each.num_reqs for each in listed[2:]] == [(8, 8), (7, 7)]
    assert others == sum(range(100, 106)) + 6
