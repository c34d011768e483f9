"""The ledger: rows of captures, forwards, steps, requests and ranks. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.plan import Waiver
from capture_planner_runner.graphs.reading import Reading


class Wait(StrEnum):
    """The missing resource of a request that has arrived and is not admitted."""

    PLACES = "places"
    """``max_num_reqs`` requests are served."""
    PAGES = "pages"
    """The KV cache has too few free pages."""
    STATES = "states"
    """All rows of the recurrent states are taken."""
    ADAPTERS = "adapters"
    """Its adapter would exceed ``lora.max_active``."""


@attrs.frozen(kw_only=True)
class GraphCapture:
    """One graph that was captured, or could not be."""

    role: Role
    entry: Entry
    seconds: float
    """Seconds of warm-up and capture."""
    ended: float = 0.0
    """Moment of its end, in seconds of the host's monotonic clock."""
    memory: int
    """Bytes by which the graph grew its pool, on top of the graphs captured before it."""
    alone: int
    """Bytes that it would take in a pool of its own."""
    readings: tuple[Reading, Reading, Reading] | None = None
    """Memory before the warm-up, before the capture and after it; None for recorded graphs."""
    fingerprint: Fingerprint | None = None
    """Digest of its operators; None: there is no graph, or it could not be read."""
    waiver: Waiver | None = None
    """Batches without a graph, with the reason, if the capture failed; else None."""
    step: int | None = None
    """Steps before its capture on first use; None: it was captured at start."""
    tried: bool = True
    """False if it was refused without a capture, because the memory for first uses was spent."""

    @property
    def taken(self) -> int:
        """Bytes of the device that are gone since before its warm-up, allocator and driver together.

        Of recorded graphs the growth of the pool. Below 0 where something was given back.
        """
        if self.readings is None:
            return self.memory
        before, _, after = self.readings
        return after.used - before.used

    def __str__(self) -> str:
        return f"({self.entry.mode.value}, {self.role.value}): {self.entry.num_tokens} tokens"

    @property
    def driver(self) -> int:
        """Bytes that the capture took outside of the allocator: the executable graphs.

        A driver takes memory in chunks: the graph that opens one pays for those that fill it. 0 for
        recorded graphs, which have nothing of the kind; below 0 where the driver gave some back.
        """
        if self.readings is None:
            return 0
        _, warm, after = self.readings
        return after.outside - warm.outside


@attrs.frozen(kw_only=True)
class Accounts:
    """Uses of a device's memory during capture, in bytes.

    ``device`` is the device's own figure. The other fields add up to it but for ``unexplained``: memory that came
    and went outside the allocator between captures, where the runner takes none.
    """

    graphs: int
    """Growth of the pools by captured graphs."""
    dropped: int
    """Growth of the pools by graphs that could not be captured."""
    driver: int
    """Executable graphs."""
    warm_up: int
    """Growth of the allocator outside the pools, by eager forwards: workspaces of matrix products, for example.
    Below 0 where older tensors were freed meanwhile."""
    modules: int
    """Memory of warm-ups outside the allocator: kernels loaded on first use, handles."""
    device: int
    """Bytes gone from before the first capture to after the last, as the device reports it."""

    @property
    def explained(self) -> int:
        return self.graphs + self.dropped + self.driver + self.warm_up + self.modules

    @property
    def unexplained(self) -> int:
        """Bytes by which the device's figure is above the ledger's sum."""
        return self.device - self.explained

    @property
    def apart(self) -> float:
        """Difference between the two, as a share of the larger one; 0 if both are 0."""
        most = max(abs(self.device), abs(self.explained))
        return abs(self.unexplained) / most if most else 0.0

    @classmethod
    def of(cls, captured: Sequence[GraphCapture]) -> Accounts | None:
        """Add up captures at start, in order; None for recorded graphs."""
        read = [(graph, graph.readings) for graph in captured if graph.readings is not None and graph.step is None]
        if not read:
            return None
        first, last = read[0][1][0], read[-1][1][-1]
        return cls(
            graphs=sum(graph.memory for graph, _ in read if graph.waiver is None),
            dropped=sum(graph.memory for graph, _ in read if graph.waiver is not None),
            driver=sum(graph.driver for graph, _ in read),
            warm_up=last.held - first.held - sum(graph.memory for graph, _ in read),
            modules=sum(warm.outside - before.outside for _, (before, warm, _) in read),
            device=last.used - first.used,
        )


@attrs.frozen(kw_only=True)
class Forward:
    """One forward of one role: its batch, graph, padding and times."""

    step: int
    role: Role
    num_reqs: int
    num_tokens: int
    query_len: int | None
    """Tokens per request of a uniform decode; else None."""
    max_query_len: int | None = None
    """Tokens of the longest request of a decode whose requests differ; else None."""
    active_loras: int = 0
    """Adapters in the batch, plus one for rows without an adapter."""
    entry: Entry | None
    reason: Reason | None
    """Reason for an eager forward; None if a graph served it."""
    padded_tokens: int = 0
    padded_reqs: int = 0
    repeats: int = 1
    """Forwards of this kind in the step: draft decodes run k - 1 times, or once as a fused chain."""
    preparation: float = 0.0
    """Host seconds for values, dispatch, fill, padding and backends, over all repeats. Where the fields of all
    roles are filled at once, the target's includes the others."""
    host_seconds: float = 0.0
    """``preparation`` and guards."""
    seconds: float = 0.0
    """Seconds of the whole forward, over all repeats."""
    ended: float = 0.0
    """Moment of its end, in seconds of the host's monotonic clock."""

    @property
    def mode(self) -> GraphMode:
        """FULL, PIECEWISE, or NONE for an eager step."""
        return GraphMode.NONE if self.entry is None else self.entry.mode


@attrs.frozen(kw_only=True)
class Step:
    """One step of the scheduler: a target forward and the drafter's forwards after it."""

    index: int
    num_reqs: int
    num_tokens: int
    prompts: int
    """Requests still in their prompt."""
    drafted: int
    """Draft tokens that the target verified."""
    accepted: int
    seconds: float
    ended: float = 0.0
    """Moment of its end, in seconds of the host's monotonic clock."""
    waiting: int
    """Requests that have arrived and are not admitted."""
    drafted_at: tuple[int, ...] = ()
    """Drafted tokens by their position in the request's drafts."""
    accepted_at: tuple[int, ...] = ()
    """Accepted tokens by that position."""


@attrs.frozen(kw_only=True, eq=False)
class RankStep:
    """The submissions of all replicas for one step that some of them had work for."""

    numbers: tuple[tuple[int, ...], ...]
    """Encoded submission of each replica, see ``serving.agreement.vectors_of``."""
    seconds: float
    """Seconds of the agreement on this rank, including the wait for the slowest one."""
    is_idle: bool
    """True if this rank ran dummy batches."""
    eager_by_others: int
    """Forwards that ran eager only because of other replicas."""
    larger_by_others: int
    """Forwards whose graph is larger, or of another mode, only because of other replicas."""


@attrs.frozen(kw_only=True)
class RequestResult:
    """One request. Times are in seconds of wall clock from when it entered the queue."""

    name: str
    prompt_tokens: int
    output_tokens: int
    first_token: float | None
    """Seconds to the first token; None without one."""
    finished: float | None
    """Seconds to the last token; None if it was cut off."""
    tokens: tuple[int, ...] = ()
    text: str | None = None
    """Decoded tokens; None without a tokenizer."""
    adapter: int = 0
    """Number of its adapter in the report's ``adapters``, from 1; 0: none."""
    waited_for: Wait | None = None
    """Resource that was missing when it, or one before it, could not be admitted; None: it did not wait."""

    def repeats(self, answer: Sequence[int]) -> bool:
        """Return True if its tokens agree with an answer, which begins with the prompt, as far as they go."""
        return self.tokens == tuple(answer[self.prompt_tokens : self.prompt_tokens + len(self.tokens)])

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token after the first; None if it was cut off or has fewer than two."""
        if self.finished is None or self.first_token is None or self.output_tokens < _FEWEST:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)


_FEWEST = 2
"""Tokens of an answer with a time per token."""


@attrs.frozen(kw_only=True)
class CacheMemory:
    """The reason for the size of the KV cache."""

    share: float | None
    """Share of the device's memory for the run; None: pages were given, or there is no device."""
    predicted: int
    """Predicted bytes of graphs, on top of weights, buffers and cache."""
    reason: str
    """Source of the prediction, and the limit of the cache."""


@attrs.frozen(kw_only=True)
class LazyCaptures:
    """The graphs that wait for their first use, and their budget."""

    memory: int
    """Bytes reserved for them."""
    taken: int
    """Bytes taken so far, also by captures that did not fit."""
    seconds_per_minute: float
    seconds: float
    """Seconds spent on captures, failed ones included."""
    left: float
    """Seconds left to spend now; below 0 if the last capture took more than was left."""
    asked: int
    """Graphs that batches asked for and that are not captured yet."""
    untried: int
    """Graphs that batches asked for and that were refused, because the memory was spent."""
    unused: int
    """Graphs that no batch asked for."""


@attrs.frozen(kw_only=True)
class WarmUp:
    """Steps before the clock started: one of each shape of the workload without a FULL graph, and at least one."""

    shapes: int
    """Number of such shapes, as far as they are known before serving."""
    ran: int
    seconds: float
    compiled: tuple[float, ...] = ()
    """Seconds of each kernel that Triton compiled meanwhile."""
    reason: str = ""
    """Reason why fewer steps ran, or none; else empty."""


# Several ranks ----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class RankRow:
    """One rank; each tensor-parallel rank has the steps of its replica."""

    rank: int
    host: str
    data: int
    tensor: int
    steps: int
    idle_steps: int
    """Steps with dummy batches, because it had no requests."""
    output_tokens: int
    seconds: float
    """Seconds of serving."""
    waited: float
    """Seconds that it waited for the last rank in agreements; of a long run, in the last ones."""
    last: int
    """Number of those agreements to which it came last."""
    eager_by_others: int
    """Forwards that ran eager only because of other ranks."""
    larger_by_others: int
    """Forwards whose graph is larger, or of another mode, only because of other ranks."""


@attrs.frozen(kw_only=True)
class VectorCount:
    """One vector of submissions for a forward of a role, and its number of steps."""

    role: Role
    batches: tuple[Batch | None, ...]
    """Batch of each replica; None: idle."""
    captured: tuple[bool, ...]
    """True for each replica that had graphs."""
    steps: int


@attrs.frozen(kw_only=True)
class RankRecord:
    """All ranks of a run."""

    rows: tuple[RankRow, ...]
    """Rows by rank; a rank that ended without its last words is missing."""
    agreements: int
    """Steps that replicas agreed on; 0 for one replica."""
    skews: tuple[float, ...]
    """Seconds between the first and the last rank to come to an agreement, by step."""
    vectors: tuple[VectorCount, ...]
    """The most frequent ones first."""
    vectors_dropped: int = 0
    """Different vectors that are not listed."""
