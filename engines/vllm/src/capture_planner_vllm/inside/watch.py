"""What runs on every step of an observed vLLM: dispatch counts, sampled step times, accepted drafts.

A step adds tuples of the engine's own objects to a queue, and nothing else: between two steps the engine's work
empties the caches, so that each line of Python costs several times what it takes in a loop. The recorder's thread
reads the queue once a second. When each step began and was launched is logged, too (``pace``); its passes are timed
once in ``EVERY`` steps, by CUDA events that are read in a later step, when they have passed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

from capture_planner.engines.inside import PassClock
from capture_planner.measuring.coarsening import Outcome
from capture_planner.measuring.recorder import Recorder, StepSink
from capture_planner.modes import Role
from capture_planner_vllm.inside.observe_ranks import shares
from capture_planner_vllm.inside.pace import StepPace
from capture_planner_vllm.inside.steps import Dispatches, Pass, Track, Verifications

EVERY = 64
"""Number of steps of which one has its passes timed."""

SLICE = 512
"""Events that are read in one go, in less than a millisecond: the engine waits for the interpreter meanwhile."""

SCHEDULED, DISPATCHED, SPECIALIZED, SAMPLED, OUTPUT, VECTOR, IDLE = range(7)
"""What is logged: the first item of each tuple. What reads it in ``steps`` says what is behind."""


class StepWatch:
    """Follows the steps of one model runner, and passes to a sink what they dispatch, take and accept.

    The engine's functions ``log`` what they were called with and gave, with its kind, and ``flush``
    reads it. ``next(turns)`` says whether the passes of a step are timed; such a step also calls ``begin``, ``timed``
    with each dispatch, ``forward`` where the target's forward starts, ``forward_end`` behind it, and ``end`` when the
    drafter is done.
    """

    def __init__(
        self,
        tracks: Sequence[Track],
        sink: StepSink,
        event: Callable[[], Any],
        *,
        every: int = EVERY,
        bonus: int = 1,
        drafts: int = 0,
        ahead: int = 0,
        dummies: bool = False,
    ) -> None:
        """Follow the managers of ``tracks``.

        :param event: makes a ``torch.cuda.Event`` with timing.
        :param every: one step in so many is timed.
        :param bonus: the tokens that a request gets besides its accepted drafts.
        :param drafts: most drafts of a request that a step verifies; 0: steps verify none.
        :param ahead: how many steps the engine launches before it waits for the tokens of one (``StepPace``).
        :param dummies: whether dummy runs are steps too.
        """
        self.sink, self.drafts, self.dummies = sink, drafts, dummies
        self.ranks = max((track.ranks for track in tracks), default=1)
        self._events: deque[tuple[Any, ...]] = deque()  # its methods are atomic: any thread may log
        self.log = self._events.append
        self.lengths: Callable[[Iterable[int]], Sequence[int]] = bytes if drafts + bonus < 256 else tuple
        """Converter of the token counts that are logged; the smaller its result, the fewer caches it takes."""
        self.turns = cycle((*repeat(False, every - 1), True))
        self.timing = False
        """True while the current step is timed."""
        self._reading = threading.Lock()
        """Never taken by a step, except by one that ends the observation."""
        self._dispatches, self._verifications = Dispatches(tracks), Verifications(bonus)
        self._clock: PassClock[Pass] = PassClock(event)
        # Apart from the logged ones: timed dispatches are read at once, the others up to a second later.
        self._timed = Dispatches(tracks)
        self._target: Pass | None = None
        """The target's pass in a step that is timed."""
        self._pace = StepPace(ahead)
        self._vector: Any = None
        """The summed vector of the ranks for the dispatch that is logged next."""

    def begin(self, timing: bool) -> None:
        """Begin a step that is timed, or one after a step whose time has no end."""
        self.timing, self._target = timing, None
        # The last step may have ended in an error within a pass.
        self._clock.drop()
        self.read()

    def timed(self, event: tuple[Any, ...]) -> None:
        """Time a pass that was dispatched in a step that is timed; ``event`` is what was logged."""
        found = (self._timed.specialized if event[0] == SPECIALIZED else self._timed.dispatched)(event)
        if found is None:
            # The draft decodes wait for the length of their chain; the pass before them ends here.
            if self._timed.open:
                self._clock.stop()
        elif found[0][0] is Role.TARGET:
            self._target = found  # its forward begins later
        else:
            self._clock.start(found)

    def forward(self) -> None:
        """Start the time of the target's forward."""
        if self._target is not None:
            self._clock.start(self._target)

    def forward_end(self) -> None:
        """End the time of the target's forward."""
        self._clock.stop()

    def end(self) -> None:
        """End the time of the drafter's last pass."""
        self._clock.stop()
        self.timing = False

    def read(self) -> None:
        """Pass on the times that are there."""
        for passed, milliseconds in self._clock.passed():
            outcome, passes = passed
            # One pair of events spans all single steps of a chain, which count one by one.
            self.sink.sample(*outcome[:6], milliseconds / passes)

    def flush(self) -> None:
        """Read what is logged so far, and pass it on; from any thread.

        Other threads can run after each ``SLICE`` of it. After an error, which is raised, the rest is dropped.
        """
        with self._reading:
            try:
                while self._events:
                    self._read([self._events.popleft() for _ in range(min(SLICE, len(self._events)))])
                    if self._events:
                        time.sleep(1e-4)  # shorter, and the engine would wake up too late to have the interpreter
            # Later events depend on what could not be read, such as the target's batch.
            except Exception:
                self._events.clear()
                raise
            drafted, accepted = self._verifications.take()
        if any(drafted):
            self.sink.draft(drafted, accepted)

    def _read(self, events: Iterable[tuple[Any, ...]]) -> None:
        dispatches, dispatched, specialized = (
            self._dispatches,
            self._dispatches.dispatched,
            self._dispatches.specialized,
        )
        scheduled, sampled = self._verifications.scheduled, self._verifications.sampled
        accepted, pace = self._verifications.accepted, self._pace
        passes: list[Pass | None] = []
        intervals: list[tuple[Outcome, float]] = []
        for event in events:
            kind = event[0]
            if kind == DISPATCHED:
                passes.append(dispatched(event))
                pace.dispatched(passes[-1])
                if self._vector is not None:
                    self._shared(passes[-1])
            elif kind == SCHEDULED:
                scheduled(event)
                if (interval := pace.started(event[2], joined=event[3])) is not None:
                    intervals.append(interval)
            elif kind == SPECIALIZED:
                passes.append(specialized(event))
            elif kind == SAMPLED:
                sampled(event, dispatches.query_len)
                pace.launched(event[2])
            elif kind == OUTPUT:
                accepted(event)
            elif kind == VECTOR:
                self._vector = event[1]
            else:
                pace.interrupted()
                # With data parallelism a dummy run keeps an idle rank in the collectives of the others.
                if self.ranks > 1:
                    self.sink.idle()
        distinct = {id(each): each for each in passes}  # those that are alike are the same object
        for number, steps in Counter(map(id, passes)).items():
            if (each := distinct[number]) is not None:
                self.sink.add(each[0], steps)
        for outcome, seconds in intervals:
            self.sink.interval(outcome, seconds * 1e3)

    def _shared(self, passed: Pass | None) -> None:
        """Count the vector of a dispatch."""
        vector, self._vector = self._vector, None
        if passed is not None:
            role, *_, graph, reason = passed[0]
            self.sink.vector((role, shares(vector.tolist()), graph, reason))


class StepRecorder(Recorder):
    """Records what its ``watch`` sees."""

    def __init__(
        self,
        folder: Path,
        name: str,
        every: float,
        watch: Callable[[StepSink], StepWatch],
        failed: Callable[[str, Exception], None],
    ) -> None:
        """Record steps.

        :param watch: makes the watch, whose sink this is.
        :param failed: called where what was logged cannot be read.
        """
        super().__init__(folder, name, every)
        self.watch = watch(self)
        self._end = failed
        self._ended = False

    def gather(self) -> None:
        """Read the steps that were logged, until that fails."""
        try:
            if not self._ended:
                self.watch.flush()
        except Exception as error:
            # Once: the recorder asks again every second.
            self._ended = True
            self._end("reading steps", error)
