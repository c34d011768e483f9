"""The session of a run: an exact tally of forwards, steps and requests, and sampled rows for plots; its report."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import attrs

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
    WarmUp,
)
from capture_planner_runner.ledger.tally import Tally
from capture_planner_runner.numerics.record import Comparison, OutputCheck

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
        """Add a request that is finished or cut off."""
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
