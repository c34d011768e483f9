"""The policy ``measured``: the sizes of all roles and ladders at once that cost least, within every bound.

The target's batches are the draft prefill's too, and engines run it on the target's padded shape (vLLM 0.33,
``v1/worker/gpu/spec_decode``). So ladders of the two with the same counts have one choice of sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fractions import Fraction

import attrs

from capture_planner.errors import PlanningError, Problem
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.bounds import MICRO, BudgetBounds, family_of, reduced
from capture_planner.planning.costs import Costs
from capture_planner.planning.demand import NANO, Demand, problem_of
from capture_planner.planning.judging import Judgement
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.allocation import SizeGroup, allocate
from capture_planner.planning.sizing.budget import value
from capture_planner.planning.sizing.program import LadderProblem, LadderProgram
from capture_planner.planning.sizing.smoothing import SCALE, prior_share
from capture_planner.planning.sizing.worst import least_worst
from capture_planner.planning.steps import Steps, steps_of
from capture_planner.records._base import digest
from capture_planner.records.batch import Kind
from capture_planner.records.measurements import Measurements
from capture_planner.records.plan import Forecast
from capture_planner.records.spec import Spec
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class MeasuredGroup:
    """Ladders with one choice of sizes, and what was chosen."""

    ladders: tuple[Ladder, ...]
    group: SizeGroup
    mean: LadderProblem
    """What sizes cost by the mean, whatever the objective."""
    passes: int
    """How many passes of the traffic it serves."""


@attrs.frozen(kw_only=True)
class SizeChoice:
    """Sizes of every ladder, and what they are expected to cost."""

    ladders: tuple[Ladder, ...]
    """In the order in which the roles have them."""
    notes: tuple[str, ...]
    """Sentences on the traffic, the profile, and what was decided about all ladders together."""
    sentences: tuple[str, ...]
    """For each ladder, what its sizes cost."""
    worst: Fraction
    """The largest ratio of a batch's time to the time of its own size."""
    next_graph_ms: float
    """What one more graph takes off the mean step."""
    prior: float
    """The prior's part of the weight."""
    bounds: BudgetBounds
    steps: Steps


def measured_sizes(spec: Spec, roles: Sequence[RoleInProgress], costs: Costs, measurements: Measurements) -> SizeChoice:
    """Choose the sizes of every ladder of ``roles``.

    :param roles: with ladders that have no sizes yet.
    :raises PlanningError: no step of the traffic is within the limits, or the profile has no times of a role.
    """
    assert measurements.traffic is not None
    steps = steps_of(measurements.traffic, spec)
    if not steps.total:
        message = "the traffic has no steps of the target within the limits"
        remedy = "check its requests and tokens against limits, or give traffic of this deployment"
        raise PlanningError([Problem(path=("sizes", "traffic"), message=message, remedy=remedy)])
    bounds = BudgetBounds(spec, roles, costs)
    skeletons = [ladder for working in roles for ladder in working.ladders]
    teams = _teams(skeletons)
    ladders, dropped = _reachable(skeletons, teams, costs), frozenset[int]()
    objective = spec.sizes.objective or "mean"
    percent = float(objective[1:]) if objective.startswith("p") else None
    while True:
        active = [ladder for index, ladder in enumerate(ladders) if index not in dropped and ladder.domain]
        demand = Demand(steps, spec, active)
        groups = [_group(team, percent, demand, bounds, costs) for team in _alive(teams, ladders, dropped)]
        groups = _with_pools(groups, bounds)
        limits = _limits(groups, bounds)
        chosen = (least_worst if objective == "regret" else allocate)([each.group for each in groups], limits)
        if chosen is not None:
            break
        dropped |= {ladders.index(_least_valuable(groups, limits))}
    sized = _sized(ladders, dropped, groups, chosen, bounds)
    priced = [_priced(ladder, costs) for ladder in sized]
    weighed = demand.steps
    passes = sum(map(demand.passes, active))
    prior = sum(float(prior_share(demand.passes(ladder))) * demand.passes(ladder) for ladder in active)
    share = prior / passes if passes else 1.0
    families = [family_of(ladder) for ladder in active]
    return SizeChoice(
        ladders=tuple(priced),
        notes=(
            f"{weighed} steps of the target; smoothing and the flat prior have {share:.0%} of the weight",
            *steps.notes,
            *_about(teams, ladders, sized),
            *costs.assumptions(families),
        ),
        sentences=tuple(_sentence(ladder, groups, chosen, demand.steps) for ladder in sized),
        worst=max([Fraction(1), *(g.group.problem.worst(c) for g, c in zip(groups, chosen, strict=True))]),
        next_graph_ms=_next_graph(groups, chosen),
        prior=share,
        bounds=bounds,
        steps=steps,
    )


def _teams(ladders: Sequence[Ladder]) -> list[tuple[int, ...]]:
    """Return the indices of ladders that have one choice of sizes: the target's with the draft prefill's."""
    drafts = {
        (ladder.kind, ladder.query_len, ladder.domain, ladder.max_num_reqs): index
        for index, ladder in enumerate(ladders)
        if ladder.role is Role.DRAFT_PREFILL
    }
    joined: dict[int, tuple[int, ...]] = {}
    for index, ladder in enumerate(ladders):
        draft = drafts.get((ladder.kind, ladder.query_len, ladder.domain, ladder.max_num_reqs))
        if ladder.role is Role.TARGET and draft is not None:
            joined[index] = (index, draft)
    partners = {draft for _, draft in joined.values()}
    return [joined.get(index, (index,)) for index in range(len(ladders)) if index not in partners]


def _reachable(ladders: Sequence[Ladder], teams: Iterable[Sequence[int]], costs: Costs) -> list[Ladder]:
    """End mixed ladders where the profile does: a time beyond is not known to be less with a graph than without."""
    ended = list(ladders)
    for team in teams:
        mixed = [ladders[index] for index in team if ladders[index].kind is Kind.MIXED]
        if not mixed:
            continue
        domain = mixed[0].domain
        reach = min(costs.reach(family_of(ladder)) for ladder in mixed)
        top = max((reach // domain.step * domain.step, *mixed[0].anchors))
        for index in team:
            ended[index] = attrs.evolve(ladders[index], domain=domain.clipped(top))
    return ended


def _alive(
    teams: Iterable[Sequence[int]], ladders: Sequence[Ladder], dropped: Collection[int]
) -> Iterator[tuple[Ladder, ...]]:
    for team in teams:
        alive = tuple(ladders[index] for index in team if index not in dropped and ladders[index].domain)
        if alive:
            yield alive


def _group(
    ladders: tuple[Ladder, ...], percent: float | None, demand: Demand, bounds: BudgetBounds, costs: Costs
) -> MeasuredGroup:
    # The target's batches decide for a draft prefill that shares its sizes.
    mean = problem_of(ladders, demand.weights(ladders[0]), costs)
    problem = mean if percent is None else problem_of(ladders, demand.weights(ladders[0], percent), costs)
    group = SizeGroup(program=LadderProgram(problem), takes=bounds.takes(map(reduced, ladders)))
    return MeasuredGroup(ladders=ladders, group=group, mean=mean, passes=demand.passes(ladders[0]))


def _with_pools(groups: Sequence[MeasuredGroup], bounds: BudgetBounds) -> list[MeasuredGroup]:
    """Give mixed ladders what their largest size takes of the memory, beyond the pools of the fixed ladders."""
    if not any(bound.is_memory for bound in bounds.all):
        return list(groups)
    fixed = bounds.pools(_fixed(groups))
    found = []
    for each in groups:
        if _is_fixed(each):
            found.append(each)
            continue
        extra = []
        for size in each.group.problem.sizes:
            own = bounds.pools((ladder, size) for ladder in each.ladders)
            extra.append(sum(max(taken - fixed.get(pool, 0), 0) for pool, taken in own.items()))
        pool = tuple(extra) if any(extra) else None
        found.append(attrs.evolve(each, group=attrs.evolve(each.group, pool=pool)))
    return found


def _is_fixed(each: MeasuredGroup) -> bool:
    return each.group.problem.least_top == len(each.group.problem.sizes) - 1


def _fixed(groups: Iterable[MeasuredGroup]) -> Iterator[tuple[Ladder, int]]:
    for each in groups:
        if _is_fixed(each):
            yield from ((ladder, each.group.problem.sizes[-1]) for ladder in each.ladders)


def _limits(groups: Sequence[MeasuredGroup], bounds: BudgetBounds) -> list[int]:
    """Return the limits without the memory of the pools that every choice has."""
    taken = sum(bounds.pools(_fixed(groups)).values())
    return [bound.limit - taken if bound.is_memory else bound.limit for bound in bounds.all]


def _least_valuable(groups: Sequence[MeasuredGroup], limits: Sequence[int]) -> Ladder:
    """Return the least valuable ladder of those that take of the first bound that one size each exceeds."""
    least = [each.group.least() for each in groups]
    exceeded = next(index for index, limit in enumerate(limits) if sum(taken[index] for taken in least) > limit)
    pairs = list(zip(groups, least, strict=True))
    taking = [ladder for each, taken in pairs if taken[exceeded] for ladder in each.ladders]
    return min(taking or [ladder for each in groups for ladder in each.ladders], key=value)


def _sized(
    ladders: Sequence[Ladder],
    dropped: Collection[int],
    groups: Sequence[MeasuredGroup],
    chosen: Sequence[tuple[int, ...]],
    bounds: BudgetBounds,
) -> list[Ladder]:
    """Return the ladders with their sizes, and with all LoRA cases where the bounds leave room."""
    sizes = {
        ladder: tuple(each.group.problem.sizes[index] for index in indices)
        for each, indices in zip(groups, chosen, strict=True)
        for ladder in each.ladders
    }
    sized = []
    for index, ladder in enumerate(ladders):
        if index in dropped:
            sized.append(ladder.dropped(Reason.BUDGET))
            continue
        found = sizes.get(ladder, ())
        covered = ladder.domain.clipped(found[-1] if found else 0) if ladder.kind is Kind.MIXED else ladder.domain
        sized.append(attrs.evolve(reduced(ladder), sizes=found, domain=covered))
    for index, ladder in enumerate(ladders):
        full = attrs.evolve(sized[index], cases=ladder.cases)
        if sized[index].sizes and full != sized[index] and bounds.hold([*sized[:index], full, *sized[index + 1 :]]):
            sized[index] = full
    return sized


def _sentence(ladder: Ladder, groups: Sequence[MeasuredGroup], chosen: Sequence[tuple[int, ...]], steps: int) -> str:
    for each, indices in zip(groups, chosen, strict=True):
        if ladder.sizes and any(str(own) == str(ladder) and own.role is ladder.role for own in each.ladders):
            cost, least = _cost(each, indices), each.mean.every_size
            more = f", {cost / least - 1:.2%} more than with every size" if least else ""
            return (
                f"up to {ladder.sizes[-1]}, for {each.passes} passes in {counted(steps, 'step')}; "
                f"{cost / (NANO * SCALE):.4g} ms of a mean step{more}"
            )
    return "no size is left within the budget" if ladder.cut is Reason.BUDGET else "nothing that sizes could serve"


def _cost(each: MeasuredGroup, indices: Sequence[int]) -> int:
    """Return the mean cost of a group's choice; objectives differ in weights alone, so sizes have the same indices."""
    return each.mean.cost(indices)


def _next_graph(groups: Sequence[MeasuredGroup], chosen: Sequence[tuple[int, ...]]) -> float:
    """Return the largest gain of one more size in any group, for each graph that it takes."""
    gains = [0.0]
    for each, indices in zip(groups, chosen, strict=True):
        if len(indices) < len(each.mean.sizes):
            program = each.group.program if each.group.problem is each.mean else LadderProgram(each.mean)
            more = program.value(len(indices) + 1)
            if more is not None:
                graphs = sum(len(reduced(ladder).cases) for ladder in each.ladders)
                gains.append((_cost(each, indices) - more) / graphs)
    return max(gains) / (NANO * SCALE)


def _priced(ladder: Ladder, costs: Costs) -> Ladder:
    """Say what is lost above a ladder's largest size."""
    family, unit = family_of(ladder), ladder.query_len or 1
    if ladder.cut is Reason.BUDGET:
        count = ladder.domain.intervals[-1][1]
        eager = costs.known((ladder.role, GraphMode.NONE, ladder.query_len, ladder.draft_steps))
        if eager is None:
            return attrs.evolve(ladder, price=f"the profile has no eager times of {ladder.role}")
        loss = eager(count * unit) - costs.graph(family)(count * unit)
        return attrs.evolve(ladder, price=f"at {count} that takes {loss:.3g} ms more than a graph")
    if ladder.kind is Kind.DECODE or not ladder.sizes:
        return ladder
    first = ladder.sizes[-1] + 1
    if first > costs.reach(family):
        return attrs.evolve(ladder, price=f"the profile has no graph of more than {costs.reach(family)} tokens")
    loss = costs.eager(ladder.role, None)(first) - costs.graph(family)(first)
    return attrs.evolve(ladder, price=f"at {first} that takes {loss:.3g} ms more than a graph")


def _about(teams: Iterable[Sequence[int]], before: Sequence[Ladder], after: Sequence[Ladder]) -> Iterator[str]:
    if any(len(team) > 1 for team in teams):
        yield "the draft prefill runs on the target's padded shape, so both have the same sizes"
    fewer = [str(new) for old, new in zip(before, after, strict=True) if old.cases != new.cases and new.sizes]
    if fewer:
        yield f"fewer LoRA cases leave more sizes, and the profile has no times by adapters: {', '.join(fewer)}"


def forecast_of(spec: Spec, measured: SizeChoice, judged: Judgement, measurements: Measurements) -> Forecast:
    """Return the plan's forecast: what was chosen, judged by the counts of the traffic as they are."""
    objective = spec.sizes.objective or "mean"
    expected = judged.mean_step_ms
    if objective != "mean":
        expected = float(measured.worst) if objective == "regret" else judged.percentile(float(objective[1:]))
    return Forecast(
        traffic=digest(measurements.traffic),
        profile=digest(measurements.profile),
        objective=objective,
        expected=rounded(expected),
        mean_step_ms=rounded(judged.mean_step_ms),
        regret=rounded(judged.regret),
        eager_share=rounded(judged.eager_share),
        graphs=sum(ladder.num_graphs for ladder in measured.ladders),
        mib=rounded(measured.bounds.memory(measured.ladders) / (1 << 20)),
        seconds=rounded(measured.bounds.micros(measured.ladders) / MICRO),
        next_graph_ms=rounded(measured.next_graph_ms),
        prior=rounded(measured.prior),
    )


def rounded(number: float) -> float:
    """Return a figure of a forecast with six digits, as a plan shows it."""
    return float(f"{number:.6g}")
