"""Check law 14 of the runner: ranks capture together, and one of them has no memory for a graph, or an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import attrs
import hypothesis
import torch
from hypothesis import strategies as st

from capture_planner.errors import CaptureError, RankError, RunError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Entry
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_conformance.failure import Violation
from capture_planner_conformance.suite import search_settings
from capture_planner_runner.capture.sessions import Order
from capture_planner_runner.graphs.graph import GraphPool
from capture_planner_runner.graphs.recorded import RecordedGraph, RecordedGraphs
from capture_planner_runner.ledger.rows import GraphCapture
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from support.rank_threads import ThreadPeers, on_ranks, replicas_of
from support.runner_conformance.laws import RunnerCheck
from support.worlds import World, worlds

FAULTS = (torch.OutOfMemoryError("not a byte left"), ValueError("odd"))
"""What one rank has: no memory for a graph, or another error in its capture."""

GRAPHS = worlds([mode for mode in GraphMode if mode is not GraphMode.NONE]).filter(
    lambda world: world.plan.num_graphs > 0
)


@attrs.define(eq=False)
class FaultyGraphs(RecordedGraphs):
    """A grapher that raises at one of its captures, and notes in which order it is called."""

    at: int = -1
    error: Exception | None = None
    calls: list[str] = attrs.Factory(list)
    captures: int = 0

    def settle(self) -> None:
        self.calls.append("settle")

    def capture(self, forward: Callable[[], object], pool: GraphPool) -> RecordedGraph:
        self.calls.append("capture")
        self.captures += 1
        if self.captures == self.at:
            assert self.error is not None, "an error to raise"
            raise self.error
        return super().capture(forward, pool)


@attrs.frozen(eq=False)
class RankCapture:
    """A capture session as it ended on one rank."""

    graphs: tuple[tuple[Role, Entry], ...]
    plan: Plan
    """By which batches are dispatched now."""
    lost: tuple[GraphCapture, ...]
    raised: Exception | None


def capture(
    world: World, peers: ThreadPeers, grapher: RecordedGraphs | None = None, order: Order | None = None
) -> RankCapture:
    """Capture a world on one rank."""
    raised: RunError | None = None
    grapher = grapher or RecordedGraphs()
    with Runner(
        world.plan, world.target, world.drafter, world.registry, grapher, pages=world.pages, peers=cast("Any", peers),
        options=Options(),
    ) as runner:  # fmt: skip
        try:
            runner.capture(order=order)
        except RunError as error:
            raised = error
            peers.meeting.leave(peers.place.rank, str(error))
        graphs = tuple((role.role, entry) for role in runner.roles.values() for entry in role.graphs)
    lost = tuple(done for done in runner.session.captured if done.waiver is not None)
    return RankCapture(graphs, runner.dispatcher.plan, lost, raised)


def differences(world: World, size: int, rank: int, at: int, error: Exception) -> Iterator[str]:
    """Capture on so many ranks, with an error of ``rank`` at capture ``at``; yield what law 14 forbids."""
    each = replicas_of(world, size)
    graphers = [FaultyGraphs(at=at, error=error) if own == rank else FaultyGraphs() for own in range(size)]
    found: list[RankCapture] = on_ranks(
        size, lambda peers: capture(each[peers.place.rank], peers, graphers[peers.place.rank])
    )
    for own, one in enumerate(found):
        if isinstance(one, Exception):
            yield f"rank {own} breaks: {one}"
            return
    fits = not isinstance(error, torch.OutOfMemoryError)
    yield from _memory(found, rank, error, each[0].plan) if not fits else _raised(found, rank, error)


def _memory(found: Sequence[RankCapture], rank: int, error: Exception, plan: Plan) -> Iterator[str]:
    first = found[0]
    for own, one in enumerate(found):
        if one.raised is not None:
            yield f"rank {own} raises {one.raised}, and a graph did not fit into memory"
        elif one.graphs != first.graphs or one.plan != first.plan or len(one.graphs) != plan.num_graphs - 1:
            yield (
                f"of {counted(plan.num_graphs, 'graph')} one does not fit on rank {rank}; rank {own} has "
                f"{len(one.graphs)} and rank 0 {len(first.graphs)}"
            )
        waivers = [done.waiver for done in one.lost]
        if [
            (done.role, done.entry, waiver and waiver.reason) for done, waiver in zip(one.lost, waivers, strict=True)
        ] != [(done.role, done.entry, Reason.MEMORY) for done in first.lost[:1]]:
            yield f"rank {own} waives other graphs than rank 0"
        elif any(f"rank {rank}: {error}" not in waiver.message for waiver in waivers if waiver):
            yield f"the waiver of rank {own} does not name rank {rank}"


def _raised(found: Sequence[RankCapture], rank: int, error: Exception) -> Iterator[str]:
    for own, one in enumerate(found):
        kind = CaptureError if own == rank else RankError
        if not isinstance(one.raised, kind) or str(error) not in str(one.raised):
            yield f"rank {own} raises {one.raised}, where rank {rank} has an error"
        elif isinstance(one.raised, RankError) and one.raised.ranks != (rank,):
            yield f"the error of rank {own} blames {one.raised.ranks}, and rank {rank} has it"
        if one.graphs or one.plan.num_graphs:
            yield f"rank {own} has graphs of a session that broke off"


def check_capture(seed: int, sessions: int = 3) -> str | None:
    """Check so many random plans on two ranks or three with each fault; return what is wrong with a session.

    The same seed draws the same sessions. Ranks that do not agree may differ from run to run.
    """

    @hypothesis.seed(seed)
    @search_settings(sessions, shrink=False)
    @hypothesis.given(GRAPHS, st.integers(2, 3), st.data())
    def hold(world: World, size: int, data: st.DataObject) -> None:
        rank, at = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, world.plan.num_graphs))
        # Behind the last capture ranks meet no more, so that none can see there that another one has left.
        for place, fault in itertools.product({at, world.plan.num_graphs}, FAULTS):
            for message in differences(world, size, rank, place, fault):
                raise RunnerCheck.TOGETHER.violation(message)

    try:
        hold()
    except Violation as violation:
        return violation.failure.message
    except hypothesis.errors.FlakyFailure as flaky:
        found = [each for each in flaky.exceptions if isinstance(each, Violation)]
        if not found:
            raise
        return found[0].failure.message
    return None
