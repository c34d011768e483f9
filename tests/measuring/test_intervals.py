"""Intervals: means and spreads are those of all steps, however they come and whatever is rounded; stalls are apart."""

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.measuring.intervals import SETTLED, STALL, Intervals, Spread
from capture_planner.modes import Reason, Role

TIMES = st.lists(st.floats(1.0, 5.0), min_size=1, max_size=50)


def eager(tokens):
    return (Role.TARGET, 1, tokens, None, False, 0, None, Reason.SIZES)


@given(TIMES, st.integers(0, 50))
def test_spread_of_two_parts_is_that_of_all(times, cut):
    """Mean and standard error, against the standard library's."""
    parts = [Spread(), Spread()]
    for number, time in enumerate(times):
        parts[number >= cut] = parts[number >= cut].and_(Spread(1, time))
    both = parts[0].and_(parts[1])
    assert (both.count, both.mean) == (len(times), pytest.approx(statistics.fmean(times)))
    if len(times) > 1:
        assert both.error == pytest.approx(statistics.stdev(times) / len(times) ** 0.5, abs=1e-9)
    else:
        assert both.error is None


@given(TIMES, st.sets(st.integers(0, 50)), st.integers(0, 3))
def test_rounded_shapes_keep_the_mean_of_all_steps(times, cuts, round_after):
    """Whenever they are read, and however many at a time."""
    intervals, chunk = Intervals(), []
    for number, time in enumerate(times):
        chunk.append((eager(600 + number % 7), time))
        if number in cuts:
            intervals.add(chunk)
            chunk = []
            if number % 4 == round_after:
                intervals.round({eager(tokens): eager(612) for tokens in range(600, 612)}, [eager(612)])
    intervals.add(chunk)
    known, stalls = intervals.read()
    whole = Spread()
    for spread in known.values():
        whole = whole.and_(spread)
    assert (whole.count, whole.mean) == (len(times), pytest.approx(statistics.fmean(times)))
    assert not stalls


@given(st.integers(0, 3), st.floats(STALL * 5.01, 1e6), st.lists(st.floats(4.0, 5.0), min_size=SETTLED, max_size=60))
def test_stalls_are_counted_apart_even_if_they_come_first(number, time, times):
    """As the steps that compile kernels do; a step of so many times the tokens is none."""
    intervals = Intervals()
    for each in ([time] * number, times):
        intervals.add((eager(512), milliseconds) for milliseconds in each)
    intervals.add([(eager(512 * STALL * 2), STALL * 4.5)])
    known, stalls = intervals.read()
    assert stalls == Counter({Role.TARGET: number} if number else {})
    assert known[eager(512)].mean == pytest.approx(statistics.fmean(times))
    assert known[eager(512 * STALL * 2)].count == 1
