"""The session of a run: an exact tally of forwards, steps and requests, and sampled rows for plots; its report."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Entry
from capture_planner.records.fingerprint import Fingerprints
from capture_planner.records.plan import Plan
from capture_planner_runner.graphs.reading import Reading
from capture_planner_runner.ledger.rows import (
    CacheMemory,
    Forward,
    GraphCapture,
    LazyCaptures,
    RankRecord,
    RankStep,
    RequestResult,
    Step,
    Wait,
    WarmUp,
)
from capture_planner_runner.numerics.record import Comparison, OutputCheck

BOUND = 0.01
"""Largest relative error of a percentile from buckets."""

LEAST = 1e-9
"""Seconds; shorter times count as 0."""

MOST_VALUES = 10_000
"""Values that are kept exactly; more of them are counted in buckets."""

_GROWTH = math.log((1 + BOUND) / (1 - BOUND))


@attrs.define(eq=False)
class Distribution:
    """Seconds of one kind: exact while they are few, then counted in buckets.

    A bucket is ``(1 + BOUND) / (1 - BOUND)`` times as wide as the one before, so that its middle is within ``BOUND``
    of all in it. Numbers and the largest value are exact.
    """

    most: int = MOST_VALUES
    """Limit of exact values."""
    count: int = 0
    max: float = 0.0
    _values: list[float] = attrs.field(factory=list, init=False)
    _buckets: Counter[int | None] = attrs.field(factory=Counter, init=False)
    """Counts by number of the bucket; None for times below ``LEAST``."""

    @classmethod
    def of(cls, values: Iterable[float], most: int = MOST_VALUES) -> Distribution:
        found = cls(most)
        for value in values:
            found.add(value)
        return found

    @property
    def is_exact(self) -> bool:
        """True if percentiles are exact, and not the middles of buckets."""
        return not self._buckets

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, which is at least 0, so many times."""
        self.count += times
        self.max = max(self.max, value)
        # Once there are too many values, those kept so far move into buckets.
        if self._buckets or self.count > self.most:
            for kept in self._values:
                self._buckets[_bucket(kept)] += 1
            self._values.clear()
            self._buckets[_bucket(value)] += times
        else:
            self._values.extend([value] * times)

    @property
    def pairs(self) -> list[tuple[float, int]]:
        """The values with how often each was added, in ascending order; of buckets, the middles."""
        return sorted(Counter(self._values).items()) if self.is_exact else self._middles()

    def add_all(self, pairs: Iterable[tuple[float, int]], largest: float) -> None:
        """Add all of another distribution: its ``pairs`` and its ``max``. A middle falls into its own bucket again."""
        for value, times in pairs:
            self.add(value, times)
        self.max = max(self.max, largest)

    def percentile(self, percent: int) -> float:
        """Return a percentile (1 to 100) of at least one value, by nearest rank: exact, or within ``BOUND`` of it."""
        return next(self.percentiles((percent,)))

    def percentiles(self, percents: Iterable[int]) -> Iterator[float]:
        """Yield percentiles, in ascending order of ``percents``."""
        last, seen, ordered = 0.0, 0, iter(self.pairs)
        for percent in percents:
            # Nearest rank, in whole numbers: a float product can land one rank too low.
            rank = -(-percent * self.count // 100)
            while seen < rank:
                last, times = next(ordered)
                seen += times
            yield last

    def _middles(self) -> list[tuple[float, int]]:
        """Return the middle of each bucket with its count, the smallest first; none is above the largest value."""
        middles = [
            (0.0 if bucket is None else min(LEAST * math.exp(bucket * _GROWTH) * (1 + BOUND), self.max), times)
            for bucket, times in self._buckets.items()
        ]
        return sorted(middles)


def _bucket(value: float) -> int | None:
    return None if value < LEAST else math.floor(math.log(value / LEAST) / _GROWTH)


MOST_SHAPES = 10_000
"""Shapes of eager forwards that are counted separately; further ones are counted by role and reason."""

# Fields of a tally that differ between replicas, see ``request_counts``.
SUMS = ("requests", "finished", "output_tokens", "with_adapter", "drafted_tokens", "accepted_tokens")
PLACES = ("drafted", "accepted")
TIMES = ("first_token", "per_token", "last_token")

Shape = tuple[Role, Reason | None, int, int, int | None]
"""Role, reason, requests, tokens and query length of an eager forward; 0 requests and tokens beyond ``MOST_SHAPES``."""


@attrs.define
class ModeTally:
    """Forwards of one role and mode, and their rows, with their repeats."""

    forwards: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0
    real_reqs: int = 0
    padded_reqs: int = 0


@attrs.define(eq=False)
class Tally:
    """Exact counts of a run, and distributions of its times; its memory does not grow with their number."""

    modes: dict[tuple[Role, GraphMode], ModeTally] = attrs.Factory(dict)
    decodes: Counter[Role] = attrs.Factory(Counter)
    """Forwards of uniform decodes."""
    covered: Counter[Role] = attrs.Factory(Counter)
    """Uniform decodes that a graph served."""
    varying: Counter[Role] = attrs.Factory(Counter)
    """Forwards of decodes whose requests differ."""
    varying_covered: Counter[Role] = attrs.Factory(Counter)
    """Such decodes that a FULL graph served."""
    uses: Counter[tuple[Role, Entry]] = attrs.Factory(Counter)
    """Forwards that each graph served."""
    fallbacks: Counter[Shape] = attrs.Factory(Counter)
    """Eager forwards."""
    adapters: Counter[tuple[int, int]] = attrs.Factory(Counter)
    """Number of the target's forwards, by active adapters of the batch and adapters of the graph; -1: eager."""
    steps: int = 0
    reqs: int = 0
    """Sum of the requests of all steps."""
    tokens: int = 0
    most_reqs: int = 0
    most_waiting: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted: list[int] = attrs.Factory(list)
    """Verified drafts by position."""
    accepted: list[int] = attrs.Factory(list)
    """Drafts by position that were accepted with all drafts before them."""
    requests: int = 0
    finished: int = 0
    output_tokens: int = 0
    with_adapter: int = 0
    waited: Counter[Wait] = attrs.Factory(Counter)
    """Requests that were not admitted at once, by the resource that was missing last."""
    agreements: int = 0
    """Steps that replicas agreed on."""
    idle_steps: int = 0
    """Agreements for which this replica had no requests."""
    eager_by_others: int = 0
    """Forwards that ran eager only because of other replicas."""
    larger_by_others: int = 0
    """Forwards that replayed another graph only because of other replicas."""
    step_seconds: Distribution = attrs.Factory(Distribution)
    host_seconds: Distribution = attrs.Factory(Distribution)
    """Host seconds of each forward."""
    first_token: Distribution = attrs.Factory(Distribution)
    per_token: Distribution = attrs.Factory(Distribution)
    """Mean seconds per token after the first, by finished request."""
    last_token: Distribution = attrs.Factory(Distribution)

    @classmethod
    def of(cls, forwards: Iterable[Forward], steps: Iterable[Step], served: Iterable[RequestResult]) -> Tally:
        """Count rows."""
        tally = cls()
        for forward in forwards:
            tally.add_forward(forward)
        for step in steps:
            tally.add_step(step)
        for request in served:
            tally.add_request(request)
        return tally

    def add_forward(self, forward: Forward) -> None:
        role, times, entry = forward.role, forward.repeats, forward.entry
        mode = self.modes.setdefault((role, forward.mode), ModeTally())
        mode.forwards += times
        mode.real_tokens += times * forward.num_tokens
        mode.padded_tokens += times * forward.padded_tokens
        mode.real_reqs += times * forward.num_reqs
        mode.padded_reqs += times * forward.padded_reqs
        if forward.query_len is not None:
            self.decodes[role] += times
            # A uniform decode may also run on a PIECEWISE graph; of varying ones only FULL graphs count.
            self.covered[role] += times * (entry is not None)
        if forward.max_query_len is not None:
            self.varying[role] += times
            self.varying_covered[role] += times * (forward.mode is GraphMode.FULL)
        if entry is not None:
            self.uses[role, entry] += times
        else:
            shape = role, forward.reason, forward.num_reqs, forward.num_tokens, forward.query_len
            # Prompts have shapes without end; further ones are counted by role and reason.
            if shape not in self.fallbacks and len(self.fallbacks) >= MOST_SHAPES:
                shape = role, forward.reason, 0, 0, None
            self.fallbacks[shape] += times
        if role is Role.TARGET:
            self.adapters[forward.active_loras, -1 if entry is None else entry.active_loras] += times
        # The host submits a fused chain once, for all of its repeats.
        self.host_seconds.add(forward.host_seconds / times, times)

    def add_step(self, step: Step) -> None:
        self.steps += 1
        self.reqs += step.num_reqs
        self.tokens += step.num_tokens
        self.most_reqs = max(self.most_reqs, step.num_reqs)
        self.most_waiting = max(self.most_waiting, step.waiting)
        self.drafted_tokens += step.drafted
        self.accepted_tokens += step.accepted
        _add(self.drafted, step.drafted_at)
        _add(self.accepted, step.accepted_at)
        self.step_seconds.add(step.seconds)

    def add_request(self, request: RequestResult) -> None:
        """Count a request that is finished or cut off."""
        self.requests += 1
        self.output_tokens += request.output_tokens
        self.with_adapter += request.adapter > 0
        if request.waited_for is not None:
            self.waited[request.waited_for] += 1
        if request.first_token is not None:
            self.first_token.add(request.first_token)
        # The run ended first: its tokens count, but it has no latency.
        if request.finished is None:
            return
        self.finished += 1
        self.last_token.add(request.finished)
        if request.per_token is not None:
            self.per_token.add(request.per_token)

    def add_rank_step(self, step: RankStep) -> None:
        self.agreements += 1
        self.idle_steps += step.is_idle
        self.eager_by_others += step.eager_by_others
        self.larger_by_others += step.larger_by_others

    @property
    def request_counts(self) -> dict[str, Any]:
        """The counts that differ between replicas, of requests and their drafts, as JSON values."""
        times: dict[str, Distribution] = {name: getattr(self, name) for name in TIMES}
        return {
            **{name: getattr(self, name) for name in (*SUMS, *PLACES)},
            "waited": {wait.value: count for wait, count in self.waited.items()},
            **{name: {"pairs": each.pairs, "max": each.max} for name, each in times.items()},
        }

    def add_request_counts(self, counts: Mapping[str, Any]) -> None:
        """Add the ``request_counts`` of another replica."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + counts[name])
        for name in PLACES:
            _add(getattr(self, name), counts[name])
        # A Counter adds where a dict would replace.
        self.waited.update({Wait(wait): count for wait, count in counts["waited"].items()})
        for name in TIMES:
            getattr(self, name).add_all(counts[name]["pairs"], counts[name]["max"])


def _add(sums: list[int], more: Sequence[int]) -> None:
    # Earlier steps may have had fewer drafts than this one.
    sums.extend([0] * (len(more) - len(sums)))
    for place, count in enumerate(more):
        sums[place] += count


MOST_ROWS = 10_000
"""Rows of each kind that ``run`` keeps; of a longer run every second one, then every fourth, and so on."""


@attrs.define(eq=False)
class Session:
    """Everything that happened so far; complete at every moment, so that an interruption loses nothing."""

    most: int | None = None
    """Limit of rows of each kind; None: no limit. The tally counts all."""
    tally: Tally = attrs.Factory(Tally)
    captured: list[GraphCapture] = attrs.Factory(list)
    forwards: list[Forward] = attrs.Factory(list)
    steps: list[Step] = attrs.Factory(list)
    rank_steps: list[RankStep] = attrs.Factory(list)
    """Steps that some replica had work for; of a long run, the last ones."""
    served: list[RequestResult] = attrs.Factory(list)
    every_step: int = 1
    """Sampling interval: every n-th step is in ``steps``, and its forwards in ``forwards``."""
    every_request: int = 1
    """Sampling interval: every n-th request is in ``served``."""
    capture_seconds: float = 0.0
    """Seconds of the last capture."""
    serve_seconds: float = 0.0
    """Seconds in which requests were served."""

    def copied(self) -> Session:
        """Return an independent copy."""
        names = ("captured", "forwards", "steps", "rank_steps", "served")
        rows: dict[str, Any] = {name: [*getattr(self, name)] for name in names}
        # Deep, since the tally of the session goes on counting.
        return attrs.evolve(self, tally=copy.deepcopy(self.tally), **rows)

    def add_forward(self, forward: Forward) -> None:
        self.tally.add_forward(forward)
        if forward.step % self.every_step == 0:
            self.forwards.append(forward)
            self._thin(len(self.forwards))

    def add_step(self, step: Step) -> None:
        self.tally.add_step(step)
        if step.index % self.every_step == 0:
            self.steps.append(step)
            self._thin(len(self.steps))

    def add_request(self, request: RequestResult) -> None:
        """Add a request that is finished or cut off."""
        # Sampled by number, not by chance, so that a run has the same rows again.
        number = self.tally.requests
        self.tally.add_request(request)
        if number % self.every_request == 0:
            self.served.append(request)
            if self.most is not None and len(self.served) > self.most:
                self.every_request *= 2
                # The rows are every n-th request: without every second one they are every 2n-th.
                del self.served[1::2]

    def add_rank_step(self, step: RankStep) -> None:
        self.tally.add_rank_step(step)
        self.rank_steps.append(step)
        # Not sampled, since ranks compare the same steps: the last ones are kept, cut back now and then.
        if self.most is not None and len(self.rank_steps) > 2 * self.most:
            del self.rank_steps[: -self.most]

    def _thin(self, count: int) -> None:
        # Rows of the steps before are halved too, so that the sample stays even over the run.
        if self.most is not None and count > self.most:
            self.every_step *= 2
            self.steps[:] = (step for step in self.steps if step.index % self.every_step == 0)
            self.forwards[:] = (forward for forward in self.forwards if forward.step % self.every_step == 0)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Time a capture, also one that breaks off."""
        started = perf_counter()
        try:
            yield
        finally:
            # Assigned, not added: a second capture replaces the first one's graphs.
            self.capture_seconds = perf_counter() - started

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Add the time of serving, also where that breaks off."""
        started = perf_counter()
        try:
            yield
        finally:
            self.serve_seconds += perf_counter() - started


@attrs.frozen(kw_only=True)
class RunReport:
    """The report of an executed plan."""

    plan: Plan
    model: str
    """Architecture, and the source of its weights."""
    backends: dict[str, str]
    """Name and version of each backend that executed."""
    host: dict[str, str]
    """Machine and versions: device, torch, python."""
    captured: tuple[GraphCapture, ...]
    forwards: tuple[Forward, ...]
    steps: tuple[Step, ...]
    served: tuple[RequestResult, ...]
    every_step: int = 1
    """Sampling interval of ``steps`` and their ``forwards``; 1: all are there."""
    every_request: int = 1
    """Sampling interval of ``served``; 1: all are there."""
    tally: Tally | None = None
    """Exact counts of all forwards, steps and requests; None: the rows are complete, and are counted."""
    buffers: int
    """Bytes of persistent buffers: fields, outputs, workspaces."""
    kv_cache: int
    """Bytes of the KV cache."""
    capture_seconds: float
    serve_seconds: float
    interrupted: bool = False
    """True if it was stopped before all requests were served."""
    stage: str = ""
    """Stage in which it was stopped, such as ``capture``; empty: it was not."""
    fault: str = ""
    """Sentence on the rank that stopped it; empty: none did."""
    workspaces: int = 0
    """Bytes of backends' workspaces, which are in ``buffers``."""
    weights: int = 0
    """Bytes of the weights of target and drafter, each counted once."""
    served_reading: Reading | None = None
    """Memory of the device after the last request; None for recorded graphs."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters, with the source of their weights."""
    acceptance: tuple[float, ...] = ()
    """The shares of synthetic acceptance, see ``Options.acceptance``; empty: drafts were verified."""
    mismatched_requests: int = 0
    """Requests whose answers differ from the rehearsal that a drafter copies or misses."""
    cache_memory: CacheMemory | None = None
    """Reason for the size of the KV cache; None: unknown."""
    warm_up: WarmUp | None = None
    """Steps before the clock started; None: there were none."""
    lazy: LazyCaptures | None = None
    """Captures on first use; None: the plan captures all graphs at start."""
    compiled: tuple[float, ...] = ()
    """Seconds of each kernel that Triton compiled while requests were served."""
    slower: str = ""
    """Advice for slower arrivals, see ``RunRequest.slower``; empty if no option does."""
    ranks: RankRecord | None = None
    """Rows of all ranks, in the report of the first; None for one process."""
    comparison: Comparison | None = None
    """Comparison with eager forwards; None: not asked for."""
    verification: OutputCheck | None = None
    """Comparison of the output with the model; None: not verified."""

    @property
    def counts(self) -> Tally:
        """Exact counts of all forwards, steps and requests."""
        return self.tally or Tally.of(self.forwards, self.steps, self.served)

    @property
    def fingerprints(self) -> Fingerprints | None:
        """Fingerprints of captured graphs, by their places in the plan; None if none could be read."""
        places = {(role.role, entry): index for role in self.plan.roles for index, entry in enumerate(role.entries)}
        found = {
            (graph.role, places[graph.role, graph.entry]): graph.fingerprint
            for graph in self.captured
            if graph.fingerprint is not None
        }
        return Fingerprints.of(found, torch=self.host["torch"], device=self.host["device"]) if found else None
