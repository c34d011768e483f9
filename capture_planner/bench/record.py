"""The record of a bench: what was measured, and with what. Plain data, no torch.

Times are in seconds and memory in bytes, each beside what it is compared with in the same run.
"""

from __future__ import annotations

import attrs

from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.records.plan import Plan
from capture_planner.runtime.ledger import Captured

FIGURES = ("decode", "preparation", "chain", "throughput", "capture", "pools")
"""The figures of a bench, in the order in which they are measured."""


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return ``part / whole``; None where one of them was not measured, or there is no whole."""
    return part / whole if part is not None and whole else None


@attrs.frozen(kw_only=True)
class Replayed:
    """A graph that a step replays, and how often."""

    role: Role
    entry: Entry
    times: int


@attrs.frozen(kw_only=True)
class Decode:
    """One decode step of the runner, everything included, against its graphs alone."""

    num_reqs: int
    graphs: tuple[Replayed, ...]
    """What a bare replay is: the target's graph, and with a drafter those of its forwards."""
    windows: int
    """Windows that the medians are of."""
    steps: int
    """Steps a window."""
    step: float
    bare: float
    eager: float | None
    host: float
    """Of a step, what the runner's host did before its replays, as its ledger has it."""

    @property
    def overhead(self) -> float:
        """The step by its graphs."""
        return self.step / self.bare

    @property
    def gain(self) -> float | None:
        """The eager step by the bare graphs."""
        return ratio(self.eager, self.bare)


@attrs.frozen(kw_only=True)
class Preparation:
    """Host time of preparing the forwards of one role in a decode whose lengths grow."""

    num_reqs: int
    role: Role
    backends: tuple[str, ...]
    steps: int
    step: float
    """As the runner does it, a mean over all steps: values, dispatch, fill, padding and backends. The fields
    of a drafter are filled together with the target's, and fields that a graph moved on are not filled."""
    stage: float
    """Where all fields of the role are made anew, a median: derived fields, fill, padding and backends."""
    prepare: float
    """The preparation of the backends alone, a median of the same."""
    stock: float | None = None
    """The library's own plan call of the same shape, a median; None where the backend has none to compare."""

    @property
    def of_stock(self) -> float | None:
        """A step's preparation by the library's own plan call."""
        return ratio(self.step, self.stock)


@attrs.frozen(kw_only=True)
class Chain:
    """The draft decodes of one step: one graph, single steps replayed, and eager."""

    num_reqs: int
    steps: int
    """Draft decodes of a chain."""
    fused: float | None
    """None where a backend needs the host between draft steps, so that no graph holds a chain."""
    single: float
    eager: float
    host: float | None = None
    """Of one single step as the runner does it: preparation, guards and, on a GPU, the launch. None where it
    was not measured."""

    @property
    def one(self) -> float:
        """One single step, replayed in a row."""
        return self.single / self.steps

    @property
    def over_single(self) -> float | None:
        """How many times faster one graph is than single steps replayed."""
        return ratio(self.single, self.fused)

    @property
    def over_eager(self) -> float:
        """How many times faster the best graph is than eager."""
        return self.eager / (self.fused or self.single)


@attrs.frozen(kw_only=True)
class Throughput:
    """Tokens per second, end to end, and those of transformers' continuous batching."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float
    other: float | None = None
    """Of transformers; None where it was not measured."""
    other_says: str = ""
    """Its version and attention, or why it was not measured."""

    @property
    def gain(self) -> float | None:
        """How many times transformers' throughput."""
        return ratio(self.tokens_per_second, self.other)


@attrs.frozen(kw_only=True)
class Cost:
    """What it took to capture all graphs."""

    seconds: float
    pool: int
    """Bytes that the pools hold."""
    driver: int
    """Bytes that the device lost beside what the allocator holds; 0 on a CPU."""

    @property
    def memory(self) -> int:
        """Bytes in all."""
        return self.pool + self.driver


@attrs.frozen(kw_only=True)
class Capturing:
    """The capture of the whole plan by the runner, and by a bare loop over the same graphs."""

    graphs: int
    first_seconds: float
    """The first capture of the process, which also compiles and loads kernels."""
    ours: Cost
    bare: Cost | None
    """None where there is no CUDA device."""
    captured: tuple[Captured, ...]
    """Each graph, as the runner captured it."""

    @property
    def of_seconds(self) -> float | None:
        """Our seconds by those of the bare loop."""
        return None if self.bare is None else ratio(self.ours.seconds, self.bare.seconds)

    @property
    def of_memory(self) -> float | None:
        """Our bytes by those of the bare loop."""
        return None if self.bare is None else ratio(self.ours.memory, self.bare.memory)


@attrs.frozen(kw_only=True)
class Pools:
    """One pool for all roles against one each."""

    shared: int
    per_role: int
    requests: int
    differing: tuple[str, ...]
    """Requests whose tokens differ between the two; there should be none."""

    @property
    def saved(self) -> int:
        """Bytes that sharing saves."""
        return self.per_role - self.shared


@attrs.frozen(kw_only=True)
class Absent:
    """A figure that was not measured, and why."""

    figure: str
    says: str
    failed: bool = False
    """Whether it should have been there: what was tried broke."""


@attrs.frozen(kw_only=True)
class Verdict:
    """One target, and what was reached."""

    figure: str
    what: str
    wanted: float
    reached: float
    at_most: bool
    """Whether ``wanted`` is the most that is allowed, or the least."""
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Whether the target is met."""
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted

    @property
    def missed_by(self) -> float:
        """By which share of the target it is missed; 0 where it is met."""
        return 0.0 if self.holds else abs(self.reached - self.wanted) / self.wanted


@attrs.frozen(kw_only=True)
class BenchReport:
    """All that was measured of one plan on one machine."""

    plan: Plan
    model: str
    backends: dict[str, str]
    """Name and version of each backend of the plan."""
    facts: dict[str, str]
    """Where and with what: device, driver, versions of packages, date, command line."""
    clock: str
    """What times are taken with."""
    page_size: int
    decode: tuple[Decode, ...] = ()
    preparation: tuple[Preparation, ...] = ()
    chain: tuple[Chain, ...] = ()
    throughput: Throughput | None = None
    capture: Capturing | None = None
    pools: Pools | None = None
    absent: tuple[Absent, ...] = ()
    interrupted: bool = False
    """Whether it was stopped before all figures were measured."""

    @property
    def failed(self) -> tuple[Absent, ...]:
        """The figures that broke."""
        return tuple(absent for absent in self.absent if absent.failed)
