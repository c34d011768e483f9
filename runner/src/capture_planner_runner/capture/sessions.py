"""Capture: every entry of a plan, in an order and in pools that need least memory.

PIECEWISE first, then FULL, each largest first over all roles, so that a smaller graph finds the
memory that a larger one left. Each forward runs twice, to warm up and to be captured, with metadata
made anew. A graph that does not fit into memory is left out, and what it would have served is waived.

All captures at start are one session: its graphs are replayed once it has ended, and after an error
inside of it there are none. A lazy plan's others follow one by one, between steps, and change none of them.

Several ranks capture the same entries in the same order, or leave out the same ones: after each warm-up and after each
capture they wait for each other, and an error of one is raised on all (law 14). Between the last warm-up and a capture
the devices are idle: what still runs on one, such as a kernel that is compiled, would be captured (sglang#33795).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import cast

import attrs
import torch

from capture_planner.errors import BackendError, CaptureError, RunError, class_and_message, one_line
from capture_planner.modes import Pool, Reason
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.plan import Plan, RolePlan, Waiver
from capture_planner.records.text import counted, format_bytes
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.graphs.graph import Graph, Grapher
from capture_planner_runner.graphs.reading import Reading
from capture_planner_runner.ledger.rows import GraphCapture
from capture_planner_runner.ranks.collectives import WHOLE, Collectives
from capture_planner_runner.ranks.outcomes import Result, StageOutcome, on_every_rank, refuse_other_states
from capture_planner_runner.ranks.peers import ALONE, Peers

Work = list[tuple[RoleRun, Entry]]
"""Entries to capture, in order."""

Order = Callable[[Work], Work]
"""Arranges what is captured in another order."""


def capture_all(
    plan: Plan,
    roles: Sequence[RoleRun],
    grapher: Grapher,
    *,
    strict: bool,
    memory: int | None = None,
    order: Order | None = None,
    peers: Peers = ALONE,
    among: Collectives = WHOLE,
) -> Iterator[GraphCapture]:
    """Capture what ``plan`` captures at start, in a ``session``, and yield what each entry cost.

    ``memory`` bounds the bytes of each pool. Raises ``RunError`` where a graph does not fit, if ``strict``, for any
    other error of a capture one that names its role and its entry, and ``RankError`` where that happened on another
    rank, or where ranks capture other entries, in another order, or with other collectives in them.

    :param peers: all ranks that capture this plan.
    :param among: the collectives of the model, which graphs hold.
    """
    work = begin(plan, roles, grapher, memory)
    if order:
        work = order(work)
    # Before the first capture: ranks that differ later wait for each other in collectives that never match.
    _refuse_other_work(work, peers)
    for number, (role, entry) in enumerate(work, 1):
        with _named(role, entry):
            captured = _Capture(role, entry, grapher, peers, among, f"{number} of {len(work)}").run(strict=strict)
        yield captured


def capture_late(
    role: RoleRun, entry: Entry, grapher: Grapher, *, room: int, number: int, peers: Peers, among: Collectives
) -> GraphCapture:
    """Capture one more entry after a ``session``, when no forward is under way; then it may be replayed at once.

    Warm-up and capture write null pages, null states and the fields of their own role alone, as at start. The graphs
    that are there stay, whatever becomes of this one. One that takes more than ``room`` bytes of the device, or cannot
    be captured, is dropped with a waiver; without any room on some rank it is not tried. Of several ranks, an error of
    one that is not about memory ends the run.

    :param number: of the captures of this kind.
    """
    if (peers.agree([room]) <= 0).any():
        waiver = _waiver(role.plan, entry, Reason.MEMORY, f"{entry} was not tried: nothing of capture.memory is left")
        return GraphCapture(role=role.role, entry=entry, seconds=0.0, memory=0, alone=0, waiver=waiver, tried=False)
    capture = _Capture(role, entry, grapher, peers, among, f"{number} on first use", room)
    try:
        with _named(role, entry):
            done = capture.run()
    except BaseException as error:
        role.graphs.drop(entry)
        # Other ranks may wait inside of this capture's collectives; only a lack of memory is agreed on.
        if peers.place.size > 1 or not isinstance(error, (BackendError, CaptureError)):
            raise
        waiver = _waiver(role.plan, entry, Reason.LAZY, f"{entry} could not be captured on first use: {error}")
    else:
        role.graphs.keep(entry)
        return done
    # Read after the error is gone: its traceback holds what the capture had made.
    before, after = capture.before, grapher.reading()
    return capture.row(before, after, memory=max(after.held - before.held, 0) if before and after else 0, waiver=waiver)


@attrs.frozen(eq=False)
class _Capture:
    """The capture of one entry, by all ranks together."""

    role: RoleRun
    entry: Entry
    grapher: Grapher
    peers: Peers
    among: Collectives
    number: str
    """Number of the capture, for messages."""
    room: int | None = None
    """Bytes of the device that the graph may take; None: no bound."""
    begun: float = attrs.Factory(perf_counter)
    """In seconds."""
    before: Reading | None = attrs.Factory(lambda self: self.grapher.reading(), takes_self=True)
    """The device, before anything is done."""

    def run(self, *, strict: bool = False) -> GraphCapture:
        """Capture; the device is read before, between and after, so that growth has one cause."""
        role, entry, before = self.role, self.entry, self.before
        memory, alone, waiver = 0, 0, None
        # Without readings the pool itself is asked, which takes a CUDA pool long.
        pool = role.graphs.pool
        held = pool.memory if self.room is not None and before is None and pool is not None else None
        warmed = self._on_every_rank("warm-up", self._warmed_up, awaits=())
        warm, unfit = warmed.result or before, warmed.unfit
        if unfit is None:
            # Nothing runs in a CUDA capture: one that lacks memory keeps no rank waiting.
            captured = self._on_every_rank("capture", self._captured, awaits=(torch.OutOfMemoryError,))
            unfit = captured.unfit
            if captured.result is not None:
                memory, alone = captured.result.memory, captured.result.alone
                # The graph holds addresses of the collectives' buffers, so they must outlive it.
                self.among.keep(captured.result)
        if unfit is not None:
            # Law 14: this rank may have captured the graph, but all ranks drop the same ones.
            role.graphs.drop(entry)
            if strict:
                raise RunError(f"{role.role.value}: {entry} does not fit into memory: {unfit}")
            message = f"{entry} did not fit into memory when it was captured: {unfit}"
            waiver = _waiver(role.plan, entry, Reason.MEMORY, message)
        after = self.grapher.reading()
        if waiver is not None:
            # Nothing but the graph grew in between: this is what it left behind in its pool.
            if warm and after:
                memory = max(after.held - warm.held, 0)
            elif held is not None and pool is not None:
                memory = pool.memory - held
        return self.row(warm, after, memory=memory, alone=alone, waiver=waiver)

    def row(
        self, warm: Reading | None, after: Reading | None, *, memory: int, alone: int = 0, waiver: Waiver | None
    ) -> GraphCapture:
        """Return the row of the ledger; ``warm`` is the device after the warm-up."""
        ended = perf_counter()
        return GraphCapture(
            role=self.role.role,
            entry=self.entry,
            seconds=ended - self.begun,
            ended=ended,
            memory=memory,
            alone=alone,
            readings=(self.before, warm, after) if self.before and warm and after else None,
            waiver=waiver,
        )

    def _warmed_up(self) -> Reading | None:
        self.role.warm_up(self.entry)
        self.grapher.settle()
        return self.grapher.reading()

    def _captured(self) -> Graph:
        graph = self.role.capture(self.entry)
        after = None if self.room is None else self.grapher.reading()
        # What the device lost, not the allocator alone: the driver's part of a graph is in no pool.
        takes = graph.memory if self.before is None or after is None else after.used - self.before.used
        if self.room is not None and takes > self.room:
            has = f"{format_bytes(self.room)} of capture.memory are left"
            raise torch.OutOfMemoryError(f"it takes {format_bytes(takes)}, and {has}")
        return graph

    def _on_every_rank(
        self, stage: str, work: Callable[[], Result], *, awaits: tuple[type[Exception], ...]
    ) -> StageOutcome[Result]:
        """Run a stage on every rank; all call as many collectives in it.

        Where ranks share the model, an error that is not in ``awaits`` ends the run at once: other ranks may be inside
        of collectives, from which nothing calls them back, and learn of it from the ranks' watch.
        """
        before = self.among.calls
        return on_every_rank(
            self.peers,
            f"{stage} {self.number}, {self.entry}",
            work,
            awaits=(Exception,) if self.among.size == 1 else awaits,
            state=lambda: counted(self.among.calls - before, "collective"),
        )


def _refuse_other_work(work: Work, peers: Peers) -> None:
    """Raise ``RankError`` at the first entry that some rank does not capture in this place."""
    orders = peers.exchange("the order of captures", [f"{role.role.value}: {entry}" for role, entry in work])
    places = itertools.zip_longest(*(cast("Sequence[str]", order) for order in orders), fillvalue="no more")
    for number, entries in enumerate(places, 1):
        refuse_other_states(f"capture {number}", entries)


@contextmanager
def session(roles: Sequence[RoleRun]) -> Iterator[None]:
    """Let the roles replay what is captured here when it is over; if it breaks off, they have no graph."""
    try:
        yield
    except BaseException:
        # Not even those that are complete: another rank may have none of them.
        for role in roles:
            role.graphs.abandon()
        raise
    for role in roles:
        role.graphs.end()


@contextmanager
def _named(role: RoleRun, entry: Entry) -> Iterator[None]:
    """Raise errors with the names of role and entry in them. An assertion is left as it is."""
    label = f"{role.role.value}: {entry}"
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        message = one_line(error)
        # RankError, GuardError and the refusal of `strict` name their place already.
        if isinstance(error, RunError) and type(error) is not CaptureError:
            raise
        if isinstance(error, (BackendError, CaptureError)):
            if str(entry) in message and role.role.value in message:  # named further in
                raise
            raise type(error)(f"{label}: {message}") from error
        raise CaptureError(f"{label}: the capture broke: {class_and_message(error)}") from error


def begin(plan: Plan, roles: Sequence[RoleRun], grapher: Grapher, memory: int | None = None) -> Work:
    """Give each role its pool, and return what is captured, in order."""
    shared = grapher.pool(memory)
    for role in roles:
        role.begin_capture(shared if plan.pool is Pool.SHARED else grapher.pool(memory))
    work = ((role, entry) for role in roles for entry in role.plan.at_start)
    return sorted(work, key=lambda item: item[1].capture_order)


def _waiver(role: RolePlan, entry: Entry, reason: Reason, message: str) -> Waiver:
    """Waive what only this entry served: the extents between the next smaller one and itself."""
    decode = entry.tokens_each is not None
    smaller = [_extent(other) for other in role.entries if _ladder(other) == _ladder(entry)]
    below = max((size for size in smaller if size < _extent(entry)), default=0)
    return Waiver(
        kind=Kind.DECODE if decode else Kind.MIXED,
        query_len=entry.query_len,
        max_query_len=entry.max_query_len,
        first=below + 1,
        last=_extent(entry),
        max_loras=entry.active_loras,
        reason=reason,
        message=message[:500],
    )


def _extent(entry: Entry) -> int:
    return entry.num_tokens // entry.tokens_each if entry.tokens_each else entry.num_tokens


def _ladder(entry: Entry) -> tuple[object, ...]:
    """Return what the entries have in common of which the next larger one serves a batch."""
    return entry.mode, entry.query_len, entry.max_query_len, entry.active_loras, entry.draft_steps
