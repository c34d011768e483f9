"""The report of a bench, as plain data without torch. Times are in seconds, memory in bytes.

Each number stands next to the one that it is compared with, of the same run.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted
from capture_planner_runner.ledger.rows import GraphCapture

FIGURES = ("decode", "preparation", "chain", "throughput", "capture", "pools")
"""The figures of a bench, in the order of measuring."""


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return ``part / whole``; None if either was not measured or ``whole`` is 0."""
    return part / whole if part is not None and whole else None


@attrs.frozen(kw_only=True)
class GraphReplays:
    """A graph that a step replays, and how often."""

    role: Role
    entry: Entry
    times: int


@attrs.frozen(kw_only=True)
class Decode:
    """One decode step of the runner, everything included, against its graphs alone."""

    num_reqs: int
    graphs: tuple[GraphReplays, ...]
    """The graphs of the step: the target's and, with a drafter, the drafter's."""
    windows: int
    steps: int
    step: float
    bare: float
    eager: float | None
    host: float
    """The host's part of a step before its replays, from the ledger."""

    @property
    def overhead(self) -> float:
        return self.step / self.bare

    @property
    def gain(self) -> float | None:
        """The eager step relative to the bare graphs."""
        return ratio(self.eager, self.bare)


@attrs.frozen(kw_only=True)
class Preparation:
    """Host time of preparing the forwards of one role in a decode whose lengths grow."""

    num_reqs: int
    role: Role
    backends: tuple[str, ...]
    steps: int
    step: float
    """Mean of the steps of a decode: values, dispatch, fill, padding and backends. A drafter's fields are
    filled with the target's, and fields that a graph advanced are not filled."""
    stage: float
    """Median of steps that make all fields: derived fields, fill, padding and backends."""
    prepare: float
    """Median of the backends' share of ``stage``."""
    stock: float | None = None
    """Median of the library's own plan call of the same shape; None if it has none."""

    @property
    def of_stock(self) -> float | None:
        """``step`` relative to the library's own plan call."""
        return ratio(self.step, self.stock)


@attrs.frozen(kw_only=True)
class ChainTiming:
    """The draft decodes of one step: as one graph, as single-step graphs, and eager."""

    num_reqs: int
    steps: int
    """Draft decodes per chain."""
    fused: float | None
    """None if a backend needs the host between draft steps, so that no graph holds a chain."""
    single: float
    eager: float
    host: float | None = None
    """The host's part of a single step: preparation, guards and, on a GPU, the launch; None: not measured."""

    @property
    def one(self) -> float:
        """A single step, replayed in a row."""
        return self.single / self.steps

    @property
    def over_single(self) -> float | None:
        return ratio(self.single, self.fused)

    @property
    def over_eager(self) -> float:
        return self.eager / (self.fused or self.single)


@attrs.frozen(kw_only=True)
class Throughput:
    """Tokens per second, end to end, of the runner and of transformers' continuous batching."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_second: float
    other: float | None = None
    """Tokens per second of transformers; None if not measured."""
    other_says: str = ""
    """Version and attention of transformers, or the reason why it was not measured."""

    @property
    def gain(self) -> float | None:
        return ratio(self.tokens_per_second, self.other)


@attrs.frozen(kw_only=True)
class CaptureCost:
    """The cost of capturing all graphs."""

    seconds: float
    pool: int
    """Bytes of the pools."""
    driver: int
    """Bytes that the device lost outside of the allocator; 0 on a CPU."""

    @property
    def memory(self) -> int:
        return self.pool + self.driver


@attrs.frozen(kw_only=True)
class CaptureFigure:
    """The capture of the whole plan by the runner, and by a bare loop over the same graphs."""

    graphs: int
    first_seconds: float
    """The first capture of the process, which also compiles and loads kernels."""
    first_compiled: float
    """Seconds of it in which Triton compiled kernels: 0 where its cache on disk has them."""
    first_driver: int
    """Bytes that the first capture took outside of the allocator: later ones find them with the driver."""
    ours: CaptureCost
    bare: CaptureCost | None
    """None without a CUDA device."""
    captured: tuple[GraphCapture, ...]
    """Each graph, as the runner captured it."""

    @property
    def of_seconds(self) -> float | None:
        return None if self.bare is None else ratio(self.ours.seconds, self.bare.seconds)

    @property
    def of_memory(self) -> float | None:
        return None if self.bare is None else ratio(self.ours.memory, self.bare.memory)


@attrs.frozen(kw_only=True)
class Pools:
    """One pool for all roles, against one per role. Both are bytes."""

    shared: int
    per_role: int
    requests: int
    differing: tuple[str, ...]
    """Requests whose tokens differ between the two: normally none."""

    @property
    def saved(self) -> int:
        return self.per_role - self.shared


@attrs.frozen(kw_only=True)
class AbsentFigure:
    """A figure that was not measured, with the reason."""

    figure: str
    says: str
    failed: bool = False
    """Whether measuring it was tried and failed."""


@attrs.frozen(kw_only=True)
class TargetVerdict:
    """A target and the value that was reached."""

    figure: str
    what: str
    wanted: float
    reached: float
    at_most: bool
    """Whether ``wanted`` is an upper bound, or else a lower one."""
    unit: str = ""

    @property
    def holds(self) -> bool:
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted

    @property
    def missed_by(self) -> float:
        """The distance from the target relative to it; 0 if it is met."""
        return 0.0 if self.holds else abs(self.reached - self.wanted) / self.wanted


@attrs.frozen(kw_only=True)
class BenchReport:
    """The figures of one plan on one machine."""

    plan: Plan
    model: str
    backends: dict[str, str]
    """Name and version of each backend of the plan."""
    facts: dict[str, str]
    """Device, driver, versions of packages, date, command line."""
    clock: str
    page_size: int
    decode: tuple[Decode, ...] = ()
    preparation: tuple[Preparation, ...] = ()
    chain: tuple[ChainTiming, ...] = ()
    throughput: Throughput | None = None
    capture: CaptureFigure | None = None
    pools: Pools | None = None
    absent: tuple[AbsentFigure, ...] = ()
    interrupted: bool = False
    """Whether it was stopped before all figures were measured."""

    @property
    def failed(self) -> tuple[AbsentFigure, ...]:
        return tuple(absent for absent in self.absent if absent.failed)


# Targets, for a model of 0.6 billion parameters on an H100; elsewhere they are a yardstick.

STEP_OF_BARE = 1.08
"""Most that a decode step may take, relative to its bare graphs."""
OF_TRANSFORMERS = 5.0
"""Least throughput, relative to transformers."""
OF_STOCK = 0.5
"""Most host time of a preparation, relative to the library's own plan call."""
PREPARATION = 60e-6
"""Most host seconds of a preparation without a plan on the host, at ``MANY`` requests."""
MANY = 256
OVER_SINGLE, OVER_EAGER = 1.3, 4.0
"""Least speed-up of a draft chain in one graph."""
OF_BARE_LOOP = 1.1
"""Most seconds and bytes of a capture, relative to a bare loop."""


def verdicts(report: BenchReport) -> Iterator[TargetVerdict]:
    """Yield a verdict for each target whose figure was measured."""
    for decode in report.decode:
        subject = f"step of {counted(decode.num_reqs, 'request')} by its bare graphs"
        yield _at_most("decode", subject, STEP_OF_BARE, decode.overhead)
    if report.throughput is not None and report.throughput.gain is not None:
        subject = "tokens per second by those of transformers"
        yield _at_least("throughput", subject, OF_TRANSFORMERS, report.throughput.gain)
    for row in report.preparation:
        if row.role is Role.TARGET and row.of_stock is not None:
            subject = f"preparation of {counted(row.num_reqs, 'request')} by a stock plan call"
            yield _at_most("preparation", subject, OF_STOCK, row.of_stock)
        elif row.role is Role.TARGET and row.num_reqs == MANY:
            subject = f"preparation of {MANY} requests"
            yield _at_most("preparation", subject, PREPARATION * 1e6, row.step * 1e6, unit="us")
    for chain in report.chain:
        if chain.over_single is not None:
            subject = f"chain of {counted(chain.steps, 'draft decode')}, {counted(chain.num_reqs, 'request')}"
            yield _at_least(
                "chain", f"{subject}: times faster than single steps replayed", OVER_SINGLE, chain.over_single
            )
            yield _at_least("chain", f"{subject}: times faster than eager", OVER_EAGER, chain.over_eager)
    if report.capture is not None:
        ratios = {"seconds": report.capture.of_seconds, "MiB per graph": report.capture.of_memory}
        for unit, ratio in ratios.items():
            if ratio is not None:
                yield _at_most("capture", f"{unit} by a bare torch.cuda.graph loop", OF_BARE_LOOP, ratio)


def _at_most(figure: str, subject: str, target: float, reached: float, unit: str = "") -> TargetVerdict:
    return TargetVerdict(figure=figure, what=subject, wanted=target, reached=reached, at_most=True, unit=unit)


def _at_least(figure: str, subject: str, target: float, reached: float) -> TargetVerdict:
    return TargetVerdict(figure=figure, what=subject, wanted=target, reached=reached, at_most=False)
