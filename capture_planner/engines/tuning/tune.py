"""Tune: the plan that measurements choose, next to what a deployment captures today."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.side_by_side import emulation_of_plan
from capture_planner.engines.tuning.judgement import Pricing, SideFigures, judged
from capture_planner.engines.tuning.verdict import (
    LEAST_STEPS,
    SPREAD,
    Noise,
    TuneVerdict,
    noise_between,
    subject_of,
    verdict_on,
)
from capture_planner.errors import BudgetError
from capture_planner.planning.costs import Costs
from capture_planner.records.batch import Batch
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted

TOLERANCE = 0.003
"""Of the tables whose steps take longer by no more than this share of the best, the one with the fewest graphs."""

MOST_GRAPHS = 256
"""Most graphs that are tried where no budget says how many, unless there are more today."""

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)


@attrs.frozen(kw_only=True)
class TuningBounds:
    """What a table may take; None: no bound."""

    graphs: int | None = None
    memory_mib: float | None = None
    seconds: float | None = None

    def hold(self, side: SideFigures) -> bool:
        """Say whether a side is within all bounds."""
        # A bound that is another side's own figure must hold for the same figure.
        return all(
            most is None or value <= most * (1 + 1e-9)
            for value, most in (
                (side.graphs, self.graphs),
                (side.memory_mib, self.memory_mib),
                (side.seconds, self.seconds),
            )
        )


Propose = Callable[[int, TuningBounds | None], Plan]
"""From a number of graphs, and bounds for their memory and time, to the plan that is best within both."""


@attrs.frozen(kw_only=True)
class ParetoPoint:
    """A table of some number of graphs, judged; none of fewer is as good by the objective, and then by the mean."""

    graphs: int
    objective: float
    """As in ``SideFigures``."""
    mean_step_ms: float
    memory_mib: float
    seconds: float
    within: bool
    """Whether it fits the bounds."""


@attrs.frozen(kw_only=True)
class Tuning:
    """Today and what is proposed, judged on the same steps by the same costs."""

    verdict: TuneVerdict
    reason: str
    today: SideFigures | None
    proposed: SideFigures | None
    """None where there is too little data."""
    pareto: tuple[ParetoPoint, ...] = ()
    plan: Plan | None = None
    """What is proposed."""
    pricings: tuple[Pricing, Pricing] | None = None
    """Today's and the plan's; ``today`` and ``proposed`` are their figures over ``judging``."""
    judging: Mapping[Batch, int] = attrs.field(factory=dict, repr=False)
    max_graphs: int | None = None
    """The number of graphs with which it was planned."""
    kept: TuningBounds | None = None
    """The memory and the time of capture with which it was planned; None: those that ``propose`` keeps to by itself."""
    noise: Noise | None = None
    """In the difference of the two sides by the objective."""
    objective: str = "mean"
    notes: tuple[str, ...] = ()
    """What could not be judged, in sentences."""


@attrs.frozen
class _Candidate:
    allowed: int
    plan: Plan
    pricing: Pricing
    chosen: SideFigures
    """On the steps that it was chosen by."""
    kept: TuningBounds | None


def tune(
    today: Emulation,
    propose: Propose,
    costs: Costs,
    chosen: Mapping[Batch, int],
    judging: Mapping[Batch, int],
    *,
    bounds: TuningBounds | None = None,
    objective: str = "mean",
    accepted: float = 0.0,
) -> Tuning:
    """Propose a plan by the steps in ``chosen``, and judge it next to ``today`` on those in ``judging``.

    Of all tables within the bounds it takes the fastest, or of those within ``TOLERANCE`` the one with the fewest
    graphs; never a slower one than today's, if today's is within the bounds.

    :param bounds: what ``propose`` keeps to; None: nothing, and the memory and the time of capture that today's graphs
        take are the bounds, or where no table fits, what the smallest takes.
    :param objective: as in ``Sizes.objective``; ``propose`` chooses by the same.
    :param accepted: drafts that a request gets accepted in a step, on average.
    :raises PlanningError: the profile has no times of a role.
    """
    total = sum(judging.values())
    if total < LEAST_STEPS:
        says = f"{counted(total, 'step')} to judge on; below {LEAST_STEPS:,} nothing is promised"
        return Tuning(verdict=TuneVerdict.TOO_LITTLE_DATA, reason=says, today=None, proposed=None)
    present = Pricing(today, costs)
    before = judged(present, judging, objective=objective, accepted=accepted)
    if not today.graphs and not any(mode.allowed for mode in today.modes.values()):
        says = "graphs are turned off, so no sizes are chosen; allow them, and tune again"
        return Tuning(verdict=TuneVerdict.KEEP, reason=says, today=before, proposed=before)
    past = judged(present, chosen, objective=objective)

    def making(kept: TuningBounds | None) -> Callable[[int], _Candidate]:
        def candidate(count: int) -> _Candidate:
            plan = propose(count, kept)
            pricing = Pricing(_side(plan, today), costs)
            return _Candidate(count, plan, pricing, judged(pricing, chosen, objective=objective), kept)

        return candidate

    number, most = len(today.graphs), bounds.graphs if bounds else None
    candidate = making(None)
    candidates, notes = _candidates(candidate, number, most)
    limits = bounds or _implied(before, candidates)
    within = candidates if bounds else [each for each in candidates if limits.hold(each.chosen)]
    if len(within) < len(candidates):
        # Some tables are too large: others have as many graphs, and end earlier.
        candidate = making(attrs.evolve(limits, graphs=None))
        try:
            smaller = [each for each in _candidates(candidate, number, most)[0] if limits.hold(each.chosen)]
        except BudgetError:  # Not even the passes that never run eager have graphs.
            smaller = []
        within = _by_graphs([*within, *smaller]) or candidates[:1]
    selected = _selected(within, past if limits.hold(past) else None, candidate)
    once = {id(each): each for each in (*candidates, *within, selected)}.values()
    pareto = tuple(_pareto(_by_graphs(once), judging, limits, objective))
    if limits.hold(past) and selected.chosen.objective > past.objective * (1 + 1e-9):
        says = "the measured sizes would take longer than today's on the steps that chose them"
        return Tuning(verdict=TuneVerdict.KEEP, reason=says, today=before, proposed=before, pareto=pareto, notes=notes)
    proposed = judged(selected.pricing, judging, objective=objective, accepted=accepted)
    decisions = [decision for role in selected.plan.roles for decision in role.decisions]
    notes += tuple(each.message for each in decisions if each.rule == "budget-too-small")
    spread = costs.profile.spread
    noise = noise_between(present, selected.pricing, judging, SPREAD if spread is None else spread, objective)
    verdict, reason = verdict_on(before, proposed, noise, objective)
    if not limits.hold(before) and limits.hold(proposed):
        says = _change(before, proposed, objective)
        verdict, reason = TuneVerdict.CHANGE, f"today's graphs exceed the budget; within it {says}"
    return Tuning(
        verdict=verdict,
        reason=reason,
        today=before,
        proposed=proposed,
        pareto=pareto,
        plan=selected.plan,
        pricings=(present, selected.pricing),
        judging=judging,
        max_graphs=selected.allowed,
        kept=selected.kept,
        noise=noise,
        objective=objective,
        notes=notes,
    )


def _by_graphs(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    return sorted(candidates, key=lambda each: (each.plan.num_graphs, each.chosen.rank))


def _change(before: SideFigures, after: SideFigures, objective: str) -> str:
    change = after.objective / before.objective - 1
    return f"the {subject_of(objective)} takes {abs(change):.1%} {'more' if change > 0 else 'less'} time"


def _candidates(
    candidate: Callable[[int], _Candidate], today: int, most: int | None
) -> tuple[list[_Candidate], tuple[str, ...]]:
    """Return the best table of each number of graphs that is tried, without those that need no more than one before.

    Too few graphs leave passes without one that the engine never runs eager, so that its profile has no times of them:
    such tables are left out, with a note. Raises ``BudgetError`` where no table is left.
    """
    top = max(MOST_GRAPHS, today) if most is None else most
    numbers = sorted({count for count in _COUNTS if count < top} | {top} | ({today} if 0 < today <= top else set()))
    candidates: list[_Candidate] = []
    notes: tuple[str, ...] = ()
    for count in numbers:
        try:
            tried = candidate(count)
        except BudgetError as error:
            if count == numbers[-1]:
                raise
            message = error.problems[0].message
            notes = (f"tables of at most {counted(count, 'graph')} are not judged: {message}",)
            continue
        graphs = candidates[-1].plan.num_graphs if candidates else None
        if tried.plan.num_graphs != graphs:
            candidates.append(tried)
        elif count > 2 * graphs:
            break  # More graphs would buy nothing.
    return candidates, notes


def _implied(today: SideFigures, candidates: Sequence[_Candidate]) -> TuningBounds:
    """Return as bounds what today's graphs take, or where no table fits, what the one with the fewest graphs takes.

    Graphs up to the largest batch can take more memory than any number of smaller ones.
    """
    own = TuningBounds(memory_mib=today.memory_mib, seconds=today.seconds)
    if any(own.hold(each.chosen) for each in candidates):
        return own
    least = candidates[0].chosen
    return TuningBounds(memory_mib=max(today.memory_mib, least.memory_mib), seconds=max(today.seconds, least.seconds))


def _side(plan: Plan, today: Emulation) -> Emulation:
    """Return the plan as a side: of the roles that run today, by the scheduler that runs today."""
    side = emulation_of_plan(plan)
    managers = tuple(each for each in side.managers if each.role in today.modes)
    return attrs.evolve(side, managers=managers, whole_prompts=today.whole_prompts)


def _selected(
    candidates: Sequence[_Candidate], past: SideFigures | None, candidate: Callable[[int], _Candidate]
) -> _Candidate:
    """Return the candidate with the fewest graphs that is nearly the best, and no worse than ``past``.

    Of those whose objective is near, the mean step decides: a few slow steps say nothing of all others. Between the
    numbers of graphs that were tried it searches on, down to steps of a sixteenth.
    """
    best = min(each.chosen.objective for each in candidates)
    most = best * (1 + TOLERANCE)
    if past is not None:
        most = max(best, min(most, past.objective))
    mean = min(each.chosen.mean_step_ms for each in candidates if each.chosen.objective <= most) * (1 + TOLERANCE)

    def is_near(each: _Candidate) -> bool:
        return each.chosen.objective <= most and each.chosen.mean_step_ms <= mean

    index = next(index for index, each in enumerate(candidates) if is_near(each))
    few, selected = candidates[index - 1].allowed if index else 0, candidates[index]
    while index and selected.allowed - few > max(1, selected.allowed // 16):
        try:
            between = candidate((few + selected.allowed) // 2)
        except BudgetError:
            few = (few + selected.allowed) // 2  # as in _candidates
            continue
        if is_near(between):
            selected = between
        else:
            few = between.allowed
    return selected


def _pareto(
    candidates: Sequence[_Candidate], judging: Mapping[Batch, int], limits: TuningBounds, objective: str
) -> Iterator[ParetoPoint]:
    """Yield the candidates that are faster than all with fewer graphs, on the steps that chose them.

    Those within the limits are compared with each other alone, as those beyond them are no choice.
    """
    fastest = dict.fromkeys((True, False), (math.inf, math.inf))
    for each in candidates:
        side = judged(each.pricing, judging, objective=objective)
        within = limits.hold(side)
        if each.chosen.rank >= fastest[within]:
            continue
        fastest[within] = each.chosen.rank
        yield ParetoPoint(
            graphs=side.graphs,
            objective=side.objective,
            mean_step_ms=side.mean_step_ms,
            memory_mib=side.memory_mib,
            seconds=side.seconds,
            within=within,
        )
