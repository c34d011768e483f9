"""The walk along the hull of lines: the best line of each time, against all of them."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.planning.sizing.program import LadderProblem, LadderProgram, _next_row

COSTS = st.none() | st.integers(0, 12) | st.integers(0, 2000)


@settings(max_examples=max(settings.default.max_examples, 150))
@given(st.data(), st.integers(1, 14))
def test_the_best_line_of_each_time_is_that_of_a_scan(data: st.DataObject, count: int) -> None:
    """The least cost, and of equal ones the first; some lines are no choice, others parallel or too far off."""
    steps = st.lists(st.integers(1, 3) | st.integers(1, 90), min_size=count, max_size=count)
    gains = st.lists(st.sampled_from((0, 1, 2, 5)) | st.integers(0, 90), min_size=count, max_size=count)
    times, weights = list(accumulate(data.draw(steps))), list(accumulate(data.draw(gains)))
    previous = data.draw(st.lists(COSTS, min_size=count, max_size=count))
    reach = data.draw(st.lists(st.integers(-1, 2 * count), min_size=count, max_size=count))
    lows = data.draw(st.none() | st.just(sorted(min(low, j) for j, low in enumerate(reach))))
    values, before = _next_row(times, weights, previous, lows)
    for j, time in enumerate(times):
        choices = [
            (cost + time * (weights[j] - weights[i]), i)
            for i, cost in enumerate(previous[:j])
            if cost is not None and (lows is None or i >= lows[j])
        ]
        value, first = min(choices, default=(None, -1))
        assert (values[j], before[j]) == (value, first)


@settings(max_examples=max(settings.default.max_examples, 40))
@given(st.data(), st.integers(1, 12))
def test_more_sizes_than_are_tried_one_by_one(data: st.DataObject, count: int) -> None:
    """Row by row, by the recurrence that the program is of: the last size, then the best of those below it."""
    lists = [
        data.draw(st.lists(values, min_size=count, max_size=count))
        for values in (st.integers(1, 9), st.integers(0, 9), st.integers(0, 60))
    ]
    steps, weights, eager = lists[0], lists[1], sorted(lists[2])
    sizes, least_top = list(range(1, count + 1)), data.draw(st.integers(1, count))
    problem = LadderProblem.of(sizes, list(accumulate(steps)), weights, eager, least_top)
    program = LadderProgram(problem)
    rows = [[time * weight for time, weight in zip(problem.times, problem.weights, strict=True)]]
    for number in range(1, count + 1):
        ends = [
            cost + tail if cost is not None and index >= problem.least_top else None
            for index, (cost, tail) in enumerate(zip(rows[-1], problem.tails, strict=True))
        ]
        for highest in (None, *range(count)):
            allowed = [cost for cost in ends[: None if highest is None else highest + 1] if cost is not None]
            assert program.value(number, highest) == min(allowed, default=None)
        rows.append(
            [
                min(
                    (
                        rows[-1][i] + problem.times[j] * (problem.weights[j] - problem.weights[i])
                        for i in range(j)
                        if rows[-1][i] is not None
                    ),
                    default=None,
                )
                for j in range(count)
            ]
        )
