"""Synthetic acceptance: draws against a loop over drafts, shares against the rates, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner_runner.serving.speculative import SyntheticAcceptance, request_key

KEYS = np.array([request_key(f"request-{number}") for number in range(2000)], dtype=np.uint64)
RATES = st.lists(st.sampled_from((0.0, 1.0)) | st.floats(0, 1), min_size=1, max_size=4).map(
    lambda rates: tuple(sorted(rates, reverse=True))
)


@given(RATES, st.integers(0, 1 << 62), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4)), min_size=1))
def test_drafts_are_accepted_one_after_the_other(rates, seed, requests):
    """Each with the share of its place among those whose drafts before were accepted; alone as in a batch."""
    acceptance = SyntheticAcceptance(rates, seed)
    length, drafts = (np.array(column, dtype=np.int64) for column in zip(*requests, strict=True))
    keys = KEYS[: len(requests)]
    found = acceptance.accepted(keys, length, drafts)
    assert found.dtype == np.int32
    for row, (key, start, count) in enumerate(zip(keys, length.tolist(), drafts.tolist(), strict=True)):
        accepted = 0
        while accepted < min(count, len(rates)):
            draw = acceptance.draws(key[None], np.array([start + accepted], dtype=np.uint64))[0]
            before = 1.0 if accepted == 0 else rates[accepted - 1]
            if before == 0 or draw >= rates[accepted] / before:
                break
            accepted += 1
        assert found[row] == accepted
        assert acceptance.accepted(keys[row : row + 1], length[row : row + 1], drafts[row : row + 1])[0] == accepted


@pytest.mark.parametrize("rates", [(0.7, 0.5, 0.3), (1.0, 1.0), (0.9, 0.0, 0.0), (0.25,)])
def test_shares_are_the_rates_that_were_asked_for(rates):
    """Of 40,000 steps, within five standard deviations: of 2,000 requests at 20 places."""
    acceptance, count = SyntheticAcceptance(rates, 3), 20 * len(KEYS)
    places = np.arange(0, 200, 10, dtype=np.int64)
    found = np.concatenate([acceptance.accepted(KEYS, np.full(len(KEYS), at), np.full(len(KEYS), 9)) for at in places])
    for place, rate in enumerate(rates):
        assert (found > place).mean() == pytest.approx(rate, abs=5 * (rate * (1 - rate) / count) ** 0.5)


def test_another_seed_or_name_draws_otherwise():
    """And the same ones the same."""
    draws = [
        SyntheticAcceptance((0.5,), seed).accepted(keys, np.arange(1000), np.ones(1000, dtype=np.int64)).tolist()
        for seed, keys in ((0, KEYS[:1000]), (0, KEYS[:1000]), (1, KEYS[:1000]), (0, KEYS[1000:]))
    ]
    assert draws[0] == draws[1]
    assert all(0.4 < np.mean(np.not_equal(draws[0], other)) < 0.6 for other in draws[2:])
