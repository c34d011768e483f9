"""Lazy capture: what is captured between steps changes no token and no page, within its budget."""

from collections import Counter

import attrs
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from capture_planner.analysis.coverage import coverage
from capture_planner.analysis.data_parallel import agree
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import CaptureError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.spec import CapturePolicy, CaptureTiming
from capture_planner.testing import arbitrary_plans
from capture_planner_runner.capture.variants import all_at_start, at_start, without_graphs
from capture_planner_runner.execution.role import ForwardObserver
from capture_planner_runner.graphs.reading import Reading
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.steps import vectors_of
from support.rank_threads import on_ranks, replicas_of
from support.worlds import bits, caches_of, requests_of, serve, worlds

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = settings(max_examples=max(settings.default.max_examples // 2, 3))
FEW = settings(max_examples=max(settings.default.max_examples // 5, 2))
GRAPHS = worlds([mode for mode in GraphMode if mode is not GraphMode.NONE])
AMPLE = CaptureTiming(policy=CapturePolicy.LAZY, memory=1 << 40, seconds_per_minute=1e9)
SEEDS = st.integers(0, 1 << 16)


@st.composite
def lazy_worlds(draw, capture=AMPLE, chosen=None):
    """Any world, with any of its graphs on first use, or with those that are chosen in turn."""
    world = draw(GRAPHS)
    chosen = chosen or draw(st.lists(st.booleans(), min_size=1, max_size=12))
    roles = [
        replace(role, lazy=tuple(entry for number, entry in enumerate(role.entries) if chosen[number % len(chosen)]))
        for role in world.plan.roles
    ]
    return attrs.evolve(world, plan=replace(world.plan, capture=capture, roles=tuple(roles)))


def late(runner):
    """What was tried on first use, in order."""
    return [done for done in runner.session.captured if done.step is not None]


def ran(runner, first):
    """What served each forward from one of them on."""
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
            assert ("of capture.memory are left" if done.tried else "nothing of capture.memory") in done.waiver.message
    if seconds < 1:
        assert len(tried) <= 1
    if record is not None:
        assert record.taken == sum(done.memory for done in late(runner))
        assert record.asked + record.unused + len(tried) == world.plan.num_lazy
        assert (record.left > 0) == (seconds > 1 or not tried)
        event(f"left out: {any(done.waiver for done in late(runner))}")


class Hoarding(RecordedGraphs):
    """A grapher that keeps what it captured, as a CUDA pool keeps the segments of a refused graph, and counts it."""

    def __init__(self, hoards):
        self.hoards, self.graphs, self.calls = hoards, [], 0

    def capture(self, forward, pool):
        self.calls += 1
        graph = super().capture(forward, pool)
        if self.hoards:
            self.graphs.append(graph)
        return graph


def pool_bytes(runner):
    """Bytes that the pools of all roles hold."""
    return sum(pool.memory for pool in {id(run.graphs.pool): run.graphs.pool for run in runner.roles.values()}.values())


@HALF
@given(st.data(), st.sampled_from((0, 1, 1 << 10, 1 << 14, 1 << 16)) | st.integers(0, 1 << 18), SEEDS, st.booleans())
def test_memory_is_passed_by_one_attempt_at_most_and_nothing_is_tried_after_it(data, memory, seed, hoards):
    """What a refused graph added is given back, where the pool can; what it cannot give back ends the attempts."""
    world = data.draw(lazy_worlds(replace(AMPLE, memory=memory), chosen=[True]))
    grapher = Hoarding(hoards)
    with Runner(world.plan, world.target, world.drafter, world.registry, grapher, pages=world.pages) as runner:
        runner.capture()
        at_start_, held = grapher.calls, pool_bytes(runner)
        for number in range(2):
            serve(runner, requests_of(world, seed + number))
        record = runner.lazy
        assert pool_bytes(runner) == held + sum(done.memory for done in late(runner))
    taken, largest = 0, 0
    for done in late(runner):
        assert done.tried == (taken < memory)
        assert done.tried or (done.memory, done.waiver.reason) == (0, Reason.MEMORY)
        taken, largest = taken + done.memory, max(largest, done.memory)
    assert grapher.calls - at_start_ == sum(done.tried for done in late(runner))
    assert taken <= memory + (largest if hoards else 0)
    if record is not None:
        assert (record.taken, record.untried) == (taken, sum(not done.tried for done in late(runner)))
        event(f"not tried: {record.untried > 0}, refused: {any(done.waiver and done.tried for done in late(runner))}")


def never_due(runner):
    """What a runner asks for, which is then only counted."""
    first_use = runner.first_use()
    if first_use is not None:
        first_use.is_due = lambda: False
    return first_use


def wanted(batch, forwards, plan):
    """The graph that would have served forwards of a batch better, by role, as often."""
    best, now = (Dispatcher(each).dispatch(batch).entry for each in (plan, at_start(plan)))
    return Counter() if best == now else Counter({(batch.role, best): forwards})


@HALF
@given(lazy_worlds(chosen=[True]), SEEDS, st.booleans(), st.booleans())
def test_each_forward_that_runs_asks_once(world, seed, ahead, on_device):
    """A step that is scheduled anew, or only looked up, asks for nothing."""
    with world.runner(options=Options(run_ahead=ahead, drafts_on_device=on_device)) as runner:
        runner.capture()
        first_use = never_due(runner)
        serve(runner, requests_of(world, seed))
    expected = Counter()
    for done in runner.session.forwards:
        batch = Batch(
            role=done.role,
            num_reqs=done.num_reqs,
            num_tokens=done.num_tokens,
            query_len=done.query_len,
            past_prompt=done.query_len is not None or done.max_query_len is not None,
            max_query_len=done.max_query_len,
        )
        expected += wanted(batch, done.repeats, world.plan)
    if first_use is not None:
        assert first_use._requested == expected
        event(f"asked: {min(expected.total(), 3)}")


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
        graphs = {role: dict(run.graphs) for role, run in runner.roles.items()}
        grapher.error = error
        tokens = [serve(runner, requests) for _ in range(2)]
        assert {role: dict(run.graphs) for role, run in runner.roles.items()} == graphs
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


class Leaking(Failing):
    """A device on which each capture that breaks leaves a byte, and nothing else takes any."""

    lost = 0

    def reading(self):
        return Reading(used=self.lost, held=self.lost)

    def capture(self, forward, pool):
        self.lost += self.error is not None
        return super().capture(forward, pool)


@FEW
@given(lazy_worlds(chosen=[True]), SEEDS, st.integers(1, 4))
def test_what_a_broken_capture_leaves_on_a_device_counts(world, seed, memory):
    """Against the budget, until nothing of it is left."""
    plan, grapher = replace(world.plan, capture=replace(AMPLE, memory=memory)), Leaking()
    with Runner(plan, world.target, world.drafter, world.registry, grapher, pages=world.pages) as runner:
        runner.capture()
        grapher.error = CaptureError("odd")
        serve(runner, requests_of(world, seed))
        record = runner.lazy
    tried = [done for done in late(runner) if done.tried]
    assert [(done.taken, done.memory) for done in tried] == [(1, 1)] * len(tried)
    assert len(tried) == min(memory, len(late(runner)))
    assert record is None or record.taken == len(tried)


@FEW
@given(GRAPHS, st.integers(2, 3), SEEDS, st.booleans())
def test_replicas_ask_for_the_graphs_of_their_joint_batches_once_a_step(world, size, seed, ahead):
    """All alike, those without requests too, also where the same batches come again."""
    each = replicas_of(attrs.evolve(world, spec=replace(world.spec, capture=AMPLE)), size)
    requests = requests_of(world, seed)[: size + 2]

    def work(peers):
        mine = each[peers.place.rank]
        parts = mine.plan, mine.target, mine.drafter, mine.registry, RecordedGraphs()
        with Runner(*parts, pages=mine.pages, peers=peers, options=Options(run_ahead=ahead)) as runner:
            runner.capture()
            first_use = never_due(runner)
            runner.serve(requests[peers.place.data :: size])
        return runner, first_use

    found = on_ranks(size, work)
    assert all(not isinstance(one, Exception) for one in found), found
    runner, first_use = found[0]
    assume(first_use is not None)
    assert all(other._requested == first_use._requested for _, other in found)
    plan, expected = runner.plan, Counter()
    for step in runner.session.rank_steps:
        joint = agree(first_use, vectors_of([role.role for role in plan.roles], step.numbers)[Role.TARGET]).joint
        expected += wanted(joint, 1, plan)
    assert {item: count for item, count in first_use._requested.items() if item[0] is Role.TARGET} == expected
    event(f"asked: {min(expected.total(), 3)}")


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

        def forward(self, role, step):
            if self.runner is not None and role.role is Role.TARGET:
                self.plans.append(self.runner.dispatcher.plan)
            return super().forward(role, step)

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
