"""What an observed vLLM's steps were, read from what its functions were called with: batches, graphs, drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from typing import Any, TypeVar

import attrs

from capture_planner.engines.emulation import CapturedGraph
from capture_planner.measuring.coarsening import Outcome
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Rejection
from capture_planner.records.batch_space import draft_steps
from capture_planner.records.model import Speculative
from capture_planner.records.observation import ObservedGraph

T = TypeVar("T")

MOST_KNOWN = 1 << 10
"""Most dispatches that are read once for all like them."""

MOST_OUTPUTS = 256
"""Most steps whose output is on the way to the host."""

Shape = tuple[int, int, int | None, bool, int]
"""num_reqs, num_tokens, query_len, past_prompt, active_loras: as in ``Batch``."""

Target = tuple[int, int | None, bool]
"""The tokens of the target's batch, its query length, and whether all requests are past their prompts."""

Pass = tuple[Outcome, int]
"""An outcome for the recorder, and its number of replays."""

Dispatch = tuple[Pass | None, Target | None, tuple["Track", int] | None, Any]
"""The pass, the target's batch from then on, the draft decodes that wait for their final answer, and the answer."""

Drafts = int | Mapping[str, Sequence[int]]
"""The drafts that a step verifies: the same number for every request, or those of each."""


def why_eager(batch: Batch, mode: GraphMode, graphs: Iterable[ObservedGraph], draft_steps: int | None = None) -> Reason:
    """Return why a batch that the limits admit has no graph, where the engine does not say.

    SHADOWED: a graph could serve it. SIZES: those for such batches are too small. MODE: there are none for its query
    length, its adapters or its chain of drafts.

    :param mode: the resolved mode of the role.
    :param draft_steps: how many draft decodes the schedule runs for this batch size.
    """
    rejections = {
        CapturedGraph.of(batch.role, graph).rejection(batch, draft_steps)
        for graph in graphs
        if graph.entry.active_loras >= batch.active_loras and graph.entry.draft_steps in (None, draft_steps)
    }
    # A graph fits and was not found: the engine's rule hides it.
    if None in rejections:
        return Reason.SHADOWED
    half = mode.mixed_mode if batch.uniform_query_len is None else mode.decode_mode
    too_small = rejections & {Rejection.TOKENS, Rejection.REQUESTS}
    return Reason.SIZES if too_small and half is not GraphMode.NONE else Reason.MODE


@attrs.frozen(eq=False, kw_only=True)
class Track:
    """One role's manager, and which of its graphs a descriptor means."""

    role: Role
    mode: GraphMode
    """The resolved graph mode."""
    manager: Any
    """The engine's ``CudaGraphManager``."""
    graphs: tuple[ObservedGraph, ...] = ()
    trials: tuple[ObservedGraph, ...] = ()
    """Graphs that were captured, timed and dropped."""
    keys: Mapping[Any, int] = attrs.field(factory=dict)
    """The descriptor of each graph, and the graph's index."""
    specialized: bool = False
    """True if ``specialize_spec_tokens`` has the last word on its answers, as for draft decodes of a chain."""
    fused: bool = False
    """True if one replay runs all draft decodes of a step."""
    speculative: Speculative | None = None
    ranks: int = 1
    """Data-parallel ranks."""
    _kinds: dict[int | None, list[ObservedGraph]] = attrs.field(init=False, factory=dict)
    """Graphs by the query length of the decodes that they serve; under None those for other batches."""
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

    def outcome(self, descriptor: Any, shape: Shape) -> Outcome:
        """Return what a recorder counts, of a batch that got this descriptor."""
        graph = self.graph(descriptor)
        return (self.role, *shape, graph, self.reason(shape) if graph is None else None)

    def reason(self, shape: Shape) -> Reason:
        """Return why a batch has no graph."""
        reason = self._reasons.get(shape)
        if reason is None:
            # Mixed batches seldom have the same shape twice, so the table would grow as long as the server runs.
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


class Dispatches:
    """Reads which pass each dispatch was for; of one runner, in order."""

    def __init__(self, tracks: Sequence[Track]) -> None:
        """Read the dispatches of the managers of ``tracks``; others mean nothing."""
        self._tracks = {id(track.manager): track for track in tracks}
        self._known: dict[tuple[Any, ...], Dispatch] = {}
        self._decodes: dict[tuple[Any, ...], tuple[Pass, Any]] = {}
        self._target: Target | None = None
        self._decode: tuple[Track, int] | None = None
        """The draft decodes that were dispatched, and their requests."""

    @property
    def open(self) -> bool:
        """True while dispatched draft decodes wait for their final answer."""
        return self._decode is not None

    @property
    def query_len(self) -> int | None:
        """The query length of the target's batch, if it has one."""
        return None if self._target is None else self._target[1]

    def dispatched(self, event: tuple[Any, ...]) -> Pass | None:
        """Return a pass that was dispatched, the same object for all like it; None where that comes later, or never.

        :param event: its kind, the manager, num_reqs, num_tokens, query_len, the other keyword arguments of the
            dispatch, and the answer.
        """
        _, manager, num_reqs, num_tokens, query_len, others, answer = event
        loras, longest = others.get("num_active_loras", 0), others.get("max_query_len")
        # Steps repeat themselves. Hashing an answer takes a microsecond; its id is good while the answer is kept here.
        key = id(answer), id(manager), num_reqs, num_tokens, query_len, loras, longest is None, self._target
        found = self._known.get(key)
        if found is None:
            track = self._tracks.get(id(manager))
            if track is None:
                return None
            if not answer.cg_mode:  # all answers without a graph are alike, and none is an object of a table
                key = 0, *key[1:]
                found = self._known.get(key)
            if found is None:
                found = self._dispatched(track, num_reqs, num_tokens, query_len, loras, longest, answer)
                _remember(self._known, key, found)
        passed, self._target, self._decode, _ = found
        return passed

    def _dispatched(
        self,
        track: Track,
        num_reqs: int,
        num_tokens: int,
        query_len: int | None,
        active_loras: int,
        max_query_len: int | None,
        answer: Any,
    ) -> Dispatch:
        target, past_prompt = self._target, query_len is not None
        if query_len is not None:
            query_len = int(query_len)  # drafters count with numpy
            # A drafter dispatches the target's padded tokens; a uniform batch has exactly these.
            num_tokens = num_reqs * query_len
        if track.role is Role.TARGET:
            # vLLM passes the longest query only of batches without a prompt: it keeps the others out of varlen graphs.
            past_prompt = past_prompt or max_query_len is not None
            target = num_tokens, query_len, past_prompt
        else:
            # vLLM's drafters run without adapters.
            active_loras = 0
            if query_len is None and target is not None:
                # The drafter dispatches the target's padded tokens; a batch has the real ones.
                num_tokens, _, past_prompt = target
        if track.specialized:
            return None, target, (track, num_reqs), answer
        shape = (num_reqs, num_tokens, query_len, past_prompt, active_loras)
        return (track.outcome(answer, shape), 1), target, None, answer

    def specialized(self, event: tuple[Any, ...]) -> Pass | None:
        """Return the pass of the draft decodes of a step, the same object for all like it.

        :param event: its kind, the final answer, and the step's draft tokens.
        """
        if self._decode is None:
            return None
        _, answer, draft_tokens = event
        (track, num_reqs), self._decode = self._decode, None
        key = id(answer) if answer.cg_mode else 0, id(track), num_reqs, draft_tokens
        found = self._decodes.get(key)
        if found is None:
            outcome = track.outcome(answer, (num_reqs, num_reqs, 1, True, 0))
            # The draft prefill makes the first draft. A fused chain is one replay, single steps are one each.
            found = (outcome, 1 if track.fused else max(draft_tokens - 1, 1)), answer
            _remember(self._decodes, key, found)
        return found[0]


def _remember(known: dict[tuple[Any, ...], T], key: tuple[Any, ...], found: T) -> None:
    """Keep what was read once for all like it, or start anew: some engines make a new answer for each step."""
    if len(known) >= MOST_KNOWN:
        known.clear()
    known[key] = found


class Verifications:
    """Counts drafts that were verified, by what each request proposed and got."""

    def __init__(self, bonus: int) -> None:
        """:param bonus: the tokens that a request gets besides its accepted drafts."""
        self._bonus = bonus
        self._scheduled: Mapping[str, Sequence[int]] = {}
        self._outputs: dict[int, Drafts] = {}
        self._uniform: dict[int, list[Sequence[int]]] = {}
        self._pairs: Counter[tuple[int, int]] = Counter()

    def scheduled(self, event: tuple[Any, ...]) -> None:
        """Take the drafts that a step verifies, by request: the second item of ``event``; None: it verifies none."""
        self._scheduled = event[1] or {}

    def sampled(self, event: tuple[Any, ...], query_len: int | None) -> None:
        """Take the output that the step's tokens will be in.

        :param event: its kind, and the id of the output.
        :param query_len: where all requests have that.
        """
        output, drafts, self._scheduled = event[1], self._scheduled, {}
        if len(self._outputs) > MOST_OUTPUTS:  # outputs that never came to the host
            self._outputs.clear()
        # An id is free again once its object is gone, so an earlier output may have left drafts under it.
        self._outputs.pop(output, None)
        if drafts:
            self._outputs[output] = drafts if query_len is None else query_len - 1

    def accepted(self, event: tuple[Any, ...]) -> None:
        """Count the drafts of an output.

        :param event: its kind, the id of the output, the requests of the step, and how many tokens each of them got.
        """
        _, output, requests, tokens = event
        drafts = self._outputs.pop(output, None)
        if isinstance(drafts, int):
            self._uniform.setdefault(drafts, []).append(tokens)
        elif drafts is not None:
            lengths = set(map(len, drafts.values()))
            if len(lengths) == 1:  # a request without drafts verifies nothing
                verified = tuple(compress(tokens, map(drafts.__contains__, requests)))
                self._uniform.setdefault(lengths.pop(), []).append(verified)
            else:
                self._pairs.update(zip(map(len, map(drafts.get, requests, repeat(()))), tokens, strict=False))

    def take(self) -> tuple[list[int], list[int]]:
        """Return the drafts since the last call, proposed and accepted, by position."""
        pairs, self._pairs = self._pairs, Counter()
        uniform, self._uniform = self._uniform, {}
        for length, steps in uniform.items():
            for sampled, count in _frequencies(steps):
                pairs[length, sampled] += count
        # A part of a prompt samples nothing, and verifies nothing.
        verified = {pair: count for pair, count in pairs.items() if pair[1] or not self._bonus}
        most = max((proposed for proposed, _ in verified), default=0)
        drafted, accepted = [0] * most, [0] * most
        for (proposed, sampled), count in verified.items():
            for position in range(proposed):
                drafted[position] += count
            for position in range(min(proposed, sampled - self._bonus)):
                accepted[position] += count
        return drafted, accepted


def _frequencies(steps: Sequence[Sequence[int]]) -> Iterable[tuple[int, int]]:
    """Return each number with how often it occurs in the sequences together."""
    try:
        # Counted as bytes, which takes no object for each number.
        numbers = b"".join(map(bytes, steps))
    except ValueError:  # one over 255
        return Counter(chain.from_iterable(steps)).items()
    return [(number, numbers.count(number)) for number in set(numbers)]
