"""Lazy capture: what is captured between steps changes no token and no page, within its budget."""

from collections import Counter

import attrs
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from capture_planner.analysis.coverage import coverage
from capture_planner.analysis.data_parallel import agree
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import CaptureError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.capture import CapturePolicy, CaptureTiming
from capture_planner.runtime.execution.role import ForwardObserver
from capture_planner.runtime.first_use import MINUTE, TokenBucket
from capture_planner.runtime.graphs.recorded import RecordedGraphs
from capture_planner.runtime.options import Options
from capture_planner.runtime.plan_variants import all_at_start, at_start, without_graphs
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.agreement import vectors_of
from capture_planner.testing import arbitrary_plans
from support.rank_threads import on_ranks, replicas_of
from support.worlds import bits, caches_of, requests_of, serve, worlds

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 5, 3))
GRAPHS = worlds([mode for mode in GraphMode if mode is not GraphMode.NONE])
AMPLE = CaptureTiming(policy=CapturePolicy.LAZY, memory=1 << 40, seconds_per_minute=1e9)
SEEDS = st.integers(0, 1 << 16)


@st.composite
def lazy_worlds(draw, capture=AMPLE):
    """Any world, with any of its graphs on first use."""
    world = draw(GRAPHS)
    chosen = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    roles = [
        replace(role, lazy=tuple(entry for number, entry in enumerate(role.entries) if chosen[number % len(chosen)]))
        for role in world.plan.roles
    ]
    return attrs.evolve(world, plan=replace(world.plan, capture=capture, roles=tuple(roles)))


def late(runner):
    """What was tried on first use, in order."""
    return [done for done in runner.session.captured if done.step is not None]


def ran(runner, first):
    """What served each forward from one of them on: role, entry and reason."""
    return [(each.role, each.entry, each.reason) for each in runner.session.forwards[first:]]


@FEW
@given(lazy_worlds(), SEEDS, st.booleans(), st.booleans(), st.booleans())
def test_tokens_are_those_of_eager_runs_and_the_second_time_the_same_graphs_serve(
    world, seed, ahead, on_device, poison
):
    """As if all had been captured at start: what the first run asked for is there, and nothing is captured again."""
    requests = requests_of(world, seed)
    options = Options(run_ahead=ahead, drafts_on_device=on_device, poison=poison)
    found = []
    for plan in (without_graphs(world.plan), all_at_start(world.plan), world.plan):
        with world.runner(plan, options=options) as runner:
            runner.capture()
            at_start_ = len(runner.session.captured)
            tokens = [serve(runner, requests)]
            steps = len(runner.session.forwards)
            tokens.append(serve(runner, requests))
            found.append((tokens, ran(runner, steps)))
            assert len(runner.session.captured) == at_start_ + len(late(runner))
    (eager, _), (expected, graphs), (tokens, lazily) = found
    assert tokens == expected == eager
    assert lazily == graphs
    asked = [(done.role, done.entry) for done in late(runner)]
    assert len(asked) == len(set(asked))
    assert not any(done.waiver for done in late(runner))
    event(f"captured on first use: {min(len(asked), 3)}")


@FEW
@given(lazy_worlds(), SEEDS, st.booleans())
def test_a_capture_between_steps_writes_null_pages_alone(world, seed, ahead):
    """Pages of requests, and what is known of them, drafts to verify included, are bit by bit what they were."""
    captures = 0

    def kept(runner):
        pages = [bits(cache[runner.pages.page_size :]) for cache in caches_of(runner).values()]
        return pages, [array.tobytes() for array in vars(runner._started.states).values() if hasattr(array, "tobytes")]

    with world.runner(options=Options(run_ahead=ahead)) as runner:
        runner.capture()
        runner.start().cut_off()
        if runner._first_use is not None:
            capture = runner._first_use.capture

            def watched():
                nonlocal captures
                captures += 1
                before = kept(runner)
                capture()
                assert kept(runner) == before

            runner._first_use.capture = watched
        serve(runner, requests_of(world, seed))
    assert bool(captures) == bool(late(runner))


@FEW
@given(st.data(), SEEDS)
def test_a_budget_bounds_what_is_captured_and_a_graph_is_tried_once(data, seed):
    """What does not fit has its reason; no capture starts while the seconds are overdrawn."""
    memory, seconds = data.draw(st.sampled_from(((0, 1e9), (1 << 12, 1e9), (1 << 14, 1e9), (1 << 40, 1e-9))))
    capture = CaptureTiming(policy=CapturePolicy.LAZY, memory=memory, seconds_per_minute=seconds)
    world = data.draw(lazy_worlds(capture))
    requests = requests_of(world, seed)
    with world.runner(all_at_start(world.plan)) as runner:
        runner.capture()
        expected = serve(runner, requests)
    with world.runner() as runner:
        runner.capture()
        assert [serve(runner, requests) for _ in range(2)] == [expected] * 2
        record = runner.lazy
    tried = [(done.role, done.entry) for done in late(runner)]
    assert len(tried) == len(set(tried))
    assert sum(done.memory for done in late(runner) if done.waiver is None) <= memory
    for done in late(runner):
        if done.waiver is not None:
            assert "of capture.memory are left" in done.waiver.message
    if seconds < 1:
        assert len(tried) <= 1
    if record is not None:
        assert record.taken == sum(done.memory for done in late(runner))
        assert record.asked + record.unused + len(tried) == world.plan.num_lazy
        assert (record.left > 0) == (seconds > 1 or not tried)
        event(f"left out: {any(done.waiver for done in late(runner))}")


class Failing(RecordedGraphs):
    """A grapher that captures nothing once it is told so."""

    error = None

    def capture(self, forward, pool):
        if self.error is not None:
            raise self.error
        return super().capture(forward, pool)


@FEW
@given(lazy_worlds(), SEEDS, st.sampled_from((CaptureError("odd"), ValueError("odd"), torch.OutOfMemoryError("odd"))))
def test_a_graph_that_cannot_be_captured_is_left_out_with_the_reason_and_the_others_stay(world, seed, error):
    """It is asked for no more; what it served before is served as before."""
    requests, grapher = requests_of(world, seed), Failing()
    with Runner(world.plan, world.target, world.drafter, world.registry, grapher, pages=world.pages) as runner:
        runner.capture()
        graphs = {role: dict(run.graphs) for role, run in runner.parts.roles.items()}
        grapher.error = error
        tokens = [serve(runner, requests) for _ in range(2)]
        assert {role: dict(run.graphs) for role, run in runner.parts.roles.items()} == graphs
    with world.runner(without_graphs(world.plan)) as eager:
        assert tokens == [serve(eager, requests)] * 2
    tried = [(done.role, done.entry) for done in late(runner)]
    assert len(tried) == len(set(tried))
    for done in late(runner):
        assert "odd" in done.waiver.message
        assert done.waiver.reason is (Reason.MEMORY if isinstance(error, torch.OutOfMemoryError) else Reason.LAZY)


def check_by_others(runner, plans):
    """What other replicas made a rank run is counted by what was captured in that step, not by what was at the end."""
    for plan, step in zip(plans, runner.session.rank_steps, strict=True):
        dispatcher, found = Dispatcher(plan), Counter()
        for vector in vectors_of([role.role for role in plan.roles], step.numbers).values():
            mine, entry = vector.ranks[runner.peers.place.data].batch, agree(dispatcher, vector).entry
            if mine is not None and dispatcher.dispatch(mine).entry != entry:
                found["eager" if entry is None else "larger"] += 1
        assert (step.eager_by_others, step.larger_by_others) == (found["eager"], found["larger"])


@FEW
@given(GRAPHS, st.integers(2, 3), SEEDS, st.sampled_from((1e9, 1e-9)), st.booleans())
def test_ranks_capture_the_same_graphs_at_the_same_steps(world, size, seed, seconds, ahead):
    """Each has a clock of its own, and requests of its own; the first rank's clock counts."""
    capture = replace(AMPLE, seconds_per_minute=seconds)
    each = replicas_of(attrs.evolve(world, spec=replace(world.spec, capture=capture)), size)
    requests = requests_of(world, seed)[: size + 2]

    class PlanWatcher(ForwardObserver):
        """Keeps what was captured in each step that ran."""

        def __init__(self):
            self.runner, self.plans = None, []

        def forward(self, role, step, started):
            if self.runner is not None and role.role is Role.TARGET:
                self.plans.append(self.runner.dispatcher.plan)
            return super().forward(role, step, started)

    def work(peers):
        mine, watcher = each[peers.place.rank], PlanWatcher()
        with Runner(
            mine.plan,
            mine.target,
            mine.drafter,
            mine.registry,
            RecordedGraphs(),
            pages=mine.pages,
            peers=peers,
            observer=watcher,
            options=Options(run_ahead=ahead),
        ) as runner:
            runner.capture()
            watcher.runner = runner
            found = runner.serve(requests[peers.place.data :: size])
        check_by_others(runner, watcher.plans)
        return runner, {one.name: one.tokens for one in found}

    with world.runner(without_graphs(world.plan)) as alone:
        expected = {one.name: one.tokens for one in alone.serve(requests)}
    found = on_ranks(size, work)
    assert all(not isinstance(one, Exception) for one in found), found
    assert {name: tokens for _, answers in found for name, tokens in answers.items()} == expected
    captured = [[(done.role, done.entry) for done in late(runner)] for runner, _ in found]
    assert all(one == captured[0] for one in captured)
    assert seconds > 1 or len(captured[0]) <= 1
    event(f"captured on first use: {min(len(captured[0]), 3)}")


@given(arbitrary_plans())
def test_what_is_captured_at_start_covers_what_the_plan_covers(plan):
    """Law 1: what waits for its first use is eager with the reason, or served by a larger graph."""
    started = at_start(plan)
    lazy = {(role.role, entry) for role in plan.roles for entry in role.lazy}
    assert {(role.role, entry) for role in started.roles for entry in role.entries} == {
        (role.role, entry) for role in plan.roles for entry in role.entries
    } - lazy
    if coverage(plan).covered:
        assert coverage(started).covered
    if not lazy:
        assert started == plan


@given(st.floats(0.01, 60), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 30)), min_size=1, max_size=20))
def test_seconds_that_are_spent_are_those_that_came_back_a_minutes_worth_and_the_last(per_minute, moments):
    """Over any time: nothing is spent while it is overdrawn, so that a long spending is paid off first."""
    bucket, now, spent = TokenBucket.full(per_minute, 0.0), 0.0, []
    for wait, seconds in moments:
        now += wait
        bucket = bucket.at(now)
        if bucket.is_open:
            spent.append((now, seconds))
            bucket = bucket.less(seconds)
    for first, (since, _) in enumerate(spent):
        for last in range(first, len(spent)):
            until, longest = spent[last]
            allowed = per_minute + (until - since) * per_minute / MINUTE + longest
            assert sum(seconds for _, seconds in spent[first : last + 1]) <= allowed * (1 + 1e-9)
