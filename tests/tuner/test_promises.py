"""Promises: kept by steps that take what was promised under any load, broken by slower ones, and where."""

import attrs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.observation import BatchCount, Observation, ObservedGraph, ObservedRole
from capture_planner.records.promise import ExpectedSteps, Promise, PromisedSteps
from capture_planner.records.spec import Limits
from capture_planner_tuner.journal import PromiseVerdict
from capture_planner_tuner.promises import LEAST_SHARE, LEAST_STEPS, TOLERANCE, check_promise

ENTRIES = (
    Entry(mode=GraphMode.PIECEWISE, num_tokens=2048),
    Entry(mode=GraphMode.PIECEWISE, num_tokens=512),
    Entry(mode=GraphMode.FULL, num_tokens=256, num_reqs=256, query_len=1),
    Entry(mode=GraphMode.FULL, num_tokens=64, num_reqs=64, query_len=1),
)
ROWS = (
    (1, 1, 64, GraphMode.FULL, 2.0),
    (1, 65, 256, GraphMode.FULL, 3.0),
    (None, 65, 512, GraphMode.PIECEWISE, 5.0),
    (None, 513, 2048, GraphMode.PIECEWISE, 6.0),
    (None, 2049, 8192, GraphMode.NONE, 18.0),
)


def side(*milliseconds: float, error: float = 0.02) -> ExpectedSteps:
    """Return one side of a promise that has the rows above, with their times or these."""
    times = milliseconds or tuple(row[-1] for row in ROWS)
    rows = tuple(
        PromisedSteps(role=Role.TARGET, query_len=q, first=a, last=b, mode=mode, milliseconds=time, share=0.2)
        for (q, a, b, mode, _), time in zip(ROWS, times, strict=True)
    )
    return ExpectedSteps(mean_step_ms=sum(times) / len(times), error_ms=error, rows=rows)


PROMISE = Promise(costs="vllm 0.33.0", steps=5000, before=side(2.5, 12.0, 9.0, 18.0, 18.0), after=side())


def step(at: int, extent: int, steps: int, milliseconds: float | None) -> BatchCount:
    """Return steps of the row ``at``."""
    query_len, mode = ROWS[at][0], ROWS[at][3]
    graph = {0: 3, 1: 2, 2: 1, 3: 0}.get(at)
    return BatchCount(
        num_reqs=extent if query_len else 8,
        num_tokens=extent,
        query_len=query_len,
        past_prompt=query_len is not None,
        steps=steps,
        graph=graph,
        reason=None if mode is not GraphMode.NONE else Reason.UNCOVERED,
        interval=milliseconds,
        intervals=0 if milliseconds is None else steps // 16,
        interval_error=None if milliseconds is None else 0.01,
    )


def observed(*batches: BatchCount, unlisted: int = 0) -> Observation:
    """Return an observation under the plan, in which so many steps are of other shapes."""
    role = ObservedRole(
        role=Role.TARGET,
        mode=GraphMode.FULL_AND_PIECEWISE,
        graphs=tuple(ObservedGraph(entry=entry) for entry in ENTRIES),
        batches=batches,
        other_batches=unlisted,
    )
    return Observation(
        engine="vllm",
        engine_version="0.33.0",
        started="2026-11-24T12:00:00Z",
        model="x/y",
        limits=Limits(max_num_reqs=256, max_num_tokens=8192),
        roles=(role,),
    )


loads = st.lists(st.integers(0, 4000), min_size=len(ROWS), max_size=len(ROWS)).filter(lambda each: sum(each) > 1600)


@given(load=loads, factor=st.floats(0.5, 2.0))
def test_law16_verdict_is_of_the_steps_and_not_of_the_load(load: list[int], factor: float) -> None:
    """Whatever mix of shapes runs: expected is what the promise says of that mix, and broken is what takes longer."""
    counts = [step(at, ROWS[at][2], number, ROWS[at][4] * factor) for at, number in enumerate(load) if number]
    checked = check_promise(PROMISE, observed(*counts))
    assert checked.after is not None
    expected = sum(number * ROWS[at][4] for at, number in enumerate(load)) / sum(load)
    assert abs(checked.after.expected_ms - expected) < 1e-9
    assert abs(checked.after.off - (factor - 1)) < 1e-9
    assert checked.after.share == 1
    tolerance = max(TOLERANCE * expected, 2 * checked.after.error_ms)
    if (factor - 1) * expected > tolerance + 1e-9:
        assert checked.verdict is PromiseVerdict.BROKEN
    elif checked.without_ms is not None and factor <= 1:
        assert checked.verdict is PromiseVerdict.KEPT


@given(at=st.integers(0, len(ROWS) - 1), steps=st.integers(LEAST_STEPS, 4000))
def test_the_class_that_broke_it_is_named(at: int, steps: int) -> None:
    """The one with the most time above what was promised, in all its steps together."""
    counts = [step(each, ROWS[each][2], 1000, ROWS[each][4]) for each in range(len(ROWS))]
    counts[at] = step(at, ROWS[at][2], steps, ROWS[at][4] + 30)
    checked = check_promise(PROMISE, observed(*counts))
    assert checked.verdict is PromiseVerdict.BROKEN
    query_len, first, last = ROWS[at][:3]
    kind = "mixed batches of" if query_len is None else "decodes of 1 for"
    assert f"target: {kind} {first} to {last} " in checked.reason
    (row,) = (each for each in checked.classes if each.first == first and each.query_len == query_len)
    assert (row.steps, row.other_mode) == (steps, 0)
    assert row.excess_ms > 0


def test_steps_that_ran_in_another_mode_are_said() -> None:
    """A row that was promised a graph and ran eager."""
    eager = attrs.evolve(step(1, 200, 2000, 12.0), graph=None, reason=Reason.UNCOVERED)
    checked = check_promise(PROMISE, observed(eager))
    assert checked.verdict is PromiseVerdict.BROKEN
    assert "2,000 of 2,000 steps not on FULL graphs" in checked.reason


def test_slower_than_without_the_plan_is_broken() -> None:
    """Within the tolerance of what was promised, and all the same a loss."""
    promise = replace(PROMISE, before=side(2.0, 3.0, 5.0, 6.0, 17.0), after=side())
    counts = [step(4, 4000, 4000, 18.9)]
    checked = check_promise(promise, observed(*counts))
    assert checked.verdict is PromiseVerdict.BROKEN
    assert "11% more than the 17.00 ms that it takes without the plan" in checked.reason


@given(steps=st.integers(LEAST_STEPS, 4000), unlisted=st.integers(0, 10**6))
def test_steps_that_are_not_listed_are_steps(steps: int, unlisted: int) -> None:
    """A promise that holds for a few of the steps is not kept."""
    checked = check_promise(PROMISE, observed(step(0, 64, steps, 2.0), unlisted=unlisted))
    assert checked.after is not None
    assert checked.after.share == steps / (steps + unlisted)
    is_enough = checked.after.share >= LEAST_SHARE
    assert checked.verdict is (PromiseVerdict.KEPT if is_enough else PromiseVerdict.TOO_LITTLE_DATA)


@given(samples=st.integers(0, 60), timed=st.booleans())
def test_samples_of_passes_are_no_intervals(samples: int, timed: bool) -> None:
    """Of shapes without one, no step counts as timed."""
    count = attrs.evolve(step(0, 64, 2000, 2.0 if timed else None), milliseconds=1.0, samples=samples)
    (row,) = check_promise(PROMISE, observed(count)).classes
    assert (row.measured_ms, row.timed) == ((2.0, 125) if timed else (None, 0))


def test_too_little_data() -> None:
    """Few steps, few that are timed, or few of a promised shape decide nothing."""
    few = check_promise(PROMISE, observed(step(0, 64, LEAST_STEPS - 1, 50.0)))
    assert few.verdict is PromiseVerdict.TOO_LITTLE_DATA
    assert "999 steps of promised shapes" in few.reason
    untimed = check_promise(PROMISE, observed(step(0, 64, 5000, None)))
    assert untimed.verdict is PromiseVerdict.TOO_LITTLE_DATA
    assert untimed.after is None
    small = replace(PROMISE, after=replace(side(), rows=side().rows[:1]))
    other = check_promise(small, observed(step(0, 64, 1000, 2.0), step(4, 4000, 3000, 18.0)))
    assert other.verdict is PromiseVerdict.TOO_LITTLE_DATA
    assert "only 25% of the steps" in other.reason


@given(extent=st.integers(1, 256))
def test_shapes_between_rows_are_interpolated(extent: int) -> None:
    """And those below the first row pad up to it; none is expected to take less than its neighbours both do."""
    rows = (side().rows[0], replace(side().rows[1], first=128))
    promise = replace(PROMISE, after=replace(side(), rows=rows))
    checked = check_promise(promise, observed(step(0 if extent <= 64 else 1, extent, 2000, 2.0)))
    assert checked.after is not None
    expected = 2.0 if extent <= 64 else 3.0 if extent >= 128 else 2 + (extent - 64) / 64
    assert abs(checked.after.expected_ms - expected) < 1e-9


def test_before_is_reported_and_decides_nothing() -> None:
    """What today's costs expected, under the load without the plan."""
    before = observed(step(0, 32, 3000, 5.0))
    checked = check_promise(PROMISE, observed(step(0, 32, 3000, 2.0)), before)
    assert checked.verdict is PromiseVerdict.KEPT
    assert checked.before is not None
    assert (checked.before.expected_ms, checked.before.measured_ms) == (2.5, 5.0)
