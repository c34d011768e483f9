"""The state machine: any scene, and any order of arrivals, departures, moves, reloads and steps.

Each rule draws the next step, and ``steps`` runs and checks it. The steps are recorded as a case, so that a
failing one can be minimized, written down and run again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner.conformance.capture_attack import CaptureAttack
from capture_planner.conformance.failure import Failure, Violation
from capture_planner.conformance.scene import (
    Arrive,
    Case,
    Depart,
    Move,
    Reload,
    RunBatch,
    Scene,
    Serve,
    Shape,
    Step,
    dumps,
    step_name,
)
from capture_planner.conformance.stage import Stage
from capture_planner.conformance.steps import admits, run_step
from capture_planner.conformance.subject import Subject
from capture_planner.conformance.tampering import Tampering
from capture_planner.conformance.watch import Watch
from capture_planner.conformance.world import LiveRequest
from capture_planner.modes import GraphMode

MOST_REQS, MOST_DRAFTS = 5, 5
MODES = (
    GraphMode.FULL_AND_PIECEWISE,
    GraphMode.FULL,
    GraphMode.FULL_DECODE_ONLY,
    GraphMode.FULL_AND_PIECEWISE,
    GraphMode.FULL,
    GraphMode.PIECEWISE,
    GraphMode.FULL_AND_PIECEWISE,
)
"""Modes to draw from: those that pad requests more often, since they show most."""


@st.composite
def scenes(draw: DrawFn, shapes: Sequence[Shape], drafts: Sequence[int] = tuple(range(MOST_DRAFTS + 1))) -> Scene:
    """Return any small deployment: mode, limits, sizes that leave much padding, drafter and schedule."""
    # Padding on both axes needs several requests, and a chain several drafts: these are drawn more often.
    num_reqs = draw(st.sampled_from((*range(2, MOST_REQS + 1), 1)))
    several = [k for k in drafts if k > 1] or list(drafts)
    k = draw(st.one_of(st.sampled_from(several), st.sampled_from(drafts)))
    # Token limits with and without room for a decode of all requests.
    decodes = num_reqs * (1 + k)
    tight, roomy = st.integers(max(num_reqs, 1 + k), 24 + num_reqs), st.integers(decodes, decodes + 8)
    num_tokens = draw(st.one_of(tight, roomy))
    explicit = draw(st.integers(0, 3)) > 0
    # Sizes of mixed batches close to sizes of decodes, so that the nearest graph is not always the best.
    close = [size for r in range(num_reqs) for size in range((r + 1) * (1 + k) - 1, (r + 1) * (1 + k) + 2)]
    near = st.sampled_from([size for size in close if 1 <= size <= num_tokens])
    some = st.sets(st.one_of(st.integers(1, num_tokens), near), min_size=1, max_size=3)
    few = st.sets(st.integers(1, num_reqs), min_size=1, max_size=2)
    scheduled = k > 1 and num_reqs > 1 and draw(st.integers(0, 2)) > 0
    return Scene(
        shape=draw(st.sampled_from(shapes)),
        mode=draw(st.sampled_from(MODES)),
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        layers=draw(st.integers(1, 2)),
        size_tokens=tuple(sorted(draw(some) | {num_tokens})) if explicit else (),
        size_reqs=tuple(sorted(draw(st.one_of(st.just(set()), few)) | {num_reqs})) if explicit else (),
        drafts=k,
        schedule=draw(schedules(k, num_reqs)) if scheduled else (),
        eagle3=draw(st.booleans()),
        fused=draw(st.booleans()),
        per_role=draw(st.booleans()),
        ahead=draw(st.booleans()),
        capture=draw(capture_attacks()),
        full_cache=draw(st.integers(0, 4)) == 4,
        seed=draw(st.integers(0, 7)),
    )


@st.composite
def capture_attacks(draw: DrawFn) -> CaptureAttack:
    """Return how a session goes: in any order; now and then broken off once, or with memory for a graph a role."""
    trouble = draw(st.integers(0, 11))
    return CaptureAttack(
        order=draw(st.one_of(st.just(0), st.integers(1, 9))),
        alone=draw(st.integers(1, 12)) if trouble > 8 else 0,
        breaks=draw(st.integers(1, 12)) if trouble in (7, 8) else 0,
        stays_eager=trouble == 8,
    )


@st.composite
def schedules(draw: DrawFn, k: int, num_reqs: int) -> tuple[tuple[int, int, int], ...]:
    """Return tiers of requests, each with a number of drafts of its own, K among them."""
    starts = sorted(draw(st.sets(st.integers(2, num_reqs), min_size=1, max_size=2)) | {1})
    fewer = draw(st.permutations(range(k)))[: len(starts) - 1]
    drafts = draw(st.permutations([k, *fewer]))
    ends = [start - 1 for start in starts[1:]]
    return tuple(zip(starts, [*ends, num_reqs], drafts, strict=True))


@attrs.define
class Log:
    """Progress of a search, and its last violation."""

    examples: int = 0
    steps: Counter[str] = attrs.Factory(Counter)
    forwards: Counter[str] = attrs.Factory(Counter)
    """By role and mode: the mode of the graph, or NONE."""
    largest: tuple[int, int] = (0, 0)
    """The most requests and the most tokens of a batch; not always of the same."""
    violation: Violation | None = None
    shapes: tuple[Shape, ...] = ()
    """Shapes that the backend runs, once they are known."""
    on_change: Callable[[Log], None] = lambda log: None
    """Called at each example."""

    def begin(self) -> None:
        """Count an example."""
        self.examples += 1
        self.on_change(self)

    def fail(self, violation: Violation) -> None:
        """Note the last violation."""
        self.violation = violation

    def add(self, watch: Watch) -> None:
        self.forwards.update(watch.ran)
        self.largest = tuple(map(max, self.largest, watch.largest))  # type: ignore[assignment]


_with_requests = precondition(lambda self: bool(self._live()))


class ConformanceMachine(RuleBasedStateMachine):
    """Subclass it with ``subject``, ``shapes`` and ``log``; Hypothesis runs it like any state machine."""

    subject: ClassVar[Subject]
    shapes: ClassVar[Sequence[Shape]]
    drafts: ClassVar[Sequence[int]] = tuple(range(MOST_DRAFTS + 1))
    log: ClassVar[Log]

    _scene: Scene
    _stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Step] = []

    @initialize(data=st.data())
    def set_up(self, data: st.DataObject) -> None:
        """Reserve the backend, and capture all entries of a random plan."""
        self.log.begin()
        self._scene = data.draw(scenes(self.shapes, self.drafts), label="scene")
        with self._recorded():
            self._stage = Stage(self.subject, self._scene)
        most = self._scene.num_reqs
        for _ in range(data.draw(st.one_of(st.just(most), st.integers(1, most)), label="requests")):
            self.arrive(data)

    # Hypothesis draws rules evenly: forwards, which matter most, have four.
    @_with_requests
    @rule(data=st.data())
    def advance_all(self, data: st.DataObject) -> None:
        """All requests past their prompt decode, as in most steps of an engine."""
        self._decode(data, len(self._live()))

    @_with_requests
    @rule(data=st.data())
    def advance_alone(self, data: st.DataObject) -> None:
        """One request decodes: much padding, after a larger batch."""
        self._decode(data, 1)

    @_with_requests
    @rule(data=st.data())
    def advance_some(self, data: st.DataObject) -> None:
        self._decode(data, data.draw(st.integers(1, len(self._live())), label="rows"))

    @_with_requests
    @rule(data=st.data())
    def advance_mixed(self, data: st.DataObject) -> None:
        """Prompt chunks, decodes of any length, and rows without a token, as far as the limits admit them."""
        scene, rows = self._scene, []
        left = scene.num_tokens
        for live in data.draw(st.permutations(self._live()), label="order"):
            most = live.prompt - live.computed if live.computed < live.prompt else 1 + scene.drafts
            most = min(most, left, scene.shape.longest - live.computed)
            if most < 0:
                break
            count = data.draw(st.one_of(st.just(most), st.integers(0, most)), label="tokens")
            accepted = data.draw(st.integers(0, max(count - 1, 0)), label="accepted")
            rows.append((live.number, count, accepted))
            left -= count
        if sum(count for _, count, _ in rows) >= len(rows) > 0:
            self._do(RunBatch(rows=tuple(rows)))

    @precondition(lambda self: len(self._live()) < self._scene.num_reqs)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """A request arrives: anywhere in its prompt or past it, sharing a prefix or not."""
        lengths = _lengths(self._scene)
        prompt = data.draw(st.one_of(lengths, st.just(1 + self._scene.drafts)), label="prompt")
        shares = data.draw(st.sampled_from([None, *self._stage.live]), label="shares")
        computed = data.draw(st.one_of(st.just(prompt), st.just(0), lengths), label="computed")
        self._do(Arrive(prompt=prompt, computed=computed, shares=shares))

    @_with_requests
    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        """A request leaves; its pages are poisoned, then reused."""
        self._do(Depart(request=self._one(data)))

    @_with_requests
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """The block table of a request is shuffled."""
        self._do(Move(request=self._one(data)))

    @rule(seed=st.integers(8, 15))
    def reload(self, seed: int) -> None:
        self._do(Reload(seed=seed))

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """Requests are served to their end; some are as long as the model, some one token longer."""
        one = st.tuples(_lengths(self._scene), st.integers(1, 6), st.integers(0, 3))
        if self._scene.full_cache:
            longest = self._scene.shape.longest
            one = st.one_of(st.integers(1, 6).map(lambda output: (longest - output, output, 0)), one)
        self._do(Serve(requests=tuple(data.draw(st.lists(one, min_size=1, max_size=4), label="requests"))))

    def teardown(self) -> None:
        """Release the backend, unless the set-up failed."""
        if hasattr(self, "_stage"):
            self.log.add(self._stage.watch)
            self._stage.close()

    def _decode(self, data: st.DataObject, count: int) -> None:
        """Run a uniform decode of up to so many requests that are past their prompt."""
        able = [live for live in self._live() if live.computed >= live.prompt]
        rows = list(data.draw(st.permutations(able), label="order"))[:count]
        while rows:
            k = self._stage.draft_tokens(len(rows))
            if admits(self._stage, [(live, 1 + k, 0) for live in rows]):
                accepted = st.integers(0, k)
                drawn = tuple((live.number, 1 + k, data.draw(accepted, label="accepted")) for live in rows)
                self._do(RunBatch(rows=drawn))
                return
            rows = rows[1:]
        self.advance_mixed(data)

    def _live(self) -> list[LiveRequest]:
        return list(self._stage.live.values())

    def _one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self._live()), label="request").number

    def _do(self, step: Step) -> None:
        self._steps.append(step)
        self.log.steps[step_name(step)] += 1
        with self._recorded():
            run_step(self._stage, step)

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Raise any error as a violation with its case."""
        try:
            yield
        except Exception as error:
            case = dumps(Case(scene=self._scene, steps=tuple(self._steps)))
            violation = Violation.of(error, case=case)
            self.log.fail(violation)
            raise violation from error


def _lengths(scene: Scene) -> SearchStrategy[int]:
    """Return lengths of sequences, the interesting ones often: around pages, and around the longest."""
    size, longest = scene.shape.page_size, scene.shape.longest
    edges = {1, size, size + 1, 2 * size, longest - 1 - scene.drafts, longest - 2, longest - 1, longest}
    special = sorted(edge for edge in edges if 1 <= edge <= longest)
    return st.one_of(st.integers(1, min(12, longest)), st.sampled_from(special), st.integers(1, longest))


@attrs.frozen(kw_only=True)
class PlayResult:
    """The outcome of a case."""

    failure: Failure | None
    """What does not hold, with the case in it."""
    log: Log
    """Of the steps that were run."""
    skipped: tuple[int, ...]
    """Steps that did not apply, counted from 1."""


def play(subject: Subject, case: Case, *, spared: Sequence[str] = (), tampering: Tampering | None = None) -> PlayResult:
    """Run a case from its beginning, up to the first failure; ``spared`` and ``tampering`` as of ``Stage``."""
    log, skipped, failure = Log(examples=1), [], None
    try:
        with Stage(subject, case.scene, spared=spared, tampering=tampering) as stage:
            try:
                for number, step in enumerate(case.steps, 1):
                    if run_step(stage, step):
                        log.steps[step_name(step)] += 1
                    else:
                        skipped.append(number)
            finally:
                log.add(stage.watch)
    except Exception as error:
        failure = Violation.of(error, case=dumps(case)).failure
    return PlayResult(failure=failure, log=log, skipped=tuple(skipped))
