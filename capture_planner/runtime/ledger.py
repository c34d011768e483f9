"""The ledger: what was captured, what each step took, what each request saw. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Entry
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.plan import Waiver
from capture_planner.runtime.graphs.reading import Reading


class Wait(StrEnum):
    """What a request waits for that has arrived and is not admitted."""

    PLACES = "places"
    """``max_num_reqs`` requests are served."""
    PAGES = "pages"
    """The KV cache has too few free pages."""
    STATES = "states"
    """All rows of the recurrent states are taken."""
    ADAPTERS = "adapters"
    """Its adapter would be one too many."""


@attrs.frozen(kw_only=True)
class GraphCapture:
    """One graph that was captured, or could not be."""

    role: Role
    entry: Entry
    seconds: float
    """Warm-up and capture."""
    memory: int
    """Bytes by which the graph grew its pool: what it costs on top of those captured before it."""
    alone: int
    """Bytes that it would take in a pool of its own."""
    readings: tuple[Reading, Reading, Reading] | None = None
    """The device before the warm-up, before the capture and after it; None: recorded on a host."""
    fingerprint: Fingerprint | None = None
    """What it is made of; None: there is no graph, or that could not be read."""
    waiver: Waiver | None = None
    """Set where there is no graph: the batches it would have served, and why they lost it."""
    step: int | None = None
    """How many steps had run when it was captured on first use; None: it was captured at start."""
    tried: bool = True
    """False: nothing was left of the memory for first uses, so it was refused without warm-up and capture."""

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
    """Where a device's memory went while a plan was captured, in bytes.

    ``device`` is the device's own figure. All else adds up to it but for ``unexplained``: what came
    and went outside of the allocator between the captures, where nothing of ours takes memory.
    """

    graphs: int
    """Growth of the pools, by graphs that are there."""
    dropped: int
    """Growth of the pools that graphs left behind which are not."""
    driver: int
    """Executable graphs."""
    warm_up: int
    """What the allocator holds more outside of the pools: what eager forwards left, such as the
    workspaces of matrix products. Below 0 where tensors of before the capture were freed meanwhile."""
    modules: int
    """What warm-ups took outside of the allocator: kernels that were loaded on first use, handles."""
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
        """How far the two are apart, as a share of the larger one; 0 where both are 0."""
        most = max(abs(self.device), abs(self.explained))
        return abs(self.unexplained) / most if most else 0.0

    @classmethod
    def of(cls, captured: Sequence[GraphCapture]) -> Accounts | None:
        """Add up what was captured at start, in order; None where no device was read."""
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
    """One forward of one role: which batch, which graph, how much padding, how long."""

    step: int
    role: Role
    num_reqs: int
    num_tokens: int
    query_len: int | None
    """Set for a uniform decode: each request has that many tokens and is past its prompt."""
    max_query_len: int | None = None
    """Set for a decode whose requests differ: the longest has that many tokens."""
    active_loras: int = 0
    """Adapters in the batch, and one more for rows without one next to them."""
    entry: Entry | None
    reason: Reason | None
    """Why it ran eager; None where an entry served it."""
    padded_tokens: int = 0
    padded_reqs: int = 0
    repeats: int = 1
    """Forwards of this kind in the step: draft decodes run k - 1 times, or once as a fused chain."""
    preparation: float = 0.0
    """Seconds of the host for values, dispatch, fill, padding and backends; of all repeats together. Where
    the fields of all roles are filled at once, the target's includes the others."""
    host_seconds: float = 0.0
    """The same, and guards."""
    seconds: float = 0.0
    """All of it, of all repeats together."""

    @property
    def mode(self) -> GraphMode:
        """FULL, PIECEWISE, or NONE for an eager step."""
        return GraphMode.NONE if self.entry is None else self.entry.mode


@attrs.frozen(kw_only=True)
class Step:
    """One step of the scheduler: a target forward and what the drafter ran after it."""

    index: int
    num_reqs: int
    num_tokens: int
    prompts: int
    """Requests still in their prompt."""
    drafted: int
    """Draft tokens that the target verified."""
    accepted: int
    seconds: float
    waiting: int
    """Requests that have arrived and are not admitted."""
    drafted_at: tuple[int, ...] = ()
    """Of the drafted tokens, those that came first in their request, second, and so on."""
    accepted_at: tuple[int, ...] = ()
    """Of the accepted tokens, the same."""


@attrs.frozen(kw_only=True, eq=False)
class RankStep:
    """What the replicas of a model submitted for one step that some of them had work for."""

    numbers: tuple[tuple[int, ...], ...]
    """Of each replica; ``runtime.serving.agreement.vectors_of`` reads them."""
    seconds: float
    """What agreeing took on this rank's host, the wait for the slowest included."""
    is_idle: bool
    """Whether this rank ran dummy batches."""
    eager_by_others: int
    """Its forwards that ran eager because of other replicas: alone, it would have replayed a graph."""
    larger_by_others: int
    """Its forwards that replayed a larger graph, or one of another mode, than it would have alone."""


@attrs.frozen(kw_only=True)
class RequestResult:
    """One request. Times are in seconds of wall clock from when it entered the queue."""

    name: str
    prompt_tokens: int
    output_tokens: int
    first_token: float | None
    """Time to the first token; None where there was none."""
    finished: float | None
    """Time to the last token; None where it was cut off."""
    tokens: tuple[int, ...] = ()
    text: str | None = None
    """The same as text, where a tokenizer was given."""
    adapter: int = 0
    """Which of the report's ``adapters`` it had, counted from 1; 0: none."""
    waited_for: Wait | None = None
    """What was missing when it, or one before it, could not be admitted; None: it did not wait."""

    def repeats(self, answer: Sequence[int]) -> bool:
        """Say whether its tokens are those of an answer that begins with the prompt, as far as they go."""
        return self.tokens == tuple(answer[self.prompt_tokens : self.prompt_tokens + len(self.tokens)])

    @property
    def per_token(self) -> float | None:
        """Seconds of a token after the first, on average; None where it was cut off, or has fewer than two."""
        if self.finished is None or self.first_token is None or self.output_tokens < _FEWEST:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)


_FEWEST = 2
"""Tokens of an answer with a time per token."""


@attrs.frozen(kw_only=True)
class CacheMemory:
    """How many bytes the KV cache was given, and why."""

    share: float | None
    """Of the device's memory that the run may take; None: pages were given, or there is no device."""
    predicted: int
    """Bytes that graphs were expected to take, on top of weights, buffers and cache."""
    reason: str
    """Where the prediction comes from, and what limits the cache."""


@attrs.frozen(kw_only=True)
class LazyCaptures:
    """What became of the graphs that wait for their first use, and of the budget for them."""

    memory: int
    """Bytes that were reserved for them."""
    taken: int
    """Bytes that they took by now, with what those that did not fit left behind."""
    seconds_per_minute: float
    seconds: float
    """Spent on them, those that could not be captured included."""
    left: float
    """Seconds that may be spent now; below 0 the last capture took more than was left."""
    asked: int
    """Graphs that batches asked for, and that are not captured yet."""
    untried: int
    """Graphs that batches asked for when nothing of the memory was left, and that were refused without a capture."""
    unused: int
    """Graphs that no batch asked for."""


@attrs.frozen(kw_only=True)
class WarmUp:
    """What ran before the clock started: steps of the workload's shapes that no FULL graph serves, and one at least."""

    shapes: int
    """Different steps of the workload that need it, as far as it is known before it is served."""
    ran: int
    seconds: float
    compiled: tuple[float, ...] = ()
    """Seconds of each kernel that Triton compiled meanwhile."""
    reason: str = ""
    """Why less ran, or nothing."""
