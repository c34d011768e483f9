"""The promise of a plan: its rows add up to its mean, and steps that take what it says keep it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import load_backends, plan
from capture_planner.codec.shipped import find_environment
from capture_planner.engines.deployments import emulation_of
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import steps_of
from capture_planner.records._base import digest, replace
from capture_planner.records.batch import Batch
from capture_planner.records.model import Method, Speculative
from capture_planner.records.observation import BatchCount, Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Overhead
from capture_planner.records.promise import MAX_PROMISED, PromisedSteps
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner_tuner.journal import PromiseVerdict
from capture_planner_tuner.promises import check_promise
from capture_planner_tuner.tuning import judgement
from capture_planner_tuner.tuning.judgement import Pricing, promise_of
from support.observing import observation_of
from support.tuning import MODEL, profile

H200 = find_environment("h200")
BACKENDS = load_backends()
SPEC = Spec(
    model=MODEL,
    limits=Limits(max_num_reqs=64, max_num_tokens=512),
    backend="flash_attention",
    speculative=Speculative(method=Method.EAGLE3, num_tokens=2),
)


def pricing(reqs: tuple[int, ...]) -> tuple[Plan, Pricing]:
    """Return a plan of some sizes, and the time of its steps."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=reqs, num_tokens=tuple(3 * each for each in reqs))
    made = plan(replace(SPEC, sizes=sizes), H200, BACKENDS)
    return made, Pricing(emulation_of(made), Costs(profile(SPEC.active_roles, speculative=SPEC.speculative)))


SMALL, LARGE = pricing((1, 8, 32)), pricing((2, 16, 48, 64))


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    """Decodes and mixed batches, enough to decide on."""
    decodes = draw(st.dictionaries(st.integers(1, 64), st.integers(1, 5000), min_size=1, max_size=12))
    mixed = draw(st.dictionaries(st.integers(4, 512), st.integers(1, 5000), max_size=8))
    counts = [
        *(
            TrafficCount(
                role=Role.TARGET, num_reqs=n, num_tokens=3 * n, query_len=3, past_prompt=True, count=1000 + count
            )
            for n, count in decodes.items()
        ),
        *(
            TrafficCount(role=Role.TARGET, num_reqs=2, num_tokens=tokens, past_prompt=False, count=count)
            for tokens, count in mixed.items()
        ),
    ]
    return Traffic(sources=("drawn",), batches=tuple(counts))


def observed(made: Plan, own: Pricing, traffic: Traffic, factor: float) -> Observation:
    """Return an observation of a traffic, whose steps take what the costs say, times a factor."""
    seen = observation_of(made)
    counts = []
    for batch, steps in steps_of(traffic, SPEC).counts.items():
        answer = own.deployment.dispatch(batch)
        entries = made.role(Role.TARGET).entries
        counts.append(
            BatchCount(
                num_reqs=batch.num_reqs,
                num_tokens=batch.num_tokens,
                query_len=batch.query_len,
                past_prompt=batch.past_prompt,
                steps=steps,
                graph=None if answer.entry is None else entries.index(answer.entry),
                reason=answer.reason if answer.entry is None else None,
                interval=own.step(batch).milliseconds * factor,
                intervals=steps,
                interval_error=0.001,
            )
        )
    target, *others = seen.roles
    return replace(seen, roles=(replace(target, batches=tuple(counts)), *others))


@given(traffics())
def test_law16_rows_add_up_to_the_mean_step(traffic: Traffic) -> None:
    """By share, over the target's rows; each has its part of the load, and no two of one mode are about one graph."""
    steps = steps_of(traffic, SPEC).counts
    promise = promise_of(SMALL[1], LARGE[1], steps)
    assert promise.steps == sum(steps.values())
    for side, own in ((promise.before, SMALL[1]), (promise.after, LARGE[1])):
        assert len(side.rows) <= MAX_PROMISED
        mean = sum(own.step(batch).milliseconds * count for batch, count in steps.items()) / promise.steps
        target = [row for row in side.rows if row.role is Role.TARGET]
        assert math.isclose(side.mean_step_ms, mean, rel_tol=1e-5)
        assert math.isclose(sum(row.milliseconds * row.share for row in target), mean, rel_tol=1e-4)
        assert math.isclose(sum(row.share for row in target), 1.0, rel_tol=1e-4)
        assert 0 < side.error_ms < mean


@pytest.mark.parametrize("mode", [GraphMode.PIECEWISE, GraphMode.FULL_AND_PIECEWISE])
def test_error_of_a_mean_has_that_of_each_overhead(mode: GraphMode) -> None:
    """By how the target ran, as profiles have it: a PIECEWISE graph has no query length, whatever runs on it."""
    made = plan(replace(SPEC, mode=mode, sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=(64,))), H200, BACKENDS)
    ways = ((GraphMode.PIECEWISE, None), (GraphMode.FULL, 3), (GraphMode.NONE, 3))
    overheads = [Overhead(mode=way, query_len=width, milliseconds=0.5, error=0.4, steps=9) for way, width in ways]
    costs = replace(profile(SPEC.active_roles, speculative=SPEC.speculative, spread=0.0), overheads=tuple(overheads))
    own = Pricing(emulation_of(made), Costs(costs))
    steps = {Batch.decode(Role.TARGET, number, 3): 100 for number in range(1, 65)}
    for side in (promise_of(own, own, steps).before, promise_of(own, own, steps).after):
        assert side.error_ms == pytest.approx(0.4)


@given(st.data())
def test_promises_of_many_kinds_have_no_more_rows_than_one_may(data: st.DataObject) -> None:
    """Of 255 drafts, each length and mode may have a row of its own, which no other can be merged with."""
    kinds = st.tuples(st.integers(1, 256), st.sampled_from((GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)))
    number = MAX_PROMISED + data.draw(st.integers(1, 20))
    found = data.draw(st.lists(kinds, min_size=number, max_size=number, unique=data.draw(st.booleans())))
    rows = [
        PromisedSteps(
            role=Role.TARGET, query_len=query_len, first=1, last=1, mode=mode, milliseconds=1, share=(at + 1) / 4e4
        )
        for at, (query_len, mode) in enumerate(found)
    ]
    merged = judgement._merged(rows)
    assert len(merged) == MAX_PROMISED
    assert all(row.share > 0 for row in merged)


@given(traffics(), st.sampled_from((0.9, 1.0, 1.05, 1.5)))
def test_law16_steps_that_take_what_was_promised_keep_it(traffic: Traffic, factor: float) -> None:
    """For the load that it was made by, within its rounding; half more breaks it."""
    promise = promise_of(SMALL[1], LARGE[1], steps_of(traffic, SPEC).counts)
    checked = check_promise(promise, observed(*LARGE, traffic, factor), observed(*SMALL, traffic, 1.0))
    assert checked.after is not None
    assert checked.before is not None
    assert checked.after.off == pytest.approx(factor - 1, abs=0.05)
    assert checked.before.off == pytest.approx(0, abs=0.05)
    if factor == 1.5:
        assert checked.verdict is PromiseVerdict.BROKEN
    elif promise.gain > 0.2:
        assert checked.verdict is PromiseVerdict.KEPT


def test_promise_is_a_part_of_the_plan_alone() -> None:
    """A plan without one has the digest that it had before there were promises; with one it has another."""
    traffic = Traffic(
        sources=("drawn",),
        batches=(TrafficCount(role=Role.TARGET, num_reqs=4, num_tokens=12, query_len=3, count=5000),),
    )
    made = LARGE[0]
    promise = promise_of(SMALL[1], LARGE[1], steps_of(traffic, SPEC).counts)
    with_promise = replace(made, promise=promise)
    assert with_promise.promise is not None
    assert digest(with_promise) != digest(made)
    assert digest(replace(with_promise, promise=None)) == digest(made)
