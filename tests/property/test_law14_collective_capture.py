"""Law 14: ranks capture the same entries in the same order, or leave out the same; an error is raised on every rank."""

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.errors import CaptureError, RankError, RunError
from capture_planner.modes import GraphMode, Reason
from capture_planner_runner.graphs.recorded import RecordedGraphs
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from support.rank_threads import on_ranks, replicas_of
from support.worlds import spec_of, world_of, worlds

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 4, 3))
SMALL = world_of(spec_of(k=0, mode=GraphMode.FULL_DECODE_ONLY))
GRAPHS = worlds([mode for mode in GraphMode if mode is not GraphMode.NONE])


@attrs.define(eq=False)
class Faulty(RecordedGraphs):
    """A grapher that raises at one of its captures, and notes in which order it is called."""

    at: int = -1
    error: Exception | None = None
    calls: list[str] = attrs.Factory(list)
    captures: int = 0

    def settle(self):
        self.calls.append("settle")

    def capture(self, forward, pool):
        self.calls.append("capture")
        self.captures += 1
        if self.captures == self.at:
            raise self.error
        return super().capture(forward, pool)


def capture(world, peers, grapher=None, order=None, **options):
    """Capture a world on one rank; return its runner, still entered, and what was raised."""
    runner = Runner(
        world.plan,
        world.target,
        world.drafter,
        world.registry,
        grapher or RecordedGraphs(),
        pages=world.pages,
        peers=peers,
        options=Options(**options),
    )
    raised = None
    with runner:
        try:
            runner.capture(order=order)
        except RunError as error:
            raised = error
        graphs = [(role.role, entry) for role in runner.roles.values() for entry in role.graphs]
    return runner, graphs, raised


@FEW
@given(GRAPHS, st.integers(2, 4), st.data())
def test_an_entry_that_does_not_fit_on_one_rank_is_dropped_on_all_with_the_reason(world, size, data):
    """Whichever rank and entry: the same graphs are there on all, and the waiver names the rank."""
    each = replicas_of(world, size)
    total = each[0].plan.num_graphs
    rank, at = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, total))
    error = torch.OutOfMemoryError("not a byte left")
    graphers = [Faulty(at=at, error=error) if own == rank else Faulty() for own in range(size)]
    found = on_ranks(size, lambda peers: capture(each[peers.place.rank], peers, graphers[peers.place.rank]))
    runner, graphs, raised = found[0]
    assert raised is None
    assert len(graphs) == total - 1
    for other, other_graphs, _ in found:
        assert other_graphs == graphs
        assert other.dispatcher.plan == runner.dispatcher.plan
        lost = [done for done in other.session.captured if done.waiver is not None]
        assert [(done.role, done.entry) for done in lost] == [
            (done.role, done.entry) for done in runner.session.captured if done.waiver is not None
        ]
        (waiver,) = (done.waiver for done in lost)
        assert waiver.reason is Reason.MEMORY
        assert f"rank {rank}: not a byte left" in waiver.message


@FEW
@given(GRAPHS, st.integers(2, 4), st.data())
def test_an_error_of_one_rank_is_raised_on_all_before_they_wait_for_each_other(world, size, data):
    """The rank's own error there, one that names it on the others, and no graph on any."""
    each = replicas_of(world, size)
    rank, at = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, each[0].plan.num_graphs))
    graphers = [Faulty(at=at, error=ValueError("odd")) if own == rank else Faulty() for own in range(size)]
    found = on_ranks(size, lambda peers: capture(each[peers.place.rank], peers, graphers[peers.place.rank]))
    for own, (runner, graphs, raised) in enumerate(found):
        assert graphs == []
        assert "odd" in str(raised)
        assert isinstance(raised, CaptureError if own == rank else RankError)
        if own != rank:
            assert raised.ranks == (rank,)
        assert runner.dispatcher.plan.num_graphs == 0


@FEW
@given(GRAPHS.filter(lambda world: world.plan.num_graphs > 1), st.integers(2, 3), st.data())
def test_another_order_on_one_rank_is_refused_before_anything_is_captured(world, size, data):
    """The first capture that differs is named, with the rank."""
    each = replicas_of(world, size)
    rank = data.draw(st.integers(0, size - 1))
    found = on_ranks(
        size,
        lambda peers: capture(
            each[peers.place.rank], peers, order=(lambda work: work[::-1]) if peers.place.rank == rank else None
        ),
    )
    for _, graphs, raised in found:
        assert graphs == []
        assert isinstance(raised, RankError)
        assert "capture 1: " in str(raised)
        assert size == 2 or raised.ranks == (rank,)


def test_a_rank_without_captures_is_named_where_the_others_capture():
    """One rank runs eagerly by a choice of its own: it goes on to its next exchange, and all see that."""
    world = replicas_of(SMALL, 2)

    def work(peers):
        if peers.place.rank == 1:
            return peers.exchange("serve", None)
        return capture(world[0], peers)

    (_, graphs, raised), other = on_ranks(2, work)
    assert graphs == []
    for error in (raised, other):
        assert isinstance(error, RankError)
        assert "the order of captures" in str(error)


def test_devices_are_idle_and_all_ranks_there_between_a_warm_up_and_its_capture():
    """Warm up, wait for the device, meet, capture, meet: for each entry."""
    each = replicas_of(SMALL, 2)
    events = [[], []]

    def work(peers):
        mine = events[peers.place.rank]

        class EventLog(Faulty):
            def settle(self):
                mine.append("settle")

            def capture(self, forward, pool):
                mine.append("capture")
                return super().capture(forward, pool)

        class Meeting(type(peers)):
            def exchange(self, topic, value):
                mine.append(topic.split()[0])
                return super().exchange(topic, value)

        return capture(each[peers.place.rank], Meeting(peers.place, peers.meeting), EventLog())

    on_ranks(2, work)
    graphs = each[0].plan.num_graphs
    assert events[0] == events[1] == ["the", *["settle", "warm-up", "capture", "capture"] * graphs]
