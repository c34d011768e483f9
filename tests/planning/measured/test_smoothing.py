"""Weights of counts, computed a second time in fractions, from the rule as the module states it."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.planning.measured.teams import SCALE, prior_share, smoothed

STEPS = st.integers(0, 100_000)


def weight(count, observed, last, steps, given):
    """The exact weight of a count: what was observed, a kernel over half to one and a half, and all doublings."""
    passes = sum(observed.values())
    share = max(Fraction(3, 10), Fraction(1000, 1000 + passes))
    kernel = Fraction(0)
    for middle, number in observed.items():
        covered = [each for each in range(1, last + 1) if 2 * each >= middle and each <= middle * 3 // 2]
        kernel += Fraction(number, len(covered)) * (count in covered)
    doubling = Fraction(math.log((count + 1) / count) / math.log(last + 1))
    prior = Fraction(3, 4) * passes * doubling + Fraction(1, 4) * kernel
    own = share * prior + (1 - share) * observed.get(count, 0)
    return Fraction(SCALE, max(steps, 1)) * (own + Fraction(given) * doubling)


@given(st.integers(1, 30), st.data())
def test_weights_are_those_of_the_rule(last, data):
    """Each to the two roundings that it has; none of the count 0. Given weight may be all that the doublings have."""
    observed = data.draw(st.dictionaries(st.integers(1, last), st.integers(1, 5000), min_size=1))
    passes = sum(observed.values())
    steps = passes + data.draw(st.integers(0, 1000))
    given_weight = data.draw(st.sampled_from((0.0, 12.5, -float(Fraction(3, 4) * prior_share(passes) * passes))))
    weights = smoothed(observed, last, steps, given=given_weight)
    assert len(weights) == last + 1
    assert weights[0] == 0
    assert sum(weights) == pytest.approx(SCALE * (passes + given_weight) / steps, rel=0.01)
    for count in range(1, last + 1):
        assert abs(weights[count] - weight(count, observed, last, steps, given_weight)) <= 2


@given(st.integers(1, 1000), STEPS | st.just(10**10))
def test_a_ladder_of_which_nothing_was_observed_weighs_like_one_step(last, steps):
    """Every doubling of the count has the same part, and each count at least one."""
    weights = smoothed({}, last, steps)
    assert min(weights[1:]) >= 1
    assert sum(weights) == pytest.approx(SCALE / max(steps, 1), rel=0.01, abs=2 * last)
    assert sum(smoothed({}, last, steps, given=9.0)) == pytest.approx(9 * SCALE / max(steps, 1), rel=0.01, abs=2 * last)
    assert weights[1:] == sorted(weights[1:], reverse=True)
    if last >= 7:
        assert sum(weights[2:4]) == pytest.approx(sum(weights[4:8]), rel=0.01, abs=8)


@given(STEPS, STEPS)
def test_the_prior_has_less_of_more_steps_and_never_nothing(one, other):
    """All without steps, half of a thousand, three tenths of many."""
    assert prior_share(min(one, other)) >= prior_share(max(one, other)) >= Fraction(3, 10)
    assert (prior_share(0), prior_share(1000), prior_share(9000)) == (1, Fraction(1, 2), Fraction(3, 10))
