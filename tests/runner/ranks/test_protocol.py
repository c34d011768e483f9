"""Ranks exchange and watch each other, in any order of their steps: all agree, or all name the culprit."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_planner.errors import RankError
from capture_planner_runner.ranks.connection import ControlPlane, meet
from capture_planner_runner.ranks.watch import RankVerdict, RankWatch, WaitLimits
from support.ranks import World

LIMITS = WaitLimits(slow=30.0)
SIMULATED = settings(max_examples=min(settings().max_examples, 500))
"""Of deployments, which take 20 ms each and more."""
HARMLESS = {"slow", "paused"}
FAULTS = ("never", "dies", "stops", "raises", "hangs", "other topic", "finishes")


@attrs.frozen
class Deviation:
    """What one rank does before its exchange of a number."""

    at: int
    does: str


@attrs.define
class Rank:
    """What became of a rank."""

    values: list[Any] = attrs.Factory(list)
    error: BaseException | None = None
    ended: float | None = None


class Boom(Exception):
    """An error of a rank itself."""


def run_rank(world, rank, size, topics, deviation, outcome, *, sees_deaths, dead):
    """Do what one rank does: meet, exchange each topic, leave."""
    tasks = []

    def end(verdict: RankVerdict, is_raised: bool) -> None:
        outcome.error, outcome.ended = verdict.error(), world.now
        world.kill(*tasks)

    def main() -> None:
        try:
            meet(world, rank, size, {"host": "h"}, LIMITS, clock=world.clock, pause=world.pause)
        except RankError as error:
            outcome.error, outcome.ended = error, world.now
            return
        names = [f"rank {each}" for each in range(size)]
        watch = RankWatch(world, rank, names, LIMITS, gone=lambda: dead if sees_deaths else (), clock=world.clock)

        def watching() -> None:
            while outcome.ended is None:
                watch.look()
                watch.guard(end)
                world.pause(LIMITS.beat)

        tasks.append(world.start(watching))
        plane = ControlPlane(world, watch, rank, size, pause=world.pause)
        try:
            for number, topic in enumerate(topics):
                if deviation is not None and deviation.at == number:
                    topic = deviate(world, deviation.does, topic, rank, tasks, dead)
                    if topic is None:
                        break
                outcome.values.append(plane.exchange(topic, [rank, number]))
        except (RankError, Boom) as error:
            outcome.error = error
        watch.leave(outcome.error)
        outcome.ended = world.now

    tasks.append(world.start(main))


def deviate(world, does, topic, rank, tasks, dead):
    """Do something else than the others; return the topic that the rank exchanges then, None for the end."""
    if does == "dies":
        dead.append(rank)
        world.kill(*tasks)
    elif does == "raises":
        raise Boom("out of memory")
    elif does == "hangs":
        world.pause(math.inf)
    elif does == "slow":
        world.pause(20.0)
    elif does in ("stops", "paused"):
        for task in tasks:
            task.wake = world.now + (math.inf if does == "stops" else 4.0)
        world.pause(math.inf if does == "stops" else 4.0)
    return {"other topic": "something else", "finishes": None}.get(does, topic)


@st.composite
def deployments(draw, kinds=(*FAULTS, *HARMLESS)):
    """Draw a number of ranks, what they exchange, and what some of them do instead."""
    size, count = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    one = st.builds(Deviation, st.integers(0, count - 1), st.sampled_from(sorted(kinds)))
    some = draw(st.dictionaries(st.integers(0, size - 1), one, max_size=2))
    return size, [f"topic {number}" for number in range(count)], some


def simulate(order, size, topics, deviations, *, sees_deaths):
    """Run all ranks, and return what became of each."""
    world, outcomes, dead = World(order), [Rank() for _ in range(size)], []
    for rank, outcome in enumerate(outcomes):
        deviation = deviations.get(rank)
        if deviation is None or deviation.does != "never":
            run_rank(world, rank, size, topics, deviation, outcome, sees_deaths=sees_deaths, dead=dead)
    world.run(120.0)
    return outcomes


@SIMULATED
@given(st.randoms(use_true_random=False), deployments(), st.booleans())
def test_ranks_agree_or_all_name_the_culprit(order, deployment, sees_deaths):
    """Whatever some ranks do, and in whatever order: each other rank gets all values, or the same named error."""
    size, topics, deviations = deployment
    outcomes = simulate(order, size, topics, deviations, sees_deaths=sees_deaths)
    wrong = {rank: each.does for rank, each in deviations.items() if each.does not in HARMLESS}
    lost = {rank for rank, does in wrong.items() if does in ("never", "dies", "stops")}
    expected = [tuple([rank, number] for rank in range(size)) for number in range(len(topics))]
    said = set()
    for rank, outcome in enumerate(outcomes):
        if rank in lost:
            continue
        # A rank that hangs by itself is ended by those that wait for it; there may be none.
        assert outcome.ended is not None or wrong.get(rank) == "hangs", "no rank waits for ever"
        if isinstance(outcome.error, RankError):
            said.add((str(outcome.error), outcome.error.ranks))
            assert outcome.values == expected[: len(outcome.values)]
        elif rank not in wrong:
            assert outcome.error is None
            assert outcome.values == expected
    assert len(said) <= 1, "all ranks end with one sentence"
    for text, ranks in said:
        assert ranks
        assert all(f"rank {rank}" in text for rank in ranks)
        # Of two ranks at different points, neither is the culprit rather than the other.
        assert set(ranks) <= set(wrong) or "other topic" in wrong.values()
    if not wrong:
        assert not said


@SIMULATED
@given(st.randoms(use_true_random=False), st.sampled_from(["dies", "stops", "never", "raises"]), st.integers(2, 4))
def test_a_lost_rank_is_named_within_ten_seconds(order, does, size):
    """On every other rank, also where no other process can be seen to have died."""
    outcomes = simulate(order, size, ["topic"], {1: Deviation(0, does)}, sees_deaths=False)
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            assert isinstance(outcome.error, RankError)
            assert outcome.error.ranks == (1,)
            assert outcome.ended is not None
            assert outcome.ended <= (10.1 if does == "never" else 10.0)


@SIMULATED
@given(st.randoms(use_true_random=False), deployments(kinds=HARMLESS))
def test_a_slow_rank_is_waited_for(order, deployment):
    """One that lives, or was stopped for less than the limit, is no error."""
    size, topics, deviations = deployment
    assert all(outcome.error is None for outcome in simulate(order, size, topics, deviations, sees_deaths=True))


@pytest.mark.parametrize(
    ("does", "text"),
    [
        ("never", "rank 1 of 3 has not started within 10 s of the others"),
        ("dies", "rank 1 died, last met at 'topic 0'"),
        ("stops", "rank 1 has not answered for 6 s, last met at 'topic 0'"),
        ("raises", "rank 1 ended: Boom: out of memory"),
        ("hangs", "rank 1 answers, but has not come to 'topic 1' within 30 s (--rank-timeout), and is at 'topic 0'"),
        ("other topic", "ranks are at different points: rank 0, rank 2 at 'topic 1', rank 1 at 'something else'"),
        ("finishes", "rank 1 finished, and others wait at 'topic 1'"),
    ],
)
def test_errors_say_which_rank_did_what(does, text):
    """One sentence for each kind of fault."""
    outcomes = simulate(Random(0), 3, ["topic 0", "topic 1"], {1: Deviation(1, does)}, sees_deaths=True)
    assert str(outcomes[0].error).startswith(text)
    assert outcomes[0].error.ranks == (1,)
