"""What runs on every step of an observed vLLM: dispatch counts, sampled step times, accepted drafts.

The hot path adds a few dictionary look-ups to a step: no tensor operation, no synchronisation, no Python object
per request. A step is timed once in ``EVERY``; its CUDA events are read in a later step, when they have passed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import attrs

from capture_planner.engines.probe import why_eager
from capture_planner.measuring.recorder import Recorder, StepSink
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import draft_steps
from capture_planner.records.model import Speculative
from capture_planner.records.observation import Observation, ObservedGraph
from capture_planner_vllm import device

EVERY = 64
"""One step in so many is timed."""

_TARGET = Role.TARGET

Shape = tuple[int, int, int | None, bool, int]
"""num_reqs, num_tokens, query_len, past_prompt, active_loras: as in ``Batch``."""

Drafts = int | Mapping[str, Sequence[int]]
"""The drafts that a step verifies: the same number for every request, or those of each."""


@attrs.frozen(eq=False, kw_only=True)
class Track:
    """One role's manager, and which of its graphs a descriptor means."""

    role: Role
    mode: GraphMode
    """As resolved."""
    manager: Any
    """The engine's ``CudaGraphManager``."""
    graphs: tuple[ObservedGraph, ...] = ()
    keys: Mapping[Any, int] = attrs.field(factory=dict)
    """The descriptor of each graph, and the graph's index."""
    specialized: bool = False
    """Whether ``specialize_spec_tokens`` has the last word on its answers: draft decodes of a chain."""
    fused: bool = False
    """Whether one replay runs all draft decodes of a step."""
    speculative: Speculative | None = None
    ranks: int = 1
    """Data-parallel ranks."""
    _kinds: dict[int | None, list[ObservedGraph]] = attrs.field(init=False, factory=dict)
    """The graphs for decodes of a query length; None: for other batches."""
    _ids: dict[int, int] = attrs.field(init=False)
    _reasons: dict[Shape, Reason] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_ids", {id(key): index for key, index in self.keys.items()})

    def graph(self, descriptor: Any) -> int | None:
        """Return the index of the graph that a descriptor names; None for an eager one."""
        # The table's own objects answer by identity: hashing a descriptor takes a microsecond.
        index = self._ids.get(id(descriptor))
        if index is None and descriptor.cg_mode:
            return self.keys.get(descriptor)
        return index

    def reason(self, shape: Shape) -> Reason:
        """Return why a batch has no graph."""
        reason = self._reasons.get(shape)
        if reason is None:
            if len(self._reasons) > 1 << 14:
                self._reasons.clear()
            reason = self._reasons[shape] = self._reason(shape)
        return reason

    def _reason(self, shape: Shape) -> Reason:
        num_reqs, num_tokens, query_len, past_prompt, active_loras = shape
        batch = Batch(
            role=self.role,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            query_len=query_len,
            past_prompt=past_prompt,
            active_loras=active_loras,
        )
        reason = self.why_eager(batch)
        if reason is Reason.SHADOWED:
            answer = self.manager.dispatch(num_reqs, num_tokens, batch.uniform_query_len, active_loras)
            if answer.cg_mode:
                # The dispatcher has a graph, and the step ran eager: so did another rank, or the engine wanted it.
                return Reason.RANK if self.ranks > 1 else Reason.UNKNOWN
        return reason

    def why_eager(self, batch: Batch) -> Reason:
        """Return why a batch has no graph, as far as the captured graphs and the mode say."""
        uniform = batch.uniform_query_len
        if uniform not in self._kinds:
            self._kinds[uniform] = [graph for graph in self.graphs if graph.entry.query_len in (None, uniform)]
        steps = draft_steps(self.role, batch.num_reqs, self.speculative)
        return why_eager(batch, self.mode, self._kinds[uniform], steps)


class Clock:
    """Times of sampled passes by CUDA events, read without waiting."""

    def __init__(self, event: Callable[[], Any]) -> None:
        """``event`` makes a ``torch.cuda.Event`` with timing."""
        self._event = event
        self._open: tuple[Any, Any] | None = None
        self._pending: list[tuple[Any, Any, Any]] = []

    def start(self, key: Any) -> None:
        """Begin the time of a pass, and end that of the pass before it."""
        self.stop()
        event = self._event()
        event.record()
        self._open = key, event

    def stop(self) -> None:
        """End the time of the open pass, if there is one."""
        if self._open is not None:
            (key, start), self._open = self._open, None
            end = self._event()
            end.record()
            self._pending.append((key, start, end))

    def drop(self) -> None:
        """Forget the open pass."""
        self._open = None

    def passed(self) -> Iterator[tuple[Any, float]]:
        """Yield key and milliseconds of each time that the device is done with."""
        pending, self._pending = self._pending, []
        for key, start, end in pending:
            if end.query():
                yield key, start.elapsed_time(end)
            else:
                self._pending.append((key, start, end))


class StepWatch:
    """Follows the steps of one model runner, and passes to a sink what they dispatch, take and accept.

    A step calls ``begin``, then for each role ``dispatched`` and, of draft decodes, ``specialized``; ``forward``
    where the target's forward starts, ``forward_end`` behind it, and ``end`` when the drafter is done.
    """

    def __init__(
        self,
        tracks: Sequence[Track],
        sink: StepSink,
        event: Callable[[], Any],
        *,
        every: int = EVERY,
        bonus: int = 1,
        dummies: bool = False,
    ) -> None:
        """Follow the managers of ``tracks``.

        :param event: makes a ``torch.cuda.Event`` with timing.
        :param every: one step in so many is timed.
        :param bonus: the tokens that a request gets besides its accepted drafts.
        :param dummies: whether dummy runs are steps too.
        """
        self.sink, self.dummies = sink, dummies
        self._tracks = {id(track.manager): track for track in tracks}
        self._clock, self._every, self._bonus = Clock(event), every, bonus
        self._step = 0
        self._lock = threading.Lock()
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._uniform: dict[int, Counter[int]] = {}
        self._timing = False
        self._target: tuple[int, int | None, bool] | None = None
        """The target's tokens, query length, and whether all are past their prompts."""
        self._decode: tuple[Track, int] | None = None
        """The draft decodes that were dispatched, and their requests."""
        self._timed: tuple[Role, Shape, int] | None = None
        """The target's batch in a step that is timed."""

    def begin(self) -> None:
        """Start a step."""
        self._target = self._decode = None
        self._step += 1
        self._timing = self._step % self._every == 0
        if self._timing:
            self._timed = None
            self._clock.drop()
            self.read()

    def dispatched(
        self, manager: Any, num_reqs: int, num_tokens: int, query_len: int | None, rest: Mapping[str, Any], answer: Any
    ) -> None:
        """Count the final answer of a dispatch; ``rest`` has its keyword arguments."""
        track = self._tracks.get(id(manager))
        if track is None:
            return
        role, past_prompt, active_loras = track.role, query_len is not None, 0
        if query_len is not None:
            query_len = int(query_len)  # drafters count with numpy
            num_tokens = num_reqs * query_len
        if role is _TARGET:
            active_loras = rest.get("num_active_loras", 0)
            past_prompt = past_prompt or rest.get("max_query_len") is not None
            self._target = num_tokens, query_len, past_prompt
        elif query_len is None and self._target is not None:
            # The drafter dispatches the target's padded tokens; a batch has the real ones.
            num_tokens, _, past_prompt = self._target
        if track.specialized:
            self._decode = track, num_reqs
            if self._timing:
                self._clock.stop()
        else:
            self._count(track, answer, (num_reqs, num_tokens, query_len, past_prompt, active_loras), 1)

    def specialized(self, answer: Any, draft_tokens: int) -> None:
        """Count the final answer for the draft decodes of a step."""
        if self._decode is not None:
            (track, num_reqs), self._decode = self._decode, None
            passes = 1 if track.fused else max(draft_tokens - 1, 1)
            self._count(track, answer, (num_reqs, num_reqs, 1, True, 0), passes)

    def _count(self, track: Track, answer: Any, shape: Shape, passes: int) -> None:
        graph = track.graph(answer)
        role = track.role
        self.sink.count(role, *shape, graph, track.reason(shape) if graph is None else None)
        if self._timing:
            key = role, shape, passes
            if role is _TARGET:
                self._timed = key  # its forward begins later
            else:
                self._clock.start(key)

    def forward(self) -> None:
        """Start the time of the target's forward."""
        if self._timing and self._timed is not None:
            self._clock.start(self._timed)

    def forward_end(self) -> None:
        """End the time of the target's forward."""
        if self._timing:
            self._clock.stop()

    def end(self) -> None:
        """End the time of the drafter's last pass."""
        if self._timing:
            self._clock.stop()
            self._timing = False

    def read(self) -> None:
        """Pass on the times that are there."""
        key: tuple[Role, Shape, int]
        for key, milliseconds in self._clock.passed():
            role, shape, passes = key
            self.sink.sample(role, *shape, milliseconds / passes)

    def drafts(self, scheduled: Mapping[str, Sequence[int]]) -> Drafts | None:
        """Return the drafts that this step verifies, for ``accepted``; None if there are none.

        :param scheduled: the drafts by request.
        """
        if not scheduled:
            return None
        query_len = None if self._target is None else self._target[1]
        return scheduled if query_len is None else query_len - 1

    def accepted(self, drafts: Drafts, requests: Iterable[str], tokens: Iterable[Sequence[int]]) -> None:
        """Count the drafts of a step.

        :param requests: the requests of the step.
        :param tokens: the tokens that each of them got.
        """
        with self._lock:
            if isinstance(drafts, int):
                self._uniform.setdefault(drafts, Counter()).update(map(len, tokens))
            else:
                proposed = map(len, map(drafts.get, requests, repeat(())))
                self._pairs.update(zip(proposed, map(len, tokens), strict=False))

    def flush(self) -> None:
        """Pass on the drafts that were counted, by position; from any thread."""
        with self._lock:
            pairs, self._pairs = self._pairs, Counter()
            uniform, self._uniform = self._uniform, {}
        for proposed, counts in uniform.items():
            pairs.update({(proposed, sampled): count for sampled, count in counts.items()})
        most = max((proposed for proposed, _ in pairs), default=0)
        drafted, accepted = [0] * most, [0] * most
        for (proposed, sampled), count in pairs.items():
            if sampled or not self._bonus:  # a part of a prompt samples nothing, and verifies nothing
                for position in range(proposed):
                    drafted[position] += count
                for position in range(min(proposed, sampled - self._bonus)):
                    accepted[position] += count
        if any(drafted):
            self.sink.draft(drafted, accepted)


class StepRecorder(Recorder):
    """Records what its ``watch`` sees, whose drafts are in every observation."""

    def __init__(self, folder: Path, name: str, every: float, tracks: Sequence[Track], bonus: int) -> None:
        super().__init__(folder, name, every)
        self.watch = StepWatch(tracks, self, device.event, bonus=bonus)

    def observation(self) -> Observation:
        """Return what was observed so far."""
        self.watch.flush()
        return super().observation()
