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
from capture_planner.records.observation import BatchCount, Observation
from capture_planner.records.promise import ExpectedSteps, Promise, PromisedSteps
from capture_planner.records.text import counted
from capture_planner_tuner.journal import PromiseVerdict

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
    classes, own, without = tuple(_classes(promise.after, steps)), _side(promise.after, after), _without(promise, steps)
    verdict, reason = _verdict(own, without, classes)
    return PromiseCheck(
        verdict=verdict,
        reason=reason,
        after=own,
        before=None if before is None else _side(promise.before, before),
        without_ms=without,
        classes=classes,
    )


def _verdict(own: SideCheck | None, without: float | None, classes: Sequence[ClassCheck]) -> tuple[PromiseVerdict, str]:
    too_little = PromiseVerdict.TOO_LITTLE_DATA
    if own is None:
        return too_little, "no step of a promised shape was timed"
    # Before numbers: few steps of promised shapes say that the load is another one.
    if own.share < LEAST_SHARE:
        return too_little, f"only {own.share:.0%} of the steps have a promised shape and a time"
    if own.steps < LEAST_STEPS:
        return too_little, f"{counted(own.steps, 'step')} of promised shapes; below {LEAST_STEPS:,} nothing is decided"
    if own.timed < LEAST_TIMED:
        return too_little, f"{counted(own.timed, 'step')} were timed; below {LEAST_TIMED} nothing is decided"
    took, where = f"the mean step takes {own.measured_ms:.2f} ms", ""
    timed = [each for each in classes if each.role is Role.TARGET and each.measured_ms is not None]
    if timed:
        # By time lost in all of its steps: a rare row may be far off and matter little.
        worst = max(timed, key=lambda each: each.excess_ms)
        where = f"; most of it in {worst.name}: {worst.measured_ms:.2f} ms, not {worst.promised_ms:.2f}"
        if worst.other_mode:
            served = "eager" if worst.mode is GraphMode.NONE else f"on {worst.mode.value} graphs"
            where += f", {worst.other_mode:,} of {worst.steps:,} steps not {served}"
    if own.measured_ms > own.expected_ms + max(TOLERANCE * own.expected_ms, 2 * own.error_ms):
        more = f"{own.off:.0%} more than the {own.expected_ms:.2f} ms promised for this load"
        return PromiseVerdict.BROKEN, f"{took}, {more}{where}"
    if without is not None and own.measured_ms > without + max(LEAST_LOSS * without, 2 * own.error_ms):
        more = f"{own.measured_ms / without - 1:.0%} more than the {without:.2f} ms that it takes without the plan"
        return PromiseVerdict.BROKEN, f"{took}, {more}{where}"
    return PromiseVerdict.KEPT, f"{took}, and {own.expected_ms:.2f} ms were promised for this load"


def _observed(observation: Observation) -> list[_Step]:
    """Return the steps of every role by shape."""
    found = []
    for role in observation.roles:
        families = decode_families(role.role, observation)
        for count in role.batches:
            batch = count.batch(role.role)
            kind = kind_of(batch, families)
            query_len = batch.decode_query_len if kind is Kind.DECODE else None
            mode = GraphMode.NONE if count.graph is None else role.graphs[count.graph].entry.mode
            # The target's interval has the passes of its drafters in it.
            time = (None, 0, 0.0) if role.role.is_drafter else _time(count)
            found.append(_Step(role.role, query_len, batch.extent(kind), mode, count.steps, *time))
    return found


def _time(count: BatchCount) -> tuple[float | None, int, float]:
    """Return the mean milliseconds of a step, of how many steps it is, and its standard error."""
    if count.interval is None:
        return None, 0, 0.0
    timed, error = count.intervals or count.samples, count.interval_error
    # Older observations have no error of their own.
    assumed = SCATTER * count.interval / math.sqrt(max(timed, 1))
    return count.interval, timed, assumed if error is None else error


def _about(side: ExpectedSteps, step: _Step) -> tuple[list[PromisedSteps], PromisedSteps | None, PromisedSteps | None]:
    """Return the rows that include a step, and the next smaller and the next larger one of its kind."""
    alike = [row for row in side.rows if row.role is step.role and row.query_len == step.query_len]
    below = max((row for row in alike if row.last < step.extent), key=lambda row: (row.last, row.first), default=None)
    above = min((row for row in alike if row.first > step.extent), key=lambda row: (row.first, row.last), default=None)
    return [row for row in alike if row.first <= step.extent <= row.last], below, above


def _promised_ms(side: ExpectedSteps, step: _Step) -> float | None:
    """Return what a step is expected to take; None: no row is about so large a step of its kind.

    Rows that include it count by their shares; between two rows, time is interpolated.
    """
    including, below, above = _about(side, step)
    if including:
        weight = sum(row.share for row in including)
        # Shares of a promise can all be 0: rows that no step was expected in.
        if not weight:
            return sum(row.milliseconds for row in including) / len(including)
        return sum(row.milliseconds * row.share for row in including) / weight
    # Below the first row a step takes at most what that row does; above the last one nothing was promised.
    if above is None or below is None:
        return None if above is None else above.milliseconds
    part = (step.extent - below.last) / (above.first - below.last)
    return below.milliseconds + part * (above.milliseconds - below.milliseconds)


def _compared(side: ExpectedSteps, steps: Sequence[_Step]) -> list[tuple[_Step, float, float]]:
    """Return the timed steps of promised shapes, each with its time and the promised one, in milliseconds."""
    return [
        (step, step.milliseconds, promised)
        for step in steps
        if step.milliseconds is not None and (promised := _promised_ms(side, step)) is not None
    ]


def _side(side: ExpectedSteps, observation: Observation) -> SideCheck | None:
    compared = _compared(side, _observed(observation))
    number = sum(step.steps for step, *_ in compared)
    if not number:
        return None
    expected = sum(promised * step.steps for step, _, promised in compared) / number
    # What the costs were wrong by, they are wrong by under any load, in proportion.
    costs = side.error_ms * expected / side.mean_step_ms if side.mean_step_ms else side.error_ms
    return SideCheck(
        expected_ms=expected,
        measured_ms=sum(taken * step.steps for step, taken, _ in compared) / number,
        error_ms=math.hypot(costs, *(step.error * step.steps / number for step, *_ in compared)),
        steps=number,
        timed=sum(step.timed for step, *_ in compared),
        # Steps of shapes that are not listed count, too.
        share=number / sum(role.steps for role in observation.roles if not role.role.is_drafter),
    )


def _without(promise: Promise, steps: Sequence[_Step]) -> float | None:
    """Return what the mean step takes without the plan, over the steps that are compared with those under it.

    None where the promise has no row about some of them.
    """
    compared = [step for step, *_ in _compared(promise.after, steps)]
    expected = _compared(promise.before, compared)
    number = sum(step.steps for step in compared)
    if len(expected) < len(compared) or not number:  # means over other steps would not compare
        return None
    return sum(promised * step.steps for step, _, promised in expected) / number


def _classes(side: ExpectedSteps, steps: Sequence[_Step]) -> Iterator[ClassCheck]:
    """Yield the rows that were observed, in the order of the promise."""
    found: dict[int, list[_Step]] = {}
    for step in steps:
        # The row that promises most about a step: one that includes it, else the next larger one.
        including, _, above = _about(side, step)
        row = max(including, key=lambda row: (row.share, -row.last)) if including else above
        found.setdefault(id(row), []).append(step)
    for row in side.rows:
        own = found.get(id(row), [])
        timed = [(step.milliseconds, step.steps) for step in own if step.milliseconds is not None]
        weight = sum(steps for _, steps in timed)
        if own:
            yield ClassCheck(
                role=row.role,
                query_len=row.query_len,
                first=row.first,
                last=row.last,
                mode=row.mode,
                steps=sum(step.steps for step in own),
                promised_ms=row.milliseconds,
                measured_ms=sum(taken * steps for taken, steps in timed) / weight if weight else None,
                timed=sum(step.timed for step in own),
                other_mode=sum(step.steps for step in own if step.mode is not row.mode),
            )
