"""The search for the steps of a staircase: every step is found, with few measurements, in the time that there is."""

from bisect import bisect_left
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner_runner.bench.staircase import LEAST, MOST, SizeRange, Timing, disputed, gaps, rounds, steady


class FakeClock:
    """A clock that passes when somebody measures, and times that are a staircase of the size."""

    def __init__(self, ends, levels):
        self.ends, self.levels, self.measured = ends, levels, []

    def time(self, size):
        return self.levels[bisect_left(self.ends, size)]

    def run(self, last, *, group=4, named=(), search=True, most=10**9):
        times = {"curve": {}}
        for batch in rounds([SizeRange(key="curve", last=last, named=named, search=search)], times, group):
            for key, size in batch:
                if len(self.measured) >= most:
                    return times["curve"]
                self.measured.append(size)
                times[key][size] = self.time(size)
        return times["curve"]


@st.composite
def staircases(draw):
    """Times of the sizes 1 to ``last``: ends of the flat parts, and rising levels at least 5 % apart."""
    last = draw(st.integers(1, 2000))
    ends = sorted(draw(st.sets(st.integers(1, last), max_size=12)) | {last})
    rises = draw(st.lists(st.floats(1.05, 3.0), min_size=len(ends), max_size=len(ends)))
    return FakeClock(ends, list(accumulate(rises, lambda level, rise: level * rise))), last


def interpolated(times, size):
    """What a reader of the curve makes of a size."""
    sizes = sorted(times)
    right = bisect_left(sizes, size)
    if sizes[right] == size:
        return times[size]
    low, high = sizes[right - 1], sizes[right]
    return times[low] + (times[high] - times[low]) * (size - low) / (high - low)


@given(staircases(), st.integers(1, 20))
def test_bisection_equals_the_measurement_of_every_size(staircase, group):
    """Without a limit of time, the curve is the staircase at every size, as if all had been measured."""
    clock, last = staircase
    found = clock.run(last, group=group)
    assert all(interpolated(found, size) == pytest.approx(clock.time(size)) for size in range(1, last + 1))


@given(staircases(), st.integers(1, 20))
def test_bisection_measures_few_sizes(staircase, group):
    """At most the seeds, and for each step the halvings of one interval; no size twice."""
    clock, last = staircase
    clock.run(last, group=group)
    seeds = SizeRange(key="curve", last=last).seeds
    assert len(clock.measured) == len(set(clock.measured))
    assert len(clock.measured) <= len(seeds) + (len(clock.ends) - 1) * last.bit_length()


@given(staircases(), st.integers(0, 40))
def test_a_search_that_is_cut_short_has_the_ends_first(staircase, most):
    """Whatever the time allows, the ends come first, then powers of two."""
    clock, last = staircase
    found = clock.run(last, most=most)
    assert set(list(dict.fromkeys((1, last)))[:most]) <= set(found)
    assert clock.measured[: len(found)] == list(found)


def test_an_interval_of_the_highest_rise_comes_first():
    """Of two steps the larger one is looked for first."""
    times = {"a": {1: 1.0, 64: 1.1, 128: 3.0}, "b": {1: 2.0, 9: 2.5}}
    assert [(gap.key, gap.low, gap.high) for gap in gaps(times)] == [("a", 64, 128), ("b", 1, 9), ("a", 1, 64)]


def test_a_size_that_a_larger_one_beats_is_measured_once_more():
    """A mistake of measuring is corrected; a size that stays slower is not measured a third time."""
    assert disputed({"a": {1: 1.0, 400: 3.35, 512: 3.25, 600: 3.4}}) == [("a", 400)]
    times, asked = {"a": {}}, []
    for batch in rounds([SizeRange(key="a", last=512, named=(400,))], times, 4):
        asked += batch
        for key, size in batch:
            times[key][size] = 3.35 if size == 400 else 3.25 if size > 300 else 1.0
    assert asked.count(("a", 400)) == 2


def test_a_range_without_search_has_its_named_sizes_alone():
    """Eager passes are measured at a few sizes, whatever their times."""
    clock = FakeClock([10, 100], [1.0, 9.0])
    assert sorted(clock.run(100, named=(8, 64), search=False)) == [1, 8, 64, 100]


@given(st.floats(0.1, 100))
def test_a_steady_size_takes_the_fewest_repeats(level):
    """Equal samples settle at once."""
    timing = steady(lambda: level, lambda: False)
    assert (timing.milliseconds, timing.repeats) == (pytest.approx(level), LEAST)


def test_repeats_end_when_the_spread_is_small_or_they_are_many():
    """Noise at the start is outweighed; noise that stays ends at the most repeats, and its spread says so."""
    settling = iter([5.0, 3.0, *[1.0] * 100])
    timing = steady(lambda: next(settling), lambda: False)
    assert timing.milliseconds == 1.0
    assert LEAST < timing.repeats < MOST
    noisy = iter([1.0, 2.0] * 100)
    timing = steady(lambda: next(noisy), lambda: False)
    assert timing.repeats == MOST
    assert timing.spread > 0.5


def test_one_repeat_is_all_when_the_time_is_over():
    """A size that was begun is finished with what there is."""
    assert steady(lambda: 2.0, lambda: True) == Timing(2.0, 0.0, 1)
