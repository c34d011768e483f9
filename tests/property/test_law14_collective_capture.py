"""Law 14: ranks capture the same entries in the same order, or leave out the same; an error is raised on every rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.errors import RankError
from capture_planner.modes import GraphMode
from support.rank_threads import on_ranks, replicas_of
from support.runner_conformance.collective_capture import FAULTS, GRAPHS, FaultyGraphs, capture, differences
from support.worlds import spec_of, world_of

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = settings(max_examples=max(settings.default.max_examples // 4, 3))
SMALL = world_of(spec_of(k=0, mode=GraphMode.FULL_DECODE_ONLY))


@FEW
@given(GRAPHS, st.integers(2, 4), st.sampled_from(FAULTS), st.data())
def test_a_fault_of_one_rank_is_one_of_all(world, size, error, data):
    """Whichever rank and entry: without memory all drop the same graph, and the waiver names the rank; any other error
    is raised on each, by its name on the rank that has it, and leaves no graph.
    """
    rank, at = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, world.plan.num_graphs))
    assert not list(differences(world, size, rank, at, error))


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
    for one in found:
        assert not one.graphs
        assert isinstance(one.raised, RankError)
        assert "capture 1: " in str(one.raised)
        assert size == 2 or one.raised.ranks == (rank,)


def test_a_rank_without_captures_is_named_where_the_others_capture():
    """One rank runs eagerly by a choice of its own: it goes on to its next exchange, and all see that."""
    world = replicas_of(SMALL, 2)

    def work(peers):
        if peers.place.rank == 1:
            return peers.exchange("serve", None)
        return capture(world[0], peers)

    one, other = on_ranks(2, work)
    assert not one.graphs
    for error in (one.raised, other):
        assert isinstance(error, RankError)
        assert "the order of captures" in str(error)


def test_devices_are_idle_and_all_ranks_there_between_a_warm_up_and_its_capture():
    """Warm up, wait for the device, meet, capture, meet: for each entry."""
    each = replicas_of(SMALL, 2)
    events = [[], []]

    def work(peers):
        mine = events[peers.place.rank]

        class EventLog(FaultyGraphs):
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
