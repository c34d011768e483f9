"""The state machine: any scene, and any order of arrivals, departures, moves, reloads and steps.

Each rule draws the next step, and ``steps`` runs and checks it. The steps are recorded as a case, so that a
failing one can be minimized, written down and run again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.strategies import SearchStrategy

from capture_planner_conformance.deployments import DRAFTERS, LARGEST_REQS, MOST_DRAFTS, MOST_REQS, scenes
from capture_planner_conformance.failure import Failure, Violation
from capture_planner_conformance.scene import (
    Arrive,
    Case,
    Depart,
    DraftScheme,
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
from capture_planner_conformance.stage import Stage, Subject
from capture_planner_conformance.steps import admits, run_step
from capture_planner_conformance.tampering import Tampering
from capture_planner_conformance.watch import Watch
from capture_planner_conformance.world import LiveRequest
from capture_planner_runner.execution.inputs import ForwardStep
from capture_planner_runner.execution.role import RoleRun

STOPS = (0, 0, 0, 5)
"""Multiples of these end the outputs of a load; 0: no token does."""


def _unwatched(log: Log) -> None:
    """Do nothing. A lambda could not be sent to another process."""


@attrs.define
class Log:
    """Progress of a search, and its last violation."""

    examples: int = 0
    steps: Counter[str] = attrs.Factory(Counter)
    forwards: Counter[str] = attrs.Factory(Counter)
    """By role and mode: the mode of the graph, or NONE."""
    largest: tuple[int, int] = (0, 0)
    """The most requests and the most tokens of a batch; not always of the same."""
    padded: int = 0
    """Forwards of graphs that are larger than their batch."""
    longest: int = 0
    """The most keys of a request."""
    pages: int = 0
    """The highest number of a page that a batch reads."""
    most_steps: int = 0
    """The most steps of a scene."""
    features: Counter[str] = attrs.Factory(Counter)
    """Scenes by the features that they have."""
    refused: dict[str, str] = attrs.Factory(dict)
    """Features that the backend refuses, with its reasons."""
    violation: Violation | None = None
    shapes: tuple[Shape, ...] = ()
    """Shapes that the backend runs, once they are known."""
    on_change: Callable[[Log], None] = _unwatched
    """Called at each example."""

    def begin(self) -> None:
        """Count an example."""
        self.examples += 1
        self.on_change(self)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Note features that no scene has, with the backend's reasons."""
        self.refused.update(reasons)

    def end(self, scene: Scene, steps: int) -> None:
        """Count the features of a scene that was run, and its steps."""
        self.features.update(scene.feature_names)
        self.most_steps = max(self.most_steps, steps)

    def fail(self, violation: Violation) -> None:
        """Note the last violation."""
        self.violation = violation

    def add(self, watch: Watch) -> None:
        self.forwards.update(watch.ran)
        self._add(watch)

    def merge(self, part: Log) -> None:
        """Add what another process logged, scene by scene for who watches."""
        for _ in range(part.examples):
            self.begin()
        self.steps.update(part.steps)
        self.forwards.update(part.forwards)
        self.features.update(part.features)
        self.most_steps = max(self.most_steps, part.most_steps)
        self.violation = part.violation
        self._add(part)

    def _add(self, other: Watch | Log) -> None:
        (reqs, tokens), (more_reqs, more_tokens) = self.largest, other.largest
        self.largest = max(reqs, more_reqs), max(tokens, more_tokens)
        self.padded += other.padded
        self.longest, self.pages = max(self.longest, other.longest), max(self.pages, other.pages)


_with_requests = precondition(lambda self: bool(self._live()))


class ConformanceMachine(RuleBasedStateMachine):
    """Subclass it with ``subject``, ``shapes`` and ``log``; Hypothesis runs it like any state machine."""

    subject: ClassVar[Subject]
    shapes: ClassVar[Sequence[Shape]]
    drafts: ClassVar[Sequence[int]] = tuple(range(MOST_DRAFTS + 1))
    largest: ClassVar[int] = LARGEST_REQS
    features: ClassVar[Collection[str] | None] = None
    drafters: ClassVar[Sequence[DraftScheme]] = DRAFTERS
    log: ClassVar[Log]

    _scene: Scene
    _stage: Stage

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Step] = []
        self._shapes: list[tuple[tuple[int, bool], ...]] = []

    @initialize(data=st.data())
    def set_up(self, data: st.DataObject) -> None:
        """Reserve the backend, and capture all entries of a random plan."""
        self.log.begin()
        make, drafts = self.subject.stage, self.drafts
        given = (self.shapes, drafts, self.largest, self.features, self.drafters, make.scene_type)
        drawn = scenes(*given, self.subject.kernel_sizes.num_reqs)
        self._scene = data.draw(drawn, label="scene")
        with self._recorded():
            self._stage = make(self.subject, self._scene)
        most = self._scene.num_reqs
        # A large scene is about its number of requests: with fewer it would be a small one.
        is_large = most > MOST_REQS
        count = st.just(most) if is_large else st.one_of(st.just(most), st.integers(1, most))
        for _ in range(data.draw(count, label="requests")):
            self.arrive(data, is_decode=is_large or None)
        if is_large:
            self.advance_all(data)

    # Hypothesis draws rules evenly: forwards, which matter most, have five.
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
            # A chunk ends with its prompt: what follows is a decode.
            most = live.prompt - live.computed if live.computed < live.prompt else 1 + scene.drafts
            most = min(most, left - scene.extra_slots, scene.shape.longest - live.computed)
            if most < 0:
                break
            count = data.draw(st.one_of(st.just(most), st.integers(0, most)), label="tokens")
            accepted = data.draw(st.integers(0, max(count - 1, 0)), label="accepted")
            rows.append((live.number, count, accepted))
            # The draft prefill may have more rows of a request than the target.
            left -= count + scene.extra_slots
        # The planner admits no batch of fewer tokens than requests, even if some rows are empty.
        if sum(count for _, count, _ in rows) >= len(rows) > 0:
            self._run(data, rows)

    @precondition(lambda self: bool(self._shapes))
    @rule(data=st.data())
    def recur(self, data: st.DataObject) -> None:
        """The shape of an earlier step comes back, after others; requests that are at their end make room."""
        shape = data.draw(st.sampled_from(self._shapes), label="shape")
        left, rows = list(data.draw(st.permutations(self._live()), label="order")), []
        for count, is_decode in shape:
            live = next((live for live in left if self._takes(live, count, is_decode)), None)
            if live is not None:
                left.remove(live)
            else:
                live = self._renewed(data, left, count, is_decode)
                if live is None:
                    return
            accepted = data.draw(st.integers(0, max(count - 1, 0)), label="accepted") if is_decode else 0
            rows.append((live.number, count, accepted))
        if admits(self._stage, [(self._stage.live[number], count, 0) for number, count, _ in rows]):
            self._run(data, rows)

    def _takes(self, live: LiveRequest, count: int, is_decode: bool) -> bool:
        """Say whether a request can have a row of so many tokens."""
        room = self._scene.shape.longest if is_decode else live.prompt
        return (live.computed >= live.prompt) is is_decode and live.computed + count <= room

    def _renewed(self, data: st.DataObject, left: list[LiveRequest], count: int, is_decode: bool) -> LiveRequest | None:
        """Let a request arrive that can have a row of so many tokens, in the place of one of ``left``."""
        if len(self._live()) >= self._scene.num_reqs:
            if not left:
                return None
            self._do(Depart(request=left.pop().number))
        longest = self._scene.shape.longest
        length = data.draw(self._lengths(), label="length")
        # A decode needs room behind its prompt; a chunk must fit into it.
        length = min(length, longest - count) if is_decode else max(length, count)
        before = set(self._stage.live)
        self._do(Arrive(prompt=length, computed=length if is_decode else 0))
        return next((live for live in self._live() if live.number not in before), None)

    @precondition(lambda self: len(self._live()) < self._scene.num_reqs)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject, is_decode: bool | None = None) -> None:
        """A request arrives: anywhere in its prompt or past it, sharing a prefix or not."""
        lengths = self._lengths()
        # Also a prompt as long as a decode, which it must not be taken for (law 5).
        prompt = data.draw(st.one_of(lengths, st.just(1 + self._scene.drafts)), label="prompt")
        if is_decode:
            # One request at its end keeps all from decoding together, and one of many would be there nearly always.
            prompt = max(1, min(prompt, self._scene.shape.longest - 2 * self._scene.decode_width))
        shares = data.draw(st.sampled_from([None, *self._stage.live]), label="shares")
        ends = st.just(prompt) if is_decode else st.one_of(st.just(prompt), st.just(0), lengths)
        computed = data.draw(ends, label="computed")
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

    @rule(seed=st.integers(8, 15))  # scenes have 0 to 7, so weights change
    def reload(self, seed: int) -> None:
        self._do(Reload(seed=seed))

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """Requests are served to their end; some are as long as the model, some one token longer, some stop early."""
        longest = self._scene.shape.longest
        one = st.tuples(self._lengths(), st.one_of(st.integers(1, 6), st.integers(1, longest)), st.integers(0, 3))
        # Requests as long as the model, so that pages run out and others wait for them.
        if self._scene.full_cache:
            one = st.one_of(st.integers(1, 6).map(lambda output: (longest - output, output, 0)), one)
        least = 2 if self._scene.full_cache else 1
        requests = data.draw(st.lists(one, min_size=least, max_size=4), label="requests")
        self._do(Serve(requests=tuple(requests), stop=data.draw(st.sampled_from(STOPS), label="stop")))

    def teardown(self) -> None:
        """Release the backend, unless the set-up failed."""
        # Hypothesis also calls this where the set-up was rejected.
        if hasattr(self, "_stage"):
            self.log.add(self._stage.watch)
            self.log.end(self._scene, len(self._steps))
            self._stage.close()

    def _decode(self, data: st.DataObject, count: int) -> None:
        """Run a decode of up to so many requests that are past their prompt, uniform unless the scene's vary."""
        able = [live for live in self._live() if live.computed >= live.prompt]
        rows = list(data.draw(st.permutations(able), label="order"))[:count]
        while rows:
            k = self._stage.draft_tokens(len(rows))
            if admits(self._stage, [(live, 1 + k, 0) for live in rows]):
                drafts = st.one_of(st.just(k), st.integers(0, k)) if self._scene.varying else st.just(k)
                drawn = [(live.number, data.draw(drafts, label="drafts")) for live in rows]
                self._run(data, [(n, 1 + d, data.draw(st.integers(0, d), label="accepted")) for n, d in drawn])
                return
            # Fewer requests may have another K by the schedule, so it is asked again.
            rows = rows[1:]
        # No decode fits, so run any rows that the limits admit.
        self.advance_mixed(data)

    def _run(self, data: st.DataObject, rows: Sequence[tuple[int, int, int]]) -> None:
        live = self._stage.live
        shape = tuple((count, live[number].computed >= live[number].prompt) for number, count, _ in rows)
        # Kept for ``recur``; a scene has few shapes, so a list is fast enough.
        if shape not in self._shapes:
            self._shapes.append(shape)
        most = self._stage.most_loras(len(rows))
        loras = data.draw(st.integers(0, most), label="loras") if most else 0
        self._do(RunBatch(rows=tuple(rows), loras=loras))

    def _lengths(self) -> SearchStrategy[int]:
        return _lengths(self._scene, self.subject.kernel_sizes.num_keys)

    def _live(self) -> list[LiveRequest]:
        return list(self._stage.live.values())

    def _one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self._live()), label="request").number

    def _do(self, step: Step) -> None:
        # Before it runs, so that the step that fails is part of the case.
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


def _lengths(scene: Scene, sizes: Sequence[int] = ()) -> SearchStrategy[int]:
    """Return lengths of sequences, the interesting ones often: around pages, ``sizes`` and the longest."""
    size, longest = scene.shape.page_size, scene.shape.longest
    edges = {1, size, size + 1, 2 * size, longest - 1 - scene.drafts, longest - 2, longest - 1, longest}
    # Kernels split keys at their own sizes, and go wrong next to them.
    edges |= {each + more for each in sizes for more in (-1, 0, 1)}
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


def play(
    subject: Subject,
    case: Case,
    *,
    spared: Sequence[str] = (),
    tampering: Tampering | None = None,
    after: Callable[[Stage, RoleRun, ForwardStep], None] | None = None,
) -> PlayResult:
    """Run a case from its beginning, up to the first failure; ``spared`` and what follows as of ``Stage``."""
    log, skipped, failure = Log(examples=1), [], None
    try:
        with subject.stage(subject, case.scene, spared=spared, tampering=tampering, after=after) as stage:
            try:
                for number, step in enumerate(case.steps, 1):
                    if run_step(stage, step):
                        log.steps[step_name(step)] += 1
                    else:
                        skipped.append(number)
            finally:
                log.add(stage.watch)
                log.end(case.scene, len(case.steps))
    except Exception as error:
        failure = Violation.of(error, case=dumps(case)).failure
    return PlayResult(failure=failure, log=log, skipped=tuple(skipped))
