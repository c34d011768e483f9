"""The capture session: nothing of it is replayed before its end, and nothing is left of one that breaks off."""

from __future__ import annotations

import ctypes
import itertools
import random

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capture_planner.errors import BackendError, GuardError
from capture_planner.modes import GraphMode
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner_runner.graphs import cuda
from capture_planner_runner.graphs.graph import Leftover, leftover, own_address
from capture_planner_runner.graphs.recorded import RecordedGraphs
from support.probe import Probe
from support.worlds import requests_of, spec_of, world_of, worlds

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 5, 3))
GRAPHS = [mode for mode in GraphMode if mode is not GraphMode.NONE]


def tokens(runner, requests):
    return {served.name: served.tokens for served in runner.serve(requests)}


def registered(runner):
    """The graphs that the roles and the dispatcher know, as many each."""
    return sum(len(role.graphs) for role in runner.roles.values()), runner.dispatcher.plan.num_graphs


@FEW
@given(worlds(GRAPHS), st.integers(1, 12), st.sampled_from(("prepare", "attend")))
def test_error_in_a_session_names_its_entry_and_leaves_no_graph(world, number, call):
    """Whichever call of a backend breaks: everything runs eager after it, and a second session is right."""
    calls = itertools.count(1)
    asked = []

    def break_off(name, reservation, metadata):
        if name == call and next(calls) == number:
            asked.append((reservation.role, metadata.entry))
            raise RuntimeError("out of luck")

    probe = Probe(break_off)
    world = world_of(
        replace(world.spec, backend="probe"), registry=registry.load_backends(probe), page_size=world.pages.page_size
    )
    with world.runner() as runner:
        try:
            runner.capture()
        except BackendError as error:
            raised = error
        else:
            raised = None
        assume(asked)
        ((role, entry),) = asked
        assert raised is not None
        assert role.value in str(raised)
        assert str(entry) in str(raised)
        assert registered(runner) == (0, 0)
        requests = requests_of(world, 0)
        eager = tokens(runner, requests)
        assert {forward.mode for forward in runner.session.forwards} == {GraphMode.NONE}
        runner.capture()
        assert registered(runner) == (world.plan.num_graphs, world.plan.num_graphs)
        assert [(done.role, done.entry) for done in runner.session.captured] == list(
            dict.fromkeys((done.role, done.entry) for done in runner.session.captured)
        )
        assert tokens(runner, requests) == eager


@FEW
@given(worlds(GRAPHS), st.integers(0, 1 << 16))
def test_any_order_of_captures_serves_the_same(world, seed):
    """The order decides how much memory graphs take, and nothing else."""
    requests, given_order = requests_of(world, 0), []
    with world.runner() as runner:
        runner.capture()
        expected = tokens(runner, requests)
    with world.runner() as runner:

        def shuffled(work):
            given_order[:] = random.Random(seed).sample(work, len(work))
            return given_order

        runner.capture(order=shuffled)
        assert [(done.role, done.entry) for done in runner.session.captured] == [
            (role.role, entry) for role, entry in given_order
        ]
        assert tokens(runner, requests) == expected


def test_nothing_is_replayed_inside_a_session():
    """A graph of the session is refused until it has ended."""
    world = world_of(spec_of(k=2, mode=GraphMode.FULL_AND_PIECEWISE))
    with world.runner() as runner:
        refused = []

        def replay(done):
            role, entry = runner.roles[done.role], done.entry
            inputs = role.warm_up_inputs(entry)
            batch = Batch(role=done.role, num_reqs=inputs.num_reqs, num_tokens=inputs.num_tokens)
            step = role.step(batch, entry, inputs)
            role.stage_inputs(step)
            role.prepare_backends(step)
            with pytest.raises(GuardError, match="has no graph"):
                role.replay_or_run(step, 0.0)
            refused.append(entry)

        runner.capture(progress=replay)
        assert len(refused) == world.plan.num_graphs
        assert registered(runner) == (world.plan.num_graphs, world.plan.num_graphs)


def test_interrupted_session_leaves_no_graph():
    """Also where what watches it raises."""
    world = world_of(spec_of(k=2, mode=GraphMode.FULL))
    with world.runner() as runner:

        def interrupt(done):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            runner.capture(progress=interrupt)
        assert registered(runner) == (0, 0)


def test_tensors_that_outlive_a_capture_are_counted():
    """Those that the graph made: not what was there before, what is gone, or what a piece is handed."""
    graphs, pool, x, out = RecordedGraphs(), RecordedGraphs().pool(), torch.ones(8), torch.zeros(8)
    kept = []

    def forward(keep):
        y = x * 2
        keep.append(y[:2])
        z = y.reshape(2, 4)[:1]
        graphs.split(lambda rows, target: target.copy_(rows.flatten()), reads=(z,), writes=(out[:4],))
        out.copy_(y)

    assert graphs.capture(lambda: forward([]), pool).leftover.size == 0
    assert graphs.capture(lambda: forward(kept), pool).leftover.size == 0  # of y, a piece reads a part
    assert graphs.capture(lambda: kept.append(x * 3), pool).leftover.size == x.nbytes

    def cycle():
        loop = [x * 4]
        loop.append(loop)
        out.copy_(loop[0])

    assert graphs.capture(cycle, pool).leftover.size == 0


@attrs.frozen
class Arguments:
    """What a kernel is called with."""

    query: torch.Tensor


@pytest.mark.parametrize("hold", [lambda y: y, lambda y: (y, [y]), Arguments], ids=["tensor", "list", "arguments"])
def test_frames_that_an_exception_keeps_are_no_leftover(hold):
    """As a library keeps the ImportError of its first use, with the frames of all callers."""
    graphs, pool, x, out = RecordedGraphs(), RecordedGraphs().pool(), torch.ones(8), torch.zeros(8)
    errors = []

    def library():
        try:
            raise ImportError("an optional module is missing")
        except ImportError as error:
            errors.append(error)

    def forward(deep):
        y = hold(x * 2)
        forward(deep - 1) if deep else library()
        assert y is not None
        out.copy_(x)

    assert graphs.capture(lambda: forward(3), pool).leftover.size == 0
    assert str(errors[0]) == "an optional module is missing"


def test_leftover_names_what_holds_it():
    """An attribute, also through containers; a generator that can go on."""
    graphs, pool, x, out = RecordedGraphs(), RecordedGraphs().pool(), torch.ones(8), torch.zeros(8)

    class Backend:
        pass

    backend = Backend()

    def forward():
        backend.workspace = x * 2
        backend.cache = {"first": [x * 3]}
        out.copy_(backend.workspace)

    left = graphs.capture(forward, pool).leftover
    assert left.size == 2 * x.nbytes
    assert left.holders == ("Backend.cache", "Backend.workspace")

    def steps():
        y = x * 4
        yield
        out.copy_(y)

    backend.steps = steps()
    left = graphs.capture(lambda: next(backend.steps), pool).leftover
    assert (left.size, left.holders) == (x.nbytes, ("steps",))
    assert next(backend.steps, None) is None


def test_block_that_is_freed_meanwhile_is_new_the_next_time(monkeypatch):
    """As what frames held: another tensor may then have its address, and must be asked about."""
    owned, asked = {64: 4096}, []

    def snapshot():
        blocks = [{"state": "active_allocated", "size": owned[64]}] if owned else []
        return [{"segment_pool_id": (0, 1), "address": 64, "total_size": 4096, "blocks": blocks}]

    def leftover(sizes, key_of, device):
        asked.append(dict(sizes))
        if len(asked) == 1:
            owned.clear()
        return Leftover()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(cuda, "leftover", leftover)
    pool = cuda.CudaPool(None)
    pool.new_leftover()
    owned[64] = 512
    pool.new_leftover()
    pool.new_leftover()
    assert asked == [{64: 4096}, {64: 512}, {}]


def test_tensor_over_memory_of_another_is_no_leftover():
    """A piece keeps such tensors of what it was handed: the memory is free once its owner is gone."""
    owner = torch.zeros(1 << 20)
    address = owner.data_ptr()
    borrowed = torch.frombuffer((ctypes.c_float * len(owner)).from_address(address), dtype=torch.float32)
    assert (own_address(owner[2:]), own_address(borrowed)) == (address, 0)
    sizes = {address: owner.nbytes}
    assert leftover(sizes, own_address, "cpu").size == owner.nbytes
    del owner
    assert leftover(sizes, own_address, "cpu") == Leftover()
