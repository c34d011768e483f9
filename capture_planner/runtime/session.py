"""What happened in a run: rows of forwards, steps and requests, or a sample of them, and what they add up to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import attrs

from capture_planner.records.fingerprint import Fingerprints
from capture_planner.records.plan import Plan
from capture_planner.runtime.eager_check.record import Comparison
from capture_planner.runtime.graphs.reading import Reading
from capture_planner.runtime.ledger import (
    CacheMemory,
    Forward,
    GraphCapture,
    LazyCaptures,
    RankStep,
    RequestResult,
    Step,
    WarmUp,
)
from capture_planner.runtime.ranks.record import RankRecord
from capture_planner.runtime.tally import Tally
from capture_planner.runtime.verification.record import OutputCheck

MOST_ROWS = 10_000
"""Rows of each kind that ``run`` keeps: of a longer run every second one, then every fourth, and so on."""


@attrs.define(eq=False)
class Session:
    """What has happened so far; complete at every moment, so that an interruption loses nothing."""

    most: int | None = None
    """Rows of each kind that are kept; None: all. The tally counts all."""
    tally: Tally = attrs.Factory(Tally)
    captured: list[GraphCapture] = attrs.Factory(list)
    forwards: list[Forward] = attrs.Factory(list)
    steps: list[Step] = attrs.Factory(list)
    rank_steps: list[RankStep] = attrs.Factory(list)
    """Of replicas, those that any of them had work for; of many, the last."""
    served: list[RequestResult] = attrs.Factory(list)
    every_step: int = 1
    """Of so many steps one is in ``steps``, and its forwards in ``forwards``: those whose index it divides."""
    every_request: int = 1
    """Of so many requests one is in ``served``."""
    capture_seconds: float = 0.0
    """Of the last capture."""
    serve_seconds: float = 0.0
    """Of all requests that were served to their end."""

    def copied(self) -> Session:
        """Return a session that goes on by itself."""
        return attrs.evolve(
            self,
            tally=copy.deepcopy(self.tally),
            captured=[*self.captured],
            forwards=[*self.forwards],
            steps=[*self.steps],
            rank_steps=[*self.rank_steps],
            served=[*self.served],
        )

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
        """Note a request that is finished or cut off."""
        number = self.tally.requests
        self.tally.add_request(request)
        if number % self.every_request == 0:
            self.served.append(request)
            if self.most is not None and len(self.served) > self.most:
                self.every_request *= 2
                del self.served[1::2]

    def add_rank_step(self, step: RankStep) -> None:
        self.tally.add_rank_step(step)
        self.rank_steps.append(step)
        if self.most is not None and len(self.rank_steps) > 2 * self.most:
            del self.rank_steps[: -self.most]

    def _thin(self, count: int) -> None:
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
    """All that happened when a plan was executed."""

    plan: Plan
    model: str
    """What ran: an architecture, and where its weights came from."""
    backends: dict[str, str]
    """Name and version of each backend that executed."""
    host: dict[str, str]
    """Machine and versions: device, torch, python."""
    captured: tuple[GraphCapture, ...]
    forwards: tuple[Forward, ...]
    steps: tuple[Step, ...]
    served: tuple[RequestResult, ...]
    every_step: int = 1
    """Of so many steps one is in ``steps``, and its forwards in ``forwards``; 1: all are."""
    every_request: int = 1
    """Of so many requests one is in ``served``; 1: all are."""
    tally: Tally | None = None
    """What all forwards, steps and requests add up to; None: what is in the rows."""
    buffers: int
    """Bytes of persistent buffers: fields, outputs, workspaces."""
    kv_cache: int
    """Bytes of the KV cache."""
    capture_seconds: float
    serve_seconds: float
    interrupted: bool = False
    """Whether it was stopped before all requests were served."""
    stage: str = ""
    """What was under way when it was stopped, such as ``capture``; empty: it was not."""
    fault: str = ""
    """The rank that stopped it, and what became of that one; empty: none did."""
    workspaces: int = 0
    """Bytes of the buffers that are backends' workspaces."""
    weights: int = 0
    """Bytes of the weights of target and drafter, each counted once."""
    served_reading: Reading | None = None
    """The device after the last request; None: recorded on a host."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters, by what they are and where their weights come from."""
    acceptance: tuple[float, ...] = ()
    """The shares of synthetic acceptance, see ``Options.acceptance``; empty: drafts were verified."""
    otherwise: int = 0
    """Requests that were answered otherwise than in the rehearsal that a drafter copies or misses."""
    cache_memory: CacheMemory | None = None
    """How the size of the KV cache was chosen; None: nothing was noted."""
    warm_up: WarmUp | None = None
    """What was run before the clock started; None: nothing."""
    lazy: LazyCaptures | None = None
    """What was captured on first use; None: the plan captures all at start."""
    compiled: tuple[float, ...] = ()
    """Seconds of each kernel that Triton compiled while requests were served."""
    slower: str = ""
    """What makes requests arrive more slowly, see ``Choices.slower``; empty: nothing does."""
    ranks: RankRecord | None = None
    """All ranks, in the report of the first; None: it ran alone."""
    comparison: Comparison | None = None
    """What was compared with eager forwards; None: nothing was to be."""
    verification: OutputCheck | None = None
    """Whether the output is the model's; None: not verified."""

    @property
    def counts(self) -> Tally:
        """What all forwards, steps and requests add up to."""
        return self.tally or Tally.of(self.forwards, self.steps, self.served)

    @property
    def fingerprints(self) -> Fingerprints | None:
        """What the captured graphs are made of, by their places in the plan; None where none could be read."""
        places = {(role.role, entry): index for role in self.plan.roles for index, entry in enumerate(role.entries)}
        found = {
            (graph.role, places[graph.role, graph.entry]): graph.fingerprint
            for graph in self.captured
            if graph.fingerprint is not None
        }
        return Fingerprints.of(found, torch=self.host["torch"], device=self.host["device"]) if found else None
