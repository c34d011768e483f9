"""Promises: what a plan said that steps would take, against what they took in an observation under it.

Both are corrected for the load: each step that was observed is expected to take what the promise says of its shape, so
another mix of shapes is no broken promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_families, kind_of
from capture_planner.records.journal import PromiseVerdict
from capture_planner.records.observation import BatchCount, Observation, ObservedRole
from capture_planner.records.promise import ExpectedSteps, Promise, PromisedSteps
from capture_planner.records.text import counted

TOLERANCE = 0.10
"""Steps that take longer than was promised by no more than this share keep the promise."""

LEAST_STEPS = 1000
"""Fewer steps of promised shapes neither keep nor break a promise."""

LEAST_TIMED = 50
"""The same of steps whose time until the next was taken."""

LEAST_SHARE = 0.5
"""The least share of the steps that has to have a promised shape and a time."""


LEAST_LOSS = 0.02
"""Steps that take longer by more than this share than without a plan are a loss."""

SCATTER = 0.3
"""Standard deviation of single steps of one shape, as a share of their mean, where an observation does not state it."""


@attrs.frozen(kw_only=True)
class ClassCheck:
    """The steps of one row of a promise, as they were observed."""

    role: Role
    query_len: int | None
    """Tokens of each request of a decode; None: mixed batches."""
    first: int
    """Smallest and largest extent of the row: requests of decodes, tokens of mixed batches."""
    last: int
    mode: GraphMode
    """Mode that was promised."""
    steps: int
    """Steps that were observed."""
    promised_ms: float
    measured_ms: float | None
    """Mean milliseconds of a step; None: none of them was timed, or it is a drafter's row."""
    timed: int = 0
    """Steps that were timed."""
    other_mode: int = 0
    """Steps that ran in another mode than promised."""

    @property
    def excess_ms(self) -> float:
        """By how much all these steps together took longer than promised."""
        return 0.0 if self.measured_ms is None else (self.measured_ms - self.promised_ms) * self.steps

    @property
    def name(self) -> str:
        """The class in words."""
        unit = "token" if self.query_len is None else "request"
        count = str(self.first) if self.first == self.last else f"{self.first} to {self.last}"
        many = f"{count} {unit}{'' if self.last == 1 else 's'}"
        kind = "mixed batches of" if self.query_len is None else f"decodes of {self.query_len} for"
        return f"{self.role.value}: {kind} {many}"


@attrs.frozen(kw_only=True)
class SideCheck:
    """One side of a promise against one observation, over the target's steps that have both."""

    expected_ms: float
    """Mean time of a step, by the promise, under the load that was observed."""
    measured_ms: float
    error_ms: float
    """Standard error of the difference: of the costs, and of the measured mean."""
    steps: int
    """Steps compared: those of promised shapes with a time."""
    timed: int
    """Number of them that were timed."""
    share: float
    """The share of all the target's steps that they are."""

    @property
    def off(self) -> float:
        """By which share steps took longer than expected."""
        return self.measured_ms / self.expected_ms - 1 if self.expected_ms else 0.0


@attrs.frozen(kw_only=True)
class PromiseCheck:
    """Outcome of a promise, and its steps by row."""

    verdict: PromiseVerdict
    reason: str
    after: SideCheck | None
    """Under the plan; None: no step of a promised shape was timed."""
    before: SideCheck | None = None
    """Without the plan, where such an observation is given."""
    without_ms: float | None = None
    """Milliseconds of a step without the plan, by the same promise, under the load of ``after``."""
    classes: tuple[ClassCheck, ...] = ()
    """The rows of the promise that were observed, under the plan; drafters' have no measured time."""


@attrs.frozen
class _Step:
    """Steps of one shape, as observed: how many, and the mean time until the next."""

    role: Role
    query_len: int | None
    extent: int
    mode: GraphMode
    steps: int
    milliseconds: float | None
    timed: int
    error: float
    """Standard error of that mean, in milliseconds; 0 without one."""


def check_promise(promise: Promise, after: Observation, before: Observation | None = None) -> PromiseCheck:
    """Return what became of a promise, by an observation under the plan, and by one without it.

    Kept: under the load that was observed, the mean step takes at most as long as was promised, and no longer than it
    would without the plan. The tolerance is ``TOLERANCE``, or two standard errors where they are more.

    :param after: under the plan.
    :param before: of the engine as it was when the promise was made; it is reported, and decides nothing.
    """
    steps = _observed(after)
    classes = tuple(_classes(promise.after, steps))
    own = _side(promise.after, steps)
    other = None if before is None else _side(promise.before, _observed(before))
    without = _mean_expected(promise.before, promise.after, steps)

    def result(verdict: PromiseVerdict, reason: str) -> PromiseCheck:
        return PromiseCheck(
            verdict=verdict, reason=reason, after=own, before=other, without_ms=without, classes=classes
        )

    lacking = _lacking(own)
    if own is None or lacking is not None:
        return result(PromiseVerdict.TOO_LITTLE_DATA, lacking or "no step of a promised shape was timed")
    took = f"the mean step takes {own.measured_ms:.2f} ms"
    tolerance = max(TOLERANCE * own.expected_ms, 2 * own.error_ms)
    worst = max(_timed(classes), key=lambda each: each.excess_ms, default=None)
    where = "" if worst is None else f"; most of it in {_where(worst)}"
    if own.measured_ms > own.expected_ms + tolerance:
        return result(
            PromiseVerdict.BROKEN,
            f"{took}, {own.off:.0%} more than the {own.expected_ms:.2f} ms promised for this load{where}",
        )
    if without is not None and own.measured_ms > without + max(LEAST_LOSS * without, 2 * own.error_ms):
        return result(
            PromiseVerdict.BROKEN,
            f"{took}, {own.measured_ms / without - 1:.0%} more than the {without:.2f} ms that it takes without the "
            f"plan{where}",
        )
    return result(PromiseVerdict.KEPT, f"{took}, and {own.expected_ms:.2f} ms were promised for this load")


def _lacking(side: SideCheck | None) -> str | None:
    """Return what is too little to decide; None: it is enough."""
    if side is None:
        return "no step of a promised shape was timed"
    if side.share < LEAST_SHARE:
        return f"only {side.share:.0%} of the steps have a promised shape and a time"
    if side.steps < LEAST_STEPS:
        return f"{counted(side.steps, 'step')} of promised shapes; below {LEAST_STEPS:,} nothing is decided"
    if side.timed < LEAST_TIMED:
        return f"{counted(side.timed, 'step')} were timed; below {LEAST_TIMED} nothing is decided"
    return None


def _where(worst: ClassCheck) -> str:
    assert worst.measured_ms is not None
    says = f"{worst.name}: {worst.measured_ms:.2f} ms, not {worst.promised_ms:.2f}"
    return says + (f", {worst.other_mode:,} of {worst.steps:,} steps not {_served(worst.mode)}") * (
        worst.other_mode > 0
    )


def _served(mode: GraphMode) -> str:
    return "eager" if mode is GraphMode.NONE else f"on {mode.value} graphs"


def _timed(classes: Sequence[ClassCheck]) -> Iterator[ClassCheck]:
    return (each for each in classes if each.role is Role.TARGET and each.measured_ms is not None)


def _observed(observation: Observation) -> list[_Step]:
    """Return the steps of every role by shape."""
    return [step for role in observation.roles for step in _of_role(role, observation)]


def _of_role(role: ObservedRole, observation: Observation) -> Iterator[_Step]:
    families = decode_families(role.role, observation)
    for count in role.batches:
        batch = count.batch(role.role)
        kind = kind_of(batch, families)
        mode = GraphMode.NONE if count.graph is None else role.graphs[count.graph].entry.mode
        yield _Step(
            role.role,
            batch.decode_query_len if kind is Kind.DECODE else None,
            batch.extent(kind),
            mode,
            count.steps,
            *_time(count, role.role),
        )


def _time(count: BatchCount, role: Role) -> tuple[float | None, int, float]:
    """Return the mean milliseconds of a step, of how many steps it is, and its standard error."""
    if role.is_drafter:
        return None, 0, 0.0  # the target's interval has its passes in it
    timed = count.intervals or count.samples
    if count.interval_error is not None:
        return count.interval, timed, count.interval_error
    return count.interval, timed, SCATTER * (count.interval or 0.0) / math.sqrt(max(timed, 1))


def _rows(side: ExpectedSteps, step: _Step) -> list[PromisedSteps]:
    return [row for row in side.rows if row.role is step.role and row.query_len == step.query_len]


def _row(side: ExpectedSteps, step: _Step) -> PromisedSteps | None:
    """Return the row that promises most about a step: one that includes it, else the next larger one."""
    rows = _rows(side, step)
    including = [row for row in rows if row.first <= step.extent <= row.last]
    if including:
        return max(including, key=lambda row: (row.share, -row.last))
    return min((row for row in rows if row.first > step.extent), key=lambda row: (row.first, row.last), default=None)


def _promised_ms(side: ExpectedSteps, step: _Step) -> float | None:
    """Return what a step is expected to take; None: no row is about so large a step of its kind.

    Rows that include it count by their shares; between two rows, time is interpolated.
    """
    rows = _rows(side, step)
    including = [row for row in rows if row.first <= step.extent <= row.last]
    if including:
        weight = sum(row.share for row in including)
        if not weight:
            return sum(row.milliseconds for row in including) / len(including)
        return sum(row.milliseconds * row.share for row in including) / weight
    below = max((row for row in rows if row.last < step.extent), key=lambda row: (row.last, row.first), default=None)
    above = min((row for row in rows if row.first > step.extent), key=lambda row: (row.first, row.last), default=None)
    if above is None or below is None:
        return None if above is None else above.milliseconds
    part = (step.extent - below.last) / (above.first - below.last)
    return below.milliseconds + part * (above.milliseconds - below.milliseconds)


def _side(side: ExpectedSteps, steps: Sequence[_Step]) -> SideCheck | None:
    own = [step for step in steps if not step.role.is_drafter]
    pairs = [
        (step, step.milliseconds, promised)
        for step in own
        if step.milliseconds is not None and (promised := _promised_ms(side, step)) is not None
    ]
    number = sum(step.steps for step, *_ in pairs)
    if not number:
        return None
    expected = sum(promised * step.steps for step, _, promised in pairs) / number
    measured = sum(taken * step.steps for step, taken, _ in pairs) / number
    # What the costs were wrong by, they are wrong by under any load, in proportion.
    costs = side.error_ms * expected / side.mean_step_ms if side.mean_step_ms else side.error_ms
    return SideCheck(
        expected_ms=expected,
        measured_ms=measured,
        error_ms=math.hypot(costs, _sampling([step for step, *_ in pairs])),
        steps=number,
        timed=sum(step.timed for step, *_ in pairs),
        share=number / sum(step.steps for step in own),
    )


def _sampling(steps: Sequence[_Step]) -> float:
    """Return the standard error of the mean over steps that were timed, from the errors of each shape's own mean."""
    number = sum(step.steps for step in steps)
    return math.hypot(*(step.error * step.steps / number for step in steps))


def _mean_expected(side: ExpectedSteps, counterpart: ExpectedSteps, steps: Sequence[_Step]) -> float | None:
    """Return what the mean step takes by ``side``, over the steps that ``counterpart`` is compared on.

    None where ``side`` has no row about some of them.
    """
    total = number = 0.0
    for step in steps:
        if step.role.is_drafter or step.milliseconds is None or _promised_ms(counterpart, step) is None:
            continue
        promised = _promised_ms(side, step)
        if promised is None:
            return None
        total, number = total + promised * step.steps, number + step.steps
    return total / number if number else None


def _classes(side: ExpectedSteps, steps: Sequence[_Step]) -> Iterator[ClassCheck]:
    """Yield the rows that were observed, in the order of the promise."""
    found: dict[int, list[_Step]] = {}
    for step in steps:
        row = _row(side, step)
        if row is not None:
            found.setdefault(next(at for at, each in enumerate(side.rows) if each is row), []).append(step)
    for at, row in enumerate(side.rows):
        own = found.get(at, [])
        timed = [(step, step.milliseconds) for step in own if step.milliseconds is not None]
        weight = sum(step.steps for step, _ in timed)
        if own:
            yield ClassCheck(
                role=row.role,
                query_len=row.query_len,
                first=row.first,
                last=row.last,
                mode=row.mode,
                steps=sum(step.steps for step in own),
                promised_ms=row.milliseconds,
                measured_ms=sum(taken * step.steps for step, taken in timed) / weight if weight else None,
                timed=sum(step.timed for step in own),
                other_mode=sum(step.steps for step in own if step.mode is not row.mode),
            )
