"""Recorder: counts what an engine dispatches, and writes an observation file of it, now and then and at exit.

It runs inside a serving engine, so it never raises into it, and counting takes less than half a microsecond: a
batch and its time are queued where they occur, and counted once a second by a thread. No step waits for a lock.
"""

from __future__ import annotations

import atexit
import logging
import os
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from operator import index
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs

from capture_planner import codec
from capture_planner.codec.documents import MAX_NODES, num_nodes
from capture_planner.errors import CapturePlannerError, class_and_message
from capture_planner.measuring.coarsening import Outcome, ShapeTally, Tallies, coarsened
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.observation import (
    MAX_BATCHES,
    MAX_VECTORS,
    BatchCount,
    Observation,
    ObservedRole,
    ObservedVector,
)

T = TypeVar("T")

LOGGER = logging.getLogger("capture_planner")

MAX_SHAPES = 1 << 12
"""Most batch shapes that are counted apart; beyond it the rarest are rounded up (``coarsening``)."""

MAX_SAMPLES = 63
"""Most timed steps of a shape that are kept: the latest."""

Shape = tuple[Role, int, int, int | None, bool, int]
"""Role, requests, tokens, query length, whether past the prompt, adapters: as in ``Batch``."""

TimedShape = tuple[Role, int, int, int | None, bool, int, float]
"""A shape, and the milliseconds of one step."""


class StepSink:
    """Takes what an engine's steps did; what is not overridden is not kept."""

    def add(self, outcome: Outcome, steps: int) -> None:
        """Count so many steps that were alike."""

    def sample(self, *timed: *TimedShape) -> None:
        """Add the time of one step that is also counted."""

    def interval(self, outcome: Outcome, milliseconds: float) -> None:
        """Add the time by which one step of the target put off the next; the engine did not wait for a request."""

    def draft(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add how many drafts were proposed and accepted, each by position: ``[i]`` is about draft i."""

    def vector(self, shared: Shared) -> None:
        """Count one step by what the data-parallel ranks brought to it."""

    def idle(self) -> None:
        """Count one step in which this rank had no work."""


class Recorder(StepSink):
    """Counts the batches of one process, and writes them as ``FOLDER/NAME.yaml``, whole or not at all.

    The file is written by ``begin``, then every ``every`` seconds if something changed, by a daemon thread, and by
    ``close``, which runs at exit. A process that is killed loses at most ``every`` seconds. An error of writing is
    logged once, with the path and the reason. All methods may be called from any thread; a fork of the process
    writes nothing.
    """

    def __init__(self, folder: Path, name: str, every: float = 30.0) -> None:
        """:param every: seconds between two writes."""
        self.path = folder / f"{name}.yaml"
        self._every = every
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # another lock, so that counting never waits for the disk
        self._base: Observation | None = None
        self._changed = False
        self._failed = False
        self._closed = threading.Event()
        self._process: int | None = None
        self._forget()

    def _forget(self) -> None:
        """Start all counts anew."""
        self._queue: deque[Outcome] = deque()  # Its methods are atomic, so that counting needs no lock.
        self._timed: deque[TimedShape] = deque()
        self._apart: deque[tuple[Outcome, float]] = deque()
        self._tallies: Tallies = {}
        self._times: dict[Shape, tuple[int, deque[float]]] = {}  # timed steps, and the milliseconds of the latest
        self._intervals = Intervals()
        self._stalls: Counter[Role] = Counter()
        self._forgotten: Counter[tuple[Role, int | None]] = Counter()  # steps without a shape, by role and graph
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._vectors = VectorCounts()
        self._idle_steps = 0
        self._since = time.monotonic()

    def begin(self, base: Observation) -> None:
        """Set the part that counting does not change, and write the file.

        Call it once graphs are captured. Called again, it replaces that part: the counts go on where every role
        has the same graphs as before, and start anew where not, since they name graphs by index.

        :param base: its ``batches``, ``other_batches``, ``drafted``, ``accepted`` and ``seconds`` are replaced.
        """
        with self._lock:
            if self._base is None or _graphs(self._base) != _graphs(base):
                self._forget()
            self._base, self._changed = base, True
        if self._process != os.getpid():  # a fork has none of its parent's threads
            self._process = os.getpid()
            threading.Thread(target=self._run, name="capture-planner-recorder", daemon=True).start()
            atexit.register(self.close)
        self._write()

    def count(self, *outcome: *Outcome) -> None:
        """Count one step; its graph is an index into those of the role in ``begin``."""
        self._queue.append(outcome)

    def add(self, outcome: Outcome, steps: int) -> None:
        with self._lock:
            self._add(outcome, ShapeTally(steps))
            self._changed = True

    def sample(self, *timed: *TimedShape) -> None:
        self._timed.append(timed)

    def interval(self, outcome: Outcome, milliseconds: float) -> None:
        self._apart.append((outcome, milliseconds))

    def draft(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        with self._lock:
            for totals, more in ((self._drafted, drafted), (self._accepted, accepted)):
                totals[:] = [a + index(b) for a, b in zip_longest(totals, more, fillvalue=0)]
            self._changed = True

    def vector(self, shared: Shared) -> None:
        with self._lock:
            self._vectors.add(shared)
            self._changed = True

    def idle(self) -> None:
        with self._lock:
            self._idle_steps += 1
            self._changed = True

    def gather(self) -> None:
        """Count what is kept elsewhere; called by any thread before the counts are read or written."""

    def observation(self) -> Observation:
        """Return what was observed so far; raises ``CapturePlannerError`` before ``begin``."""
        self.gather()
        return self._observation()

    def _observation(self, most: int = MAX_BATCHES) -> Observation:
        """:param most: batches that each role may list."""
        with self._lock:
            self._take()
            base, seconds = self._base, time.monotonic() - self._since
            # Copies, because coarsening takes longer than counting may wait for the lock.
            tallies, stalls, forgotten = self._tallies.copy(), self._stalls.copy(), self._forgotten.copy()
            # Into the copies alone: these intervals are judged again once there are enough.
            _judge(self._intervals.waiting(), tallies, stalls)
            vectors = {role: self._vectors.vectors(role, min(most, MAX_VECTORS)) for role in Role}
            drafts, idle = {"drafted": tuple(self._drafted), "accepted": tuple(self._accepted)}, self._idle_steps
        if base is None:
            raise CapturePlannerError("nothing was observed: the recorder has not begun")
        known = {role.role: role for role in base.roles}
        met = {outcome[0] for outcome in tallies} | {role for role, _ in forgotten}
        roles = []
        for role in Role:
            if role in known or role in met:
                plain = known.get(role) or ObservedRole(role=role, mode=GraphMode.NONE)
                own = {each: tally for each, tally in tallies.items() if each[0] is role and tally.steps}
                unlisted = {graph: steps for (each, graph), steps in forgotten.items() if each is role}
                listed, others = vectors[role]
                counts = self._counts(plain, own, Counter(unlisted), most)
                roles.append(replace(plain, **counts, stalls=stalls[role], vectors=listed, other_vectors=others))
        return replace(base, seconds=round(seconds, 3), roles=tuple(roles), idle_steps=idle, **drafts)

    def _counts(self, role: ObservedRole, tallies: Tallies, unlisted: Counter[int | None], most: int) -> dict[str, Any]:
        """Return the graphs and batches of a role, the rarest rounded up; ``unlisted``: steps without a shape."""
        coarse, lost = coarsened(tallies, most, self._room)
        listed = sorted(coarse.items(), key=lambda each: -each[1].steps)
        with self._lock:
            # Times are kept by shape, whichever graph served it.
            samples = [(n, tuple(latest)) for n, latest in (self._times.get(each[:6], (0, ())) for each, _ in listed)]
        batches = [
            BatchCount(
                # An engine may count in NumPy's integers, which no file takes.
                num_reqs=index(outcome[1]),
                num_tokens=index(outcome[2]),
                query_len=None if outcome[3] is None else index(outcome[3]),
                past_prompt=bool(outcome[4]),
                active_loras=index(outcome[5]),
                steps=tally.steps,
                graph=None if outcome[6] is None else index(outcome[6]),
                reason=outcome[7],
                milliseconds=round(statistics.median(latest), 5) if latest else None,
                samples=times,
                interval=round(tally.mean, 5) if tally.timed else None,
                intervals=tally.timed,
                interval_error=None if tally.error is None else round(tally.error, 5),
            )
            for (outcome, tally), (times, latest) in zip(listed, samples, strict=True)
        ]
        replays = unlisted.copy()
        for outcome, tally in tallies.items():
            replays[outcome[6]] += tally.steps
        return {
            "graphs": tuple(attrs.evolve(graph, replays=replays[n]) for n, graph in enumerate(role.graphs)),
            "batches": tuple(batches),
            "rounded_batches": sum(tally.rounded for tally in coarse.values()),
            "other_batches": unlisted.total() + sum(tally.steps for tally in lost.values()),
        }

    def _room(self, outcome: Outcome) -> tuple[int, int]:
        """Return the requests and the tokens of the graph that served a batch, or else the limits."""
        base, role, graph = self._base, outcome[0], outcome[6]
        if base is None:
            return 0, 0
        limits = base.limits.max_num_reqs, base.limits.max_num_tokens
        graphs = next((each.graphs for each in base.roles if each.role is role), ())
        # ``begin`` may have replaced the graphs since the batch ran.
        if graph is None or graph >= len(graphs):
            return limits
        return graphs[graph].entry.num_reqs or limits[0], graphs[graph].entry.num_tokens

    def close(self) -> None:
        """Write the file a last time, and stop; again, or in a fork, it does nothing."""
        if self._process == os.getpid() and not self._closed.is_set():
            self._closed.set()
            # Or else the interpreter would keep the recorder until it exits.
            atexit.unregister(self.close)
            self._write()

    def _run(self) -> None:
        written = time.monotonic()
        # The queues are emptied every second, however seldom the file is written.
        while not self._closed.wait(min(self._every, 1.0)):
            due = time.monotonic() >= written + self._every
            self._write(due=due)
            written = time.monotonic() if due else written

    def _write(self, *, due: bool = True) -> None:
        """Count what is queued; where the file is ``due``, write it if something changed since it was written."""
        try:
            self.gather()
            with self._lock:
                self._take()
            with self._writing:
                if due and self._changed:
                    self._changed = False  # before the counts are read: what is counted from here on may not be in them
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    codec.write(self.path, codec.dumps_plain(self._fitting()))
        except Exception as error:  # The engine goes on, whatever is wrong with its observation.
            self._changed = True
            if not self._failed:
                LOGGER.error("%s: the observation is not complete: %s", self.path, class_and_message(error))
            self._failed = True

    def _fitting(self) -> dict[str, Any]:
        """Return the observation as plain data, with as many batches of each role as its file can have."""
        most = MAX_BATCHES
        # How large a file becomes is known only once it is made.
        data = codec.to_data(self._observation())
        while num_nodes(data) > MAX_NODES and most > 1:
            most //= 2
            data = codec.to_data(self._observation(most))
        return cast(dict[str, Any], data)

    def _take(self) -> None:
        """Count what is queued, and bound the memory: the rarest shapes are rounded up, or become a number of steps."""
        if self._queue or self._timed or self._apart:
            self._changed = True
        for outcome, steps in Counter(_drained(self._queue)).items():
            self._add(outcome, ShapeTally(steps))
        for timed in _drained(self._timed):
            times, latest = self._times.get(timed[:6]) or (0, deque(maxlen=MAX_SAMPLES))
            latest.append(timed[6])
            self._times[timed[:6]] = times + 1, latest
        for each in _drained(self._apart):
            self._intervals.add(*each)
        _judge(self._intervals.taken(), self._tallies, self._stalls)
        if len(self._tallies) > MAX_SHAPES:
            # Intervals that are judged later would name shapes that are not there.
            _judge(self._intervals.taken(0), self._tallies, self._stalls)
            self._tallies, lost = coarsened(self._tallies, MAX_SHAPES // 2, self._room)
            for outcome, tally in lost.items():
                self._forgotten[outcome[0], outcome[6]] += tally.steps
            # No batch is left that has these times.
            for shape in self._times.keys() - {outcome[:6] for outcome in self._tallies}:
                del self._times[shape]

    def _add(self, outcome: Outcome, tally: ShapeTally) -> None:
        self._tallies[outcome] = self._tallies.get(outcome, ShapeTally()) + tally


def _drained(queue: deque[T]) -> list[T]:
    """Take what is queued now; other threads go on queueing."""
    return [queue.popleft() for _ in range(len(queue))]


def _judge(timed: Judged, tallies: Tallies, stalls: Counter[Role]) -> None:
    """Add intervals to the tallies of their shapes, and count stalls."""
    for outcome, milliseconds, is_stall in timed:
        if is_stall:
            stalls[outcome[0]] += 1
        else:
            tallies[outcome] = tallies.get(outcome, ShapeTally()) + ShapeTally(timed=1, mean=milliseconds)


def _graphs(base: Observation) -> dict[Role, list[object]]:
    """Return what indices into the graphs of each role mean."""
    return {role.role: [graph.entry for graph in role.graphs] for role in base.roles}


STALL = 10
"""A step is a stall where it takes so many times the median of its kind, and twice what its tokens would make of it."""

SETTLED = 32
"""Steps of a kind before which none is judged: the first ones may be those that compile kernels."""

MEMORY = 255
"""Latest steps of a kind that the median is of."""

Kind = tuple[Role, bool, bool]
"""Role, whether eager, and whether a decode."""

Judged = Iterator[tuple[Outcome, float, bool]]
"""Steps with their milliseconds, and whether each is a stall."""


class Intervals:
    """Holds the intervals of steps until there are enough of their kind; not by several threads at once."""

    def __init__(self) -> None:
        self._waiting: dict[Kind, list[tuple[Outcome, float]]] = {}
        self._latest: dict[Kind, deque[tuple[float, int]]] = {}

    def add(self, outcome: Outcome, milliseconds: float) -> None:
        """Add one step."""
        role, _, tokens, query_len, past_prompt, _, graph, _ = outcome
        # Steps are compared within their kind: eager steps and prompts usually take longer.
        kind = (role, graph is None, past_prompt and query_len is not None)
        self._waiting.setdefault(kind, []).append((outcome, milliseconds))
        self._latest.setdefault(kind, deque(maxlen=MEMORY)).append((milliseconds, tokens))

    def taken(self, least: int = SETTLED) -> Judged:
        """Take the steps of kinds of which ``least`` were added so far."""
        for kind in [kind for kind in self._waiting if len(self._latest[kind]) >= least]:
            yield from self._judged(kind, self._waiting.pop(kind))

    def waiting(self) -> Judged:
        """Yield the steps that were not taken, judged by what was added so far."""
        for kind, steps in self._waiting.items():
            yield from self._judged(kind, steps)

    def _judged(self, kind: Kind, steps: list[tuple[Outcome, float]]) -> Judged:
        usual, tokens = (statistics.median(column) for column in zip(*self._latest[kind], strict=True))
        for outcome, milliseconds in steps:
            # A pass grows in proportion to its tokens at most: what took longer waited, or compiled kernels.
            yield outcome, milliseconds, milliseconds > usual * max(STALL, 2 * outcome[2] / max(tokens, 1))


MAX_KNOWN = 1 << 11
"""Most vectors that are counted apart; beyond it, steps of the rarer half are only counted."""

RankShare = tuple[int, int, int | None, bool, GraphMode]
"""Of one rank: requests, tokens, query length, whether past the prompt, and the graph that it would run by itself."""

Shared = tuple[Role, tuple[RankShare, ...], int | None, Reason | None]
"""The role, the share of each rank, and the observed rank's graph or its reason for none."""


class VectorCounts:
    """Steps by vector; not for several threads at once."""

    def __init__(self) -> None:
        self._steps: Counter[Shared] = Counter()
        self._forgotten: Counter[Role] = Counter()

    def add(self, shared: Shared, steps: int = 1) -> None:
        """Count so many steps of one vector."""
        self._steps[shared] += steps
        if len(self._steps) > MAX_KNOWN:
            # Half at once, so that it is chosen seldom.
            kept = _chosen(self._steps, MAX_KNOWN // 2)
            for each, count in (self._steps - kept).items():
                self._forgotten[each[0]] += count
            self._steps = kept

    def vectors(self, role: Role, most: int = MAX_VECTORS) -> tuple[tuple[ObservedVector, ...], int]:
        """Return at most so many vectors of a role, and how many steps had others."""
        own = Counter({each: count for each, count in self._steps.items() if each[0] is role})
        chosen = _chosen(own, most)
        fields = ("num_reqs", "num_tokens", "query_len", "past_prompt", "modes")
        listed = tuple(
            ObservedVector(**dict(zip(fields, zip(*ranks, strict=True), strict=True)), steps=n, graph=graph, reason=why)
            for (_, ranks, graph, why), n in chosen.items()
        )
        return listed, self._forgotten[role] + own.total() - chosen.total()


def _chosen(steps: Counter[Shared], most: int) -> Counter[Shared]:
    """Return the most frequent vectors, half of them eager if there are so many: those are the ones to explain."""
    by_count = steps.most_common()
    eager = dict([(each, count) for each, count in by_count if each[2] is None][: most // 2])
    others = [(each, count) for each, count in by_count if each not in eager]
    return Counter(eager | dict(others[: most - len(eager)]))
