"""Disturbed capture sessions: each does what it says, and a healthy backend passes."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner_conformance import Case, Check, Shape, Violation, play
from capture_planner_conformance.memory import Snapshot, canaries_of
from capture_planner_conformance.scene import Arrive, CaptureAttack, RunBatch, Serve, dumps
from capture_planner_conformance.steps import run_step
from capture_planner_conformance.watch import WatchedGraphs
from capture_planner_reference import Reference
from capture_planner_reference.executor import ReferenceExecutor
from capture_planner_runner.execution import role as role_module
from capture_planner_runner.execution.fields import Extents
from support.runner_conformance import RunnerCheck, RunnerScene, RunnerStage, runner_under_test
from support.runner_conformance.watch import WatchedGraph

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = Shape(dtype="float64", heads=2, kv_heads=1, head_dim=4, page_size=4, longest=24)
SUBJECT = runner_under_test()
STEPS = (
    Arrive(prompt=4, computed=4),
    Arrive(prompt=9),
    RunBatch(rows=((0, 3, 1),)),
    RunBatch(rows=((0, 3, 0), (1, 7, 0))),
    Serve(requests=((21, 3, 0), (5, 4, 0))),
)


def scene(**changes):
    return RunnerScene(shape=SHAPE, size_tokens=(8, 16), size_reqs=(2, 3), drafts=2, **changes)


@pytest.mark.parametrize(
    "attack",
    [
        CaptureAttack(order=3),
        CaptureAttack(alone=1),
        CaptureAttack(alone=2, order=5),
        CaptureAttack(breaks=1, stays_eager=True),
        CaptureAttack(breaks=6),
        CaptureAttack(breaks=1000),
    ],
)
def test_healthy_backend_passes_whatever_its_session_is(attack):
    """Also with no page to spare; and the case is the same after it was printed."""
    case = Case(scene=scene(capture=attack, full_cache=True), steps=STEPS)
    assert SUBJECT.loads(dumps(case)) == case
    result = play(SUBJECT, case)
    assert result.failure is None
    assert result.log.forwards["target NONE"]
    assert bool(result.log.forwards["target FULL"] or attack.alone) is not attack.stays_eager


def test_memory_for_one_graph_leaves_one_in_each_role():
    """The others are waived, each before its backend hears of it."""
    with RunnerStage(SUBJECT, scene(capture=CaptureAttack(alone=2))) as stage:
        roles = stage.runner.roles.values()
        assert all(len(role.plan.entries) > 1 for role in roles)
        # In the runner's own order, FULL graphs come after PIECEWISE ones.
        assert [list(role.graphs) for role in roles] == [[role.plan.entries[1]] for role in roles]
        lost = [done for done in stage.runner.session.captured if done.waiver is not None]
        assert len(lost) == stage.plan.num_graphs - len(roles)


@given(st.integers(1, 9), st.integers(1, 20))
@example(300, 299)
def test_memory_is_for_the_graph_with_that_number(entries, alone):
    """Counted on from the first where there are fewer; what would be written for the others is not kept as written."""
    spoiled = []
    buffer = SimpleNamespace(spoil=lambda: spoiled.append(index))
    role = SimpleNamespace(role=Role.TARGET, plan=SimpleNamespace(entries=range(entries)), fields=[buffer])
    graphs, captured = WatchedGraphs(SimpleNamespace(), CaptureAttack(alone=alone)), []
    with graphs.session():
        for index in range(entries):
            with suppress(torch.OutOfMemoryError):
                graphs.staged(role)  # To warm up.
                graphs.staged(role)
                captured.append(index)
    fits = (alone - 1) % entries
    assert captured == [fits]
    assert spoiled == [index for index in range(entries) if index != fits]


def test_a_watched_graph_says_what_the_graph_says():
    """Of its memory, its pieces, and what outlives it."""
    graph = SimpleNamespace(memory=1, alone=2, leftover=3, pieces=4)
    watched = WatchedGraph(graph=graph, key=(Role.TARGET, None), on_replay=print)
    assert (watched.memory, watched.alone, watched.leftover, watched.pieces) == (1, 2, 3, 4)


def test_any_order_of_captures():
    """Every entry once, and not in the runner's order."""
    orders = []
    for seed in (0, 1):
        with RunnerStage(SUBJECT, scene(capture=CaptureAttack(order=seed))) as stage:
            orders.append([(done.role, done.entry) for done in stage.runner.session.captured])
    assert orders[0] != orders[1]
    assert sorted(map(str, orders[0])) == sorted(map(str, orders[1]))


def test_session_that_broke_off_stays_eager():
    """If the scene says so: no role has a graph, and nothing is dispatched to one."""
    with RunnerStage(SUBJECT, scene(capture=CaptureAttack(breaks=5, stays_eager=True))) as stage:
        assert not any(role.graphs for role in stage.runner.roles.values())
        assert not stage.runner.dispatcher.plan.num_graphs


def test_replay_in_a_session_is_a_violation():
    """Of any graph; afterwards it is counted."""
    with RunnerStage(SUBJECT, scene()) as stage:
        role = stage.runner.roles[Role.TARGET]
        entry, graph = next(iter(role.graphs.items()))
        graph.replay()
        assert stage.graphs.replays == [(Role.TARGET, entry)]
        with pytest.raises(Violation) as caught, stage.graphs.session():
            graph.replay()
        assert caught.value.failure.check is RunnerCheck.REPLAYED


LAZY = Case(scene=attrs.evolve(scene(lazy=True, recurrent=True), size_tokens=(4, 8, 12, 16)), steps=STEPS)


@pytest.mark.parametrize("ahead", [False, True])
def test_healthy_backend_passes_with_captures_on_first_use(ahead):
    """Graphs are captured between the steps of the suite, and while requests are served; then they serve."""
    with RunnerStage(SUBJECT, attrs.evolve(LAZY.scene, ahead=ahead)) as stage:
        captured = []
        for step in STEPS:
            run_step(stage, step)
            captured.append(len(stage.runner.session.captured))
        late = [done for done in stage.runner.session.captured if done.step is not None]
        assert captured[1] < captured[2] < captured[3] < captured[4]
        assert {(done.role, done.entry) for done in late} & set(stage.graphs.replays)
    assert play(SUBJECT, attrs.evolve(LAZY, scene=attrs.evolve(LAZY.scene, ahead=ahead))).failure is None


def spoiled_late(change):
    """A backend that spoils something when it prepares a capture after the first step of requests."""

    class Spoiling(ReferenceExecutor):
        started = False

        def prepare(self, metadata):
            super().prepare(metadata)
            Spoiling.started |= not metadata.for_capture
            if Spoiling.started and metadata.for_capture:
                change(self._caches)

    class Backend(Reference):
        name = "spoiling"

        def reserve(self, reservation):
            return Spoiling(reservation)

    return runner_under_test(Backend())


def break_off(caches):
    raise ValueError("no plan while requests are served")


def write(caches):
    next(iter(caches.values())).keys[1] = 3


@pytest.mark.parametrize("steps", [STEPS, STEPS[-1:]], ids=["steps", "served"])
def test_backend_whose_capture_breaks_on_first_use_is_found(steps):
    """An error is none of memory, for which a graph would be waived; also where it is captured while others serve."""
    failure = play(spoiled_late(break_off), attrs.evolve(LAZY, steps=steps)).failure
    assert failure.check is Check.RAN
    assert "could not be captured on first use" in failure.message


def test_backend_that_writes_what_a_request_has_at_a_capture_is_found():
    """A page of a live request is spoiled between two steps."""
    failure = play(spoiled_late(write), LAZY).failure
    assert failure.check is Check.UNTOUCHED
    assert "slot 4 of page 1 changed" in failure.message
    assert failure.notes[:1] == ("a capture on first use changed it",)


def test_capture_on_first_use_may_write_nothing_of_a_request():
    """Slots of pages, recurrent states and draft states; null pages and null states it may."""
    with RunnerStage(SUBJECT, LAZY.scene) as stage:
        for step in STEPS[:4]:
            run_step(stage, step)
        state, (target, drafter) = stage.runner.draft_state, stage.world.caches
        keys, values = next(target.flat()), list(drafter.flat())[-1]
        places = [
            (keys, slice(0, 4), None),
            (keys, slice(4, 5), Check.UNTOUCHED),
            (values, slice(9, 10), Check.UNTOUCHED),
            (target.states[0].states, slice(0, 1), None),
            (target.states[0].states, slice(1, 2), Check.UNTOUCHED),
            (state.token, slice(state.padding, None), None),
            *((getattr(state, name), slice(0, 1), Check.STATE) for name in ("token", "hidden", "proposed")),
        ]
        for tensor, rows, check in places:
            with pytest.raises(Violation) if check else nullcontext() as caught:
                stage.watch.between(lambda tensor=tensor, rows=rows: tensor[rows].fill_(7))
            if check:
                assert caught.value.failure.check is check
                is_pool = tensor is target.states[0].states
                assert caught.value.failure.notes == (() if is_pool else ("a capture on first use changed it",))


def test_dummy_batch_that_has_states_of_requests_is_found(monkeypatch):
    """Rows of the draft state are named by place: a batch of no request has none."""
    original = role_module.null_inputs

    def first_places(counts, *rest):
        return attrs.evolve(original(counts, *rest), idx_mapping=np.arange(len(counts), dtype=np.int32))

    monkeypatch.setattr(role_module, "null_inputs", first_places)
    failure = play(SUBJECT, LAZY).failure
    assert failure.check is Check.STATE
    assert failure.notes == ("a capture on first use changed it",)


@pytest.mark.parametrize("name", ["hidden", "tokens", "positions", "block_table"])
def test_canaries_are_what_belongs_to_others(name):
    """A change of the target's buffers is seen in a forward of the drafter; in its own, what it may write is not."""
    with RunnerStage(SUBJECT, scene()) as stage:
        roles = stage.runner.roles
        target = roles[Role.TARGET]
        extents = Extents(tokens=2, reqs=1, pages=target.fields.capacity.pages)
        tensor = getattr(target.body, name) if hasattr(target.body, name) else target.fields[name]
        tensor.fill_(0)  # Uninitialized memory may be NaN, to which nothing can be added.
        by_other = Snapshot.of(canaries_of(stage.runner, roles[Role.DRAFT_PREFILL], extents))
        by_itself = Snapshot.of(canaries_of(stage.runner, target, extents))
        tensor[:1] += 1
        assert by_other.changed() == f"target.{name}"
        assert by_itself.changed() == (f"target.{name}" if name == "block_table" else None)
        tensor[-1:] += 1
        assert by_itself.changed() in (f"target.{name}", f"target.{name} behind the padding")
