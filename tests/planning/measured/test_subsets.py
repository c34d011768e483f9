"""Sets in the order of what they cost, against a list of all of them."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, combinations, islice

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.planning.measured.allocation import by_largest, by_sum

keys = st.integers(0, 9)


def every(costs):
    """All sets of the keys."""
    return [frozenset(each) for each in chain(*(combinations(costs, number) for number in range(len(costs) + 1)))]


@given(st.dictionaries(keys, st.integers(-3, 5), max_size=7))
def test_sums_ascend_and_every_set_comes_once(costs):
    """Negative costs and equal ones among them."""
    listed = list(by_sum(costs))
    sums = [total for total, _ in listed]
    assert sums == sorted(sums)
    assert all(total == sum(costs[key] for key in each) for total, each in listed)
    assert sorted(map(sorted, every(costs))) == sorted(sorted(each) for _, each in listed)


@given(st.dictionaries(keys, st.fractions(Fraction(1), 3, max_denominator=4), max_size=7))
def test_largest_ratios_ascend_and_every_set_comes_once(ratios):
    """Nothing is larger than one in the empty set."""
    listed = list(by_largest(ratios))
    largest = [ratio for ratio, _ in listed]
    assert largest == sorted(largest)
    assert all(ratio == max([Fraction(1), *(ratios[key] for key in each)]) for ratio, each in listed)
    assert sorted(map(sorted, every(ratios))) == sorted(sorted(each) for _, each in listed)


def test_the_first_sets_of_many_keys_take_no_list_of_all():
    """Of sixty keys there are more sets than could be listed."""
    costs = {key: 1 + key % 7 for key in range(60)}
    assert [total for total, _ in islice(by_sum(costs), 60)][:3] == [0, 1, 1]
    assert len(list(islice(by_largest({key: Fraction(2) for key in costs}), 1000))) == 1000
