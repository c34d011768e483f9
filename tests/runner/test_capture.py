"""Capture: its order, its memory, and what happens where memory does not suffice."""

import math
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from capture_planner.analysis.lint import Severity, lint
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Pool, Reason, Refresh
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.spec import Policy, Sizes
from capture_planner_runner.capture.variants import as_captured, without_graphs, without_speculation
from capture_planner_runner.graphs.reading import Reading
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.ledger.rows import Accounts
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from support.probe import Probe
from support.worlds import requests_of, serve, spec_of, world_of, worlds

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 5, 3))
GRAPHS = [mode for mode in GraphMode if mode is not GraphMode.NONE]


def captured(world, **options):
    """Capture a world; return its runner, which has been left."""
    with world.runner(options=Options(**options)) as runner:
        runner.capture()
    return runner


@FEW
@given(worlds())
def test_piecewise_comes_first_and_each_kind_largest_first_over_all_roles(world):
    """Every entry once, in one order for all roles together; progress tells each as it is done."""
    told = []
    with world.runner() as runner:
        runner.capture(progress=told.append)
    order = runner.session.captured
    assert told == order
    assert Counter((done.role, done.entry) for done in order) == Counter(
        (role.role, entry) for role in world.plan.roles for entry in role.entries
    )
    modes = [done.entry.mode for done in order]
    assert modes == sorted(modes, key=lambda mode: mode is GraphMode.FULL)
    for mode in set(modes):
        tokens = [done.entry.num_tokens for done in order if done.entry.mode is mode]
        assert tokens == sorted(tokens, reverse=True)


@FEW
@given(worlds(GRAPHS), st.sampled_from(Refresh))
def test_each_forward_runs_twice_with_metadata_made_anew(world, refresh):
    """Once to warm up and once to be captured: prepared each time, then attended to by every layer."""
    heard = defaultdict(list)

    def listen(call, reservation, metadata):
        if metadata is not None:
            heard[reservation.role, metadata.entry].append((call, metadata))

    probe = Probe(listen, refresh=refresh)
    runner = captured(
        world_of(replace(world.spec, backend="probe"), registry=registry.load_backends(probe), page_size=4)
    )
    layers = {role: world.drafter.num_layers if role.is_drafter else world.target.num_layers for role in runner.roles}
    work = {(role.role, entry) for role in runner.plan.roles for entry in role.entries}
    assert set(heard) == work
    for (role, entry), calls in heard.items():
        once = ["prepare"] + ["attend"] * layers[role] * (entry.draft_steps or 1)
        assert [call for call, _ in calls] == once * 2
        warm, again = calls[: len(once)], calls[len(once) :]
        assert len({id(metadata) for _, metadata in warm}) == len({id(metadata) for _, metadata in again}) == 1
        assert warm[0][1] is not again[0][1]
        fields = [{name: t.data_ptr() for name, t in part[0][1].fields.items()} for part in (warm, again)]
        assert fields[0] == fields[1]


@given(worlds(GRAPHS))
def test_a_warm_up_batch_fills_its_entry_and_owns_nothing(world):
    """As many tokens as the entry has, a token for each request, all of it in the null page."""
    runner = world.runner()
    for role in runner.roles.values():
        for entry in role.plan.entries:
            inputs = role.warm_up_inputs(entry)
            counts = inputs.query_start_loc[1:] - inputs.query_start_loc[:-1]
            assert (counts >= 1).all()
            assert len(counts) <= world.plan.limits.max_num_reqs
            if entry.query_len is not None:
                assert (counts == entry.query_len).all()
            real = counts.sum()
            assert real == len(inputs.input_ids) == len(inputs.positions) <= entry.num_tokens
            # More tokens than the model is long, times the requests, are not a batch; they still fit.
            assert real == entry.num_tokens or len(counts) == world.plan.limits.max_num_reqs
            assert not inputs.slot_mapping.any()
            assert not inputs.block_table.any()
            # Lists of pages are made from lengths and table, so every page of a length is in the table.
            assert inputs.block_table.shape[1] * role.page_size >= inputs.seq_lens.max()
            assert (inputs.seq_lens <= world.plan.model.max_model_len).all()
            assert (inputs.positions < world.plan.model.max_model_len).all()


def chunks(pool):
    """The memory of a pool, as ranges of addresses."""
    return [(chunk.data_ptr(), chunk.data_ptr() + chunk.nbytes()) for chunk in pool._chunks]


@FEW
@given(worlds(GRAPHS))
def test_one_pool_needs_no_more_than_one_for_each_role(world):
    """A pool for each role overlaps with no other, and the shared one holds no more than all of them."""
    held = {}
    for kind in Pool:
        with world_of(replace(world.spec, pool=kind), page_size=world.pages.page_size).runner() as runner:
            runner.capture()
            pools = {id(role.graphs.pool): role.graphs.pool for role in runner.roles.values()}
            assert len(pools) == (1 if kind is Pool.SHARED else len(runner.roles))
            held[kind] = sum(pool.memory for pool in pools.values())
            assert held[kind] == sum(done.memory for done in runner.session.captured)
            ranges = sorted(piece for pool in pools.values() for piece in chunks(pool))
            assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
            assert all(done.memory <= done.alone for done in runner.session.captured)
    assert held[Pool.SHARED] <= held[Pool.PER_ROLE]


class Device(RecordedGraphs):
    """Recorded graphs on a device that is made up: what it loses at each reading is drawn and known.

    A reading is before a warm-up, before a capture or after it, in turn.
    """

    def __init__(self, random):
        self.random, self.pools, self.lost, self.turns = random, [], defaultdict(list), 0

    def pool(self, limit=None):
        self.pools.append(super().pool(limit))
        return self.pools[-1]

    def reading(self):
        names = (("others", "freed"), ("warm-up", "modules"), ("driver",))[self.turns % 3]
        self.turns += 1
        for name in names:
            self.lost[name].append(self.random.randint(-20, 400) if self.random.random() < 0.5 else 0)
        held = sum(sum(self.lost[name]) for name in ("warm-up", "freed")) + sum(pool.memory for pool in self.pools)
        beside = sum(sum(self.lost[name]) for name in ("others", "modules", "driver"))
        return Reading(used=(1 << 30) + held + beside, held=held)


@FEW
@given(worlds(GRAPHS), st.floats(0, 2), st.randoms(use_true_random=False))
def test_the_ledger_finds_what_each_capture_took(world, share, random):
    """By graph, by role and in all: pools, driver, warm-ups and modules; the rest is not explained.

    Also where a pool is too small for some graphs.
    """
    needed = max(role.graphs.pool.memory for role in captured(world).roles.values())
    device = Device(random)
    drafter = None if world.plan.speculative is None else world.drafter
    runner = Runner(world.plan, world.target, drafter, world.registry, device, pages=world.pages)
    with runner:
        runner.capture(memory=math.floor(share * needed))
    done, lost = runner.session.captured, device.lost
    assert [graph.driver for graph in done] == lost["driver"]
    taken = Counter()
    for graph in done:
        taken[graph.role] += graph.memory
    for role in runner.roles.values():
        if world.plan.pool is Pool.PER_ROLE:
            assert taken[role.role] == role.graphs.pool.memory
        else:
            assert taken.total() == role.graphs.pool.memory
    accounts = Accounts.of(done)
    assert (accounts is None) == (not done)
    assume(accounts is not None)
    assert accounts.graphs + accounts.dropped == sum(pool.memory for pool in device.pools)
    assert accounts.dropped == 0
    assert accounts.driver == sum(lost["driver"])
    assert accounts.warm_up == sum(lost["warm-up"]) + sum(lost["freed"][1:])
    assert accounts.modules == sum(lost["modules"])
    assert accounts.unexplained == sum(lost["others"][1:])
    assert accounts.device == accounts.explained + accounts.unexplained


def test_a_host_is_not_read():
    """Recorded graphs take their pool alone: no driver, and nothing to add up."""
    (done, *_) = captured(world_of(spec_of(k=0))).session.captured
    assert (done.readings, done.driver) == (None, 0)
    assert Accounts.of([done]) is None


@FEW
@given(worlds(GRAPHS), st.floats(0, 1), st.integers(0, 99))
def test_what_does_not_fit_is_waived_and_the_rest_serves_the_same(world, share, seed):
    """Every batch has a graph that was captured, or an answer that a waiver gives; tokens stay the same."""
    requests = requests_of(world, seed)
    with world.runner(without_speculation(world.plan, world.registry)) as runner:
        expected = serve(runner, requests)
    needed = max(role.graphs.pool.memory for role in captured(world).roles.values())
    limit = math.floor(share * needed)
    with world.runner() as runner:
        runner.capture(memory=limit)
        assert serve(runner, requests) == expected
        assert all(role.graphs.pool.memory <= limit for role in runner.roles.values())
    lost = {(done.role, done.entry): done.waiver for done in runner.session.captured if done.waiver}
    event(f"{'none' if not lost else 'all' if len(lost) == world.plan.num_graphs else 'some'} lost")
    assert len(runner.session.captured) == world.plan.num_graphs
    for (role, entry), waiver in lost.items():
        assert waiver.reason is Reason.MEMORY
        assert str(entry) in waiver.message
        assert entry not in runner.roles[role].graphs
    before, after = Dispatcher(world.plan), runner.dispatcher
    assert after.plan == as_captured(world.plan, runner.session.captured)
    assert not [f for f in lint(after.plan) if f.rule.severity is Severity.ERROR and f.rule.code == "CP001"]
    for batch in every_batch(world.plan):
        then, now = before.dispatch_counts(*batch), after.dispatch_counts(*batch)
        assert (batch[0], now.entry) not in lost
        if (batch[0], then.entry) not in lost:
            assert now == then
        elif now.entry is not None:
            assert now.entry.cost > then.entry.cost
        elif now.waiver in world.plan.role(batch[0]).waivers:
            # A decode's graph also served a batch that the schedule never makes, and the plan leaves eager.
            assert now.waiver.kind is Kind.MIXED, (batch, now)
        else:
            assert now.reason in (Reason.MEMORY, Reason.NOT_ADMISSIBLE), (batch, now)


def every_batch(plan):
    """Every shape of batch that fits the limits, uniform and not, in a prompt and past it."""
    for role in plan.roles:
        for num_reqs in range(1, plan.limits.max_num_reqs + 1):
            for num_tokens in range(num_reqs, plan.limits.max_num_tokens + 1):
                query_len = num_tokens // num_reqs if num_tokens % num_reqs == 0 else None
                for past_prompt in (True, False):
                    yield role.role, num_reqs, num_tokens, query_len, past_prompt


@FEW
@given(worlds(GRAPHS))
def test_strict_stops_at_the_first_that_does_not_fit(world):
    """With the role and the entry; none of that is left out."""
    first = world.runner().plan
    role, entry = min(
        ((role.role, entry) for role in first.roles for entry in role.entries),
        key=lambda item: item[1].capture_order,
        default=(None, None),
    )
    with world.runner(options=Options(strict=True)) as runner:
        if role is None:
            runner.capture(memory=0)
        else:
            with pytest.raises(RunError) as caught:
                runner.capture(memory=0)
            assert str(caught.value).startswith(f"{role.value}: {entry} does not fit into memory: ")
            assert runner.session.captured == []


SIZES = Sizes(policy=Policy.EXPLICIT, num_tokens=(4, 8, 16), num_reqs=(1, 2, 3))


def test_batches_of_a_lost_graph_take_the_next():
    """A middle size that is lost is served by the next larger one; the largest, by nothing."""
    world = world_of(spec_of(k=0, mode=GraphMode.FULL, sizes=SIZES))
    (role,) = captured(world).plan.roles
    largest, middle, _ = (entry for entry in role.entries if entry.query_len is None)
    for lost, answer in ((middle, largest), (largest, None)):
        plan = replace(world.plan, roles=(replace(role, entries=tuple(e for e in role.entries if e != lost)),))
        assert Dispatcher(plan).dispatch_counts("target", 2, lost.num_tokens, None, False).entry == answer


def test_eager_runs_capture_nothing():
    """A plan without graphs: every batch is waived, and none is uncovered."""
    world = world_of(spec_of(k=2))
    plan = without_graphs(world.plan)
    with world.runner(plan) as runner:
        runner.capture()
        assert runner.session.captured == []
    dispatcher = Dispatcher(plan)
    assert {dispatcher.dispatch_counts(*batch).reason for batch in every_batch(plan)} <= {
        Reason.MODE,
        Reason.NOT_ADMISSIBLE,
    }


def test_before_capture_everything_runs_eager():
    """Requests can be served at once; no graph is asked for."""
    world = world_of(spec_of(k=2))
    with world.runner() as runner:
        serve(runner, requests_of(world, 0))
    assert {forward.mode for forward in runner.session.forwards} == {GraphMode.NONE}
