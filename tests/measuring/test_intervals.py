"""Intervals: means and spreads are those of all steps, however they come and whatever is rounded; stalls are apart."""

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.measuring.coarsening import ShapeTally, coarsened
from capture_planner.measuring.recorder import SETTLED, STALL, Intervals
from capture_planner.modes import Reason, Role

TIMES = st.lists(st.floats(1.0, 5.0), min_size=1, max_size=50)


def eager(tokens):
    return (Role.TARGET, 1, tokens, None, False, 0, None, Reason.SIZES)


def joined(intervals, kept):
    """Return the tallies of what was taken and what waits, and the stalls."""
    tallies, stalls = dict(kept), Counter()
    for outcome, time, is_stall in intervals.waiting():
        if is_stall:
            stalls[outcome[0]] += 1
        else:
            tallies[outcome] = tallies.get(outcome, ShapeTally()) + ShapeTally(timed=1, mean=time)
    return tallies, stalls


@given(TIMES, st.integers(0, 50))
def test_tally_of_two_parts_is_that_of_all(times, cut):
    """Mean and standard error, against the standard library's."""
    parts = [ShapeTally(), ShapeTally()]
    for number, time in enumerate(times):
        parts[number >= cut] += ShapeTally(1, timed=1, mean=time)
    both = parts[0] + parts[1]
    assert (both.steps, both.timed, both.mean) == (len(times), len(times), pytest.approx(statistics.fmean(times)))
    if len(times) > 1:
        assert both.error == pytest.approx(statistics.stdev(times) / len(times) ** 0.5, abs=1e-9)
    else:
        assert both.error is None


@given(st.dictionaries(st.integers(600, 800), TIMES, min_size=1), st.integers(4, 50))
def test_rounded_shapes_keep_the_steps_and_the_mean_of_all(times, most):
    tallies = {}
    for tokens, own in times.items():
        for time in own:
            tallies[eager(tokens)] = tallies.get(eager(tokens), ShapeTally()) + ShapeTally(1, timed=1, mean=time)
    coarse, lost = coarsened(tallies, most, lambda outcome: (1, 4096))
    assert len(coarse) <= most
    assert not lost
    whole = sum(coarse.values(), ShapeTally())
    every = [time for own in times.values() for time in own]
    assert (whole.steps, whole.timed, whole.mean) == (len(every), len(every), pytest.approx(statistics.fmean(every)))
    assert whole.rounded >= sum(tally.steps for each, tally in tallies.items() if each not in coarse)
    assert len(tallies) > most or (coarse == tallies and not whole.rounded)


@given(st.integers(0, 3), st.floats(STALL * 5.01, 1e6), st.lists(st.floats(4.0, 5.0), min_size=SETTLED, max_size=60))
def test_stalls_are_counted_apart_even_if_they_come_first(number, time, times):
    """As the steps that compile kernels do; a step of so many times the tokens is none."""
    intervals = Intervals()
    for each in [time] * number + times:
        intervals.add(eager(512), each)
    intervals.add(eager(512 * STALL * 2), STALL * 4.5)
    known, stalls = joined(intervals, {})
    assert stalls == Counter({Role.TARGET: number} if number else {})
    assert known[eager(512)].mean == pytest.approx(statistics.fmean(times))
    assert known[eager(512 * STALL * 2)].timed == 1
    taken = [*intervals.taken()]
    assert sum(is_stall for *_, is_stall in taken) == number
    assert [*intervals.waiting()] == []


@given(st.integers(513, 8192), st.lists(st.floats(4.0, 5.0), min_size=SETTLED, max_size=60))
def test_a_step_of_more_tokens_is_a_stall_beyond_twice_its_proportion(tokens, times):
    """A pass takes as much longer as it has more tokens at most: what compiles kernels for a size takes seconds."""
    intervals = Intervals()
    for each in times:
        intervals.add(eager(512), each)
    usual = statistics.median(times)
    bound = usual * max(STALL, 2 * tokens / 512)
    intervals.add(eager(tokens), bound * 0.99)
    intervals.add(eager(tokens), bound * 1.1)
    known, stalls = joined(intervals, {})
    assert (known[eager(tokens)].timed, stalls[Role.TARGET]) == (1, 1)


def test_first_steps_of_a_kind_wait_until_there_are_enough():
    intervals = Intervals()
    for _ in range(SETTLED - 1):
        intervals.add(eager(512), 5.0)
    assert [*intervals.taken()] == []
    intervals.add(eager(512), 5.0)
    assert len([*intervals.taken()]) == SETTLED
