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
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from operator import index
from pathlib import Path
from typing import Any, Protocol, cast

import attrs

from capture_planner import codec
from capture_planner.codec.documents import MAX_NODES, num_nodes
from capture_planner.errors import CapturePlannerError
from capture_planner.measuring.coarsening import Outcome, coarsened
from capture_planner.measuring.intervals import Intervals, Spread
from capture_planner.measuring.intervals import rounded as rounded_up
from capture_planner.measuring.vector_counts import Shared, VectorCounts
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.observation import MAX_BATCHES, MAX_VECTORS, BatchCount, Observation, ObservedRole

LOGGER = logging.getLogger("capture_planner")

MAX_SHAPES = 1 << 12
"""Most batch shapes that are counted apart; beyond it the rarest are rounded up (``coarsening``)."""

MAX_SAMPLES = 63
"""Most timed steps of a shape that are kept: the latest."""

Shape = tuple[Role, int, int, int | None, bool, int]
"""Role, requests, tokens, query length, whether past the prompt, adapters: as in ``Batch``."""

TimedShape = tuple[Role, int, int, int | None, bool, int, float]
"""A shape, and the milliseconds of one step."""


class StepSink(Protocol):
    """Takes what an engine's steps did."""

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


@attrs.frozen
class _StepTallies:
    """Steps by outcome; those of them that are of rarer shapes; and those without a shape, by role and graph.

    And the intervals of steps by outcome, with the stalls that are none of them.
    """

    steps: Counter[Outcome]
    rounded: Counter[Outcome]
    forgotten: Counter[tuple[Role, int | None]]
    intervals: Mapping[Outcome, Spread]
    stalls: Counter[Role]


@attrs.define
class _Samples:
    """Timed steps of one shape: how many there were, and the latest, in milliseconds."""

    count: int = 0
    latest: deque[float] = attrs.field(factory=lambda: deque(maxlen=MAX_SAMPLES))


class Recorder:
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
        self._writing = threading.Lock()
        self._queue: deque[Outcome] = deque()  # Its methods are atomic, so that counting needs no lock.
        self._timed: deque[TimedShape] = deque()
        self._apart: deque[tuple[Outcome, float]] = deque()
        self._steps: Counter[Outcome] = Counter()
        self._samples: dict[Shape, _Samples] = {}
        self._intervals = Intervals()
        self._rounded: Counter[Outcome] = Counter()  # of the steps, those of rarer shapes
        self._forgotten: Counter[tuple[Role, int | None]] = Counter()  # by role and graph
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._vectors = VectorCounts()
        self._idle_steps = 0
        self._base: Observation | None = None
        self._since = time.monotonic()
        self._changed = False
        self._failed = False
        self._closed = threading.Event()
        self._process: int | None = None

    def begin(self, base: Observation) -> None:
        """Set the part that counting does not change, and write the file.

        Call it once graphs are captured. Called again, it replaces that part: the counts go on where every role
        has the same graphs as before, and start anew where not, since they name graphs by index.

        :param base: its ``batches``, ``other_batches``, ``drafted``, ``accepted`` and ``seconds`` are replaced.
        """
        with self._lock:
            if self._base is None or _graphs(self._base) != _graphs(base):
                for queue in (self._queue, self._timed, self._apart):
                    queue.clear()
                tallies = (self._steps, self._rounded, self._samples, self._intervals, self._forgotten)
                for counts in (*tallies, self._drafted, self._accepted, self._vectors):
                    counts.clear()
                self._idle_steps = 0
                self._since = time.monotonic()
            self._base, self._changed = base, True
        if self._process != os.getpid():
            self._process = os.getpid()
            threading.Thread(target=self._run, name="capture-planner-recorder", daemon=True).start()
            atexit.register(self.close)
        self._write()

    def count(self, *outcome: *Outcome) -> None:
        """Count one step; its graph is an index into those of the role in ``begin``."""
        self._queue.append(outcome)

    def add(self, outcome: Outcome, steps: int) -> None:
        """Count so many steps that were alike."""
        with self._lock:
            self._steps[outcome] += steps
            self._changed = True

    def sample(self, *timed: *TimedShape) -> None:
        """Add the time of one step that is also counted."""
        self._timed.append(timed)

    def interval(self, outcome: Outcome, milliseconds: float) -> None:
        """Add the time by which one step of the target put off the next; the engine did not wait for a request."""
        self._apart.append((outcome, milliseconds))

    def draft(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add how many drafts were proposed and accepted, each by position: ``[i]`` is about draft i."""
        with self._lock:
            for totals, more in ((self._drafted, drafted), (self._accepted, accepted)):
                totals[:] = [a + index(b) for a, b in zip_longest(totals, more, fillvalue=0)]
            self._changed = True

    def vector(self, shared: Shared) -> None:
        """Count one step by what the data-parallel ranks brought to it."""
        with self._lock:
            self._vectors.add(shared)
            self._changed = True

    def idle(self) -> None:
        """Count one step in which this rank had no work."""
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
            tallies = _StepTallies(
                self._steps.copy(), self._rounded.copy(), self._forgotten.copy(), *self._intervals.read()
            )
            drafted, accepted = tuple(self._drafted), tuple(self._accepted)
            vectors = {role: self._vectors.vectors(role, min(most, MAX_VECTORS)) for role in Role}
            idle_steps = self._idle_steps
        if base is None:
            raise CapturePlannerError("nothing was observed: the recorder has not begun")
        known = {role.role: role for role in base.roles}
        met = {outcome[0] for outcome in tallies.steps} | {role for role, _ in tallies.forgotten}
        roles = (known.get(role) or ObservedRole(role=role, mode=GraphMode.NONE) for role in Role)
        return replace(
            base,
            seconds=round(seconds, 3),
            roles=tuple(
                replace(
                    self._with_counts(role, tallies, most),
                    vectors=vectors[role.role][0],
                    other_vectors=vectors[role.role][1],
                )
                for role in roles
                if role.role in known or role.role in met
            ),
            drafted=drafted,
            accepted=accepted,
            idle_steps=idle_steps,
        )

    def _with_counts(self, role: ObservedRole, tallies: _StepTallies, most: int) -> ObservedRole:
        """Return the role with its batches, the rarest rounded up, and the number of its other steps."""
        own = {outcome: count for outcome, count in tallies.steps.items() if outcome[0] is role.role}
        coarse = coarsened(own, most, self._room)
        listed = coarse.steps.most_common()
        rounded = sum(min(coarse.rounded[each] + tallies.rounded[each], count) for each, count in listed)
        with self._lock:
            timed = [self._samples.get(outcome[:6], _Samples()) for outcome, _ in listed]
            samples = [(each.count, tuple(each.latest)) for each in timed]
        apart = rounded_up(tallies.intervals, coarse.larger)
        intervals = [apart.get(outcome, Spread()) for outcome, _ in listed]
        batches = [
            BatchCount(
                # An engine may count in NumPy's integers, which no file takes.
                num_reqs=index(outcome[1]),
                num_tokens=index(outcome[2]),
                query_len=None if outcome[3] is None else index(outcome[3]),
                past_prompt=bool(outcome[4]),
                active_loras=index(outcome[5]),
                steps=count,
                graph=None if outcome[6] is None else index(outcome[6]),
                reason=outcome[7],
                milliseconds=round(statistics.median(latest), 5) if latest else None,
                samples=times,
                interval=round(spread.mean, 5) if spread.count else None,
                intervals=spread.count,
                interval_error=None if spread.error is None else round(spread.error, 5),
            )
            for (outcome, count), (times, latest), spread in zip(listed, samples, intervals, strict=True)
        ]
        replays = Counter({graph: count for (each, graph), count in tallies.forgotten.items() if each is role.role})
        other_batches = replays.total() + coarse.lost.total()
        for outcome, count in own.items():
            replays[outcome[6]] += count
        graphs = (attrs.evolve(graph, replays=replays[number]) for number, graph in enumerate(role.graphs))
        return replace(
            role,
            graphs=tuple(graphs),
            batches=tuple(batches),
            rounded_batches=rounded,
            other_batches=other_batches,
            stalls=tallies.stalls[role.role],
        )

    def _room(self, outcome: Outcome) -> tuple[int, int]:
        """Return the requests and the tokens of the graph that served a batch, or else the limits."""
        base, (role, *_, graph, _) = self._base, outcome
        graphs = () if base is None else next((each.graphs for each in base.roles if each.role is role), ())
        entry = None if graph is None or graph >= len(graphs) else graphs[graph].entry
        reqs, tokens = (0, 0) if base is None else (base.limits.max_num_reqs, base.limits.max_num_tokens)
        return (reqs, tokens) if entry is None else (entry.num_reqs or reqs, entry.num_tokens)

    def close(self) -> None:
        """Write the file a last time, and stop; again, or in a fork, it does nothing."""
        if self._process == os.getpid() and not self._closed.is_set():
            self._closed.set()
            atexit.unregister(self.close)
            self._write()

    def _run(self) -> None:
        written = time.monotonic()
        while not self._closed.wait(min(self._every, 1.0)):
            self.gather()
            with self._lock:
                self._take()
            if time.monotonic() >= written + self._every:
                self._write()
                written = time.monotonic()

    def _write(self) -> None:
        """Write the file if something changed since it was written."""
        self.gather()
        with self._writing:
            with self._lock:
                self._take()
                changed, self._changed = self._changed, False
            if not changed:
                return
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                codec.write(self.path, codec.dumps_observed(self._fitting()))
            except Exception as error:  # The engine goes on, whatever is wrong with its observation.
                if not self._failed:
                    LOGGER.error("%s: the observation is not written: %s", self.path, error)
                self._failed = True

    def _fitting(self) -> dict[str, Any]:
        """Return the observation as plain data, with as many batches of each role as its file can have."""
        most = MAX_BATCHES
        data = codec.to_data(self._observation())
        while num_nodes(data) > MAX_NODES and most > 1:
            most //= 2
            data = codec.to_data(self._observation(most))
        return cast(dict[str, Any], data)

    def _take(self) -> None:
        """Count what is queued, and bound the memory: the rarest shapes are rounded up, or become a number of steps."""
        if self._queue or self._timed or self._apart:
            self._changed = True
        self._steps.update([self._queue.popleft() for _ in range(len(self._queue))])
        for timed in [self._timed.popleft() for _ in range(len(self._timed))]:
            samples = self._samples.setdefault(timed[:6], _Samples())
            samples.count += 1
            samples.latest.append(timed[6])
        self._intervals.add([self._apart.popleft() for _ in range(len(self._apart))])
        if len(self._steps) > MAX_SHAPES:
            coarse = coarsened(self._steps, MAX_SHAPES // 2, self._room)
            for outcome, steps in coarse.lost.items():
                self._forgotten[outcome[0], outcome[6]] += steps
            before = Counter({each: self._rounded[each] for each in coarse.steps if each in self._rounded})
            self._steps, self._rounded = coarse.steps, before + coarse.rounded
            self._intervals.round(coarse.larger, self._steps)
            for shape in self._samples.keys() - {outcome[:6] for outcome in self._steps}:
                del self._samples[shape]


def _graphs(base: Observation) -> dict[Role, list[object]]:
    """Return what indices into the graphs of each role mean."""
    return {role.role: [graph.entry for graph in role.graphs] for role in base.roles}
