"""Distributions: percentiles by brute force, exactly or within the bound, and memory that does not grow."""

import json
import math

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from capture_planner_runner.ledger.session import BOUND, LEAST, Distribution

VALUES = st.lists(st.sampled_from((0.0, 1e-9, 0.5)) | st.floats(0, 1e6), min_size=1, max_size=120)


@given(VALUES, st.sampled_from((0, 3, 1000)), st.integers(1, 3))
def test_percentiles_are_those_of_all_values_within_the_bound(values, most, times):
    """By nearest rank: the smallest value that so many percent do not exceed; exact while all are kept."""
    found = Distribution(most)
    for value in values:
        found.add(value, times)
    repeated = sorted(value for value in values for _ in range(times))
    assert (found.count, found.max) == (len(repeated), repeated[-1])
    assert found.is_exact == (len(repeated) <= most)
    event(f"exact: {found.is_exact}")
    for percent in (1, 50, 90, 99, 100):
        exact = min(v for v in values if sum(w <= v for w in repeated) * 100 >= percent * len(repeated))
        near = found.percentile(percent)
        assert near <= found.max
        if found.is_exact:
            assert near == exact
        else:
            assert near == pytest.approx(exact, rel=BOUND * (1 + 1e-6), abs=LEAST)


@given(st.lists(VALUES, max_size=4), st.sampled_from((0, 3, 100)))
def test_distributions_add_up_to_that_of_all_values(parts, most):
    """Sent as JSON, percentiles equal those of one distribution, and are exact where its own are."""
    found = Distribution(most)
    for part in parts:
        each = Distribution.of(part, most)
        found.add_all(json.loads(json.dumps(each.pairs)), each.max)
    whole = Distribution.of((value for part in parts for value in part), most)
    assert (found.count, found.max, found.is_exact) == (whole.count, whole.max, whole.is_exact)
    assert found.pairs == whole.pairs


@given(st.lists(st.floats(-20, 13).map(math.exp), min_size=1, max_size=200))
def test_a_distribution_holds_no_more_than_its_buckets(values):
    """However many values there are: from a nanosecond to a week there are some 1,700 buckets."""
    found = Distribution.of(values, most=10)
    assert len(found._values) <= 10
    assert len(found._buckets) <= 1 + math.log(1e6 / LEAST) / math.log((1 + BOUND) / (1 - BOUND))
    assert not (found._values and found._buckets)
