"""The policy ``measured``: the sizes of all roles and ladders at once that cost least, within every bound.

The target's batches are the draft prefill's too, and engines run it on the target's padded shape (vLLM 0.33,
``v1/worker/gpu/spec_decode``). So ladders of the two with the same counts have one choice of sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import attrs

from capture_planner.errors import PlanningError, Problem
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.answers import LadderAnswers
from capture_planner.planning.bounds import MICRO, BudgetBounds, family_of, reduced
from capture_planner.planning.budgeted import table_within
from capture_planner.planning.costs import Costs
from capture_planner.planning.coverage import SizedGroup
from capture_planner.planning.demand import NANO, Demand
from capture_planner.planning.judging import Judgement, Prices, judge
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.program import TAIL
from capture_planner.planning.sizing.smoothing import SCALE, prior_share
from capture_planner.planning.steps import Steps, passes_of, steps_of
from capture_planner.records._base import digest
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.measurements import Measurements
from capture_planner.records.plan import Forecast
from capture_planner.records.spec import Spec
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class SizeChoice:
    """Sizes of every ladder, and what they are expected to cost."""

    ladders: tuple[Ladder, ...]
    """In the order in which the roles have them."""
    notes: tuple[str, ...]
    """Sentences on the traffic, the profile, and what was decided about all ladders together."""
    sentences: tuple[str, ...]
    """For each ladder, what its sizes cost."""
    expected: float
    """The value of the objective, by the smoothed counts: milliseconds, or the worst ratio."""
    next_graph_ms: float
    """What one more graph takes off the mean step."""
    prior: float
    """The prior's part of the weight."""
    bounds: BudgetBounds
    steps: Steps
    warning: str | None
    """Which bounds of the budget leave no graph at all; None: some are left."""


def measured_sizes(spec: Spec, roles: Sequence[RoleInProgress], costs: Costs, measurements: Measurements) -> SizeChoice:
    """Choose the sizes of every ladder of ``roles``.

    :param roles: with ladders that have no sizes yet.
    :raises PlanningError: no step of the traffic is within the limits, or the profile has no times of a role.
    """
    assert measurements.traffic is not None
    profile, steps = measurements.profile, steps_of(measurements.traffic, spec)
    if not steps.total:
        message = "the traffic has no steps of the target within the limits"
        remedy = "check its requests and tokens against limits, or give traffic of this deployment"
        raise PlanningError([Problem(path=("sizes", "traffic"), message=message, remedy=remedy)])
    skeletons = [ladder for working in roles for ladder in working.ladders]
    teams = _teams(skeletons)
    ladders = _reachable(skeletons, teams, costs)
    active = [ladder for ladder in ladders if ladder.domain]
    demand = Demand(steps, spec, active)
    objective, tail = spec.sizes.objective or "mean", None
    prices = Prices(costs, spec, {working.role: working.mode for working in roles})
    every_size = partial(_with_every_size, prices=prices, spec=spec, ladders=active)
    if objective.startswith("p"):
        tail = steps.percentile(float(objective[1:]), lambda batch: profile.step(batch.num_reqs, *every_size(batch)))
        demand.add_tail(tail)
    alive = [tuple(ladders[index] for index in team if ladders[index].domain) for team in teams]
    fitted = [demand.team(each) for each in alive if each]
    budgeted = table_within(spec, roles, costs, ladders, fitted, regret=objective == "regret")
    table, sized, bounds = budgeted.table, budgeted.ladders, budgeted.bounds
    priced = [_priced(ladder, costs) for ladder in sized]
    passes = sum(map(demand.passes, active))
    prior = sum(float(prior_share(demand.passes(ladder))) * demand.passes(ladder) for ladder in active)
    share = prior / passes if passes else 1.0
    families, notes = [family_of(ladder) for ladder in active], list(budgeted.notes)
    if objective == "regret":
        expected = float(table.worst)
    elif tail is not None:
        answers = LadderAnswers(sized, spec)
        expected = judge(answers, Steps({tail: 1}), costs, spec, prices.modes).mean_step_ms
        real = judge(answers, steps, costs, spec, prices.modes).percentile(float(objective[1:]))
        notes += _about_tail(objective, steps, expected, real)
    else:
        apart = sum((prices.of(each, None, repeats) * count for each, repeats, count in demand.unserved), 0.0)
        for batch, count in steps.counts.items():
            _, drafting = every_size(batch)
            apart += (profile.step(batch.num_reqs, 0.0, drafting) - drafting) * count
        expected = table.value / (NANO * SCALE) + apart / steps.total
    return SizeChoice(
        ladders=tuple(priced),
        notes=(
            f"{demand.steps} steps of the target; smoothing and the flat prior have {share:.0%} of the weight",
            *(f"assumed: {each}" for each in steps.assumptions),
            *steps.notes,
            *notes,
            *_about(teams, ladders, sized),
            *costs.assumptions(families),
        ),
        sentences=tuple(_sentence(ladder, table.groups, demand.steps) for ladder in sized),
        expected=expected,
        next_graph_ms=_next_graph(table.groups),
        prior=share,
        bounds=bounds,
        steps=steps,
        warning=budgeted.warning,
    )


def _with_every_size(batch: Batch, *, prices: Prices, spec: Spec, ladders: Sequence[Ladder]) -> tuple[float, float]:
    """Return the milliseconds of the target's pass, and of the drafter's, all on graphs of their own size."""
    chains = {ladder.draft_steps for ladder in ladders}
    target, *drafting = (
        prices.with_every_size(each, repeats, fused=each.role is Role.DRAFT_DECODE and repeats in chains)
        for each, repeats in passes_of(batch, spec)
    )
    return target, sum(drafting, 0.0)


def _about_tail(objective: str, steps: Steps, expected: float, real: float) -> Iterator[str]:
    """Say what a percentile rests on, except for decodes of one length: there more requests never take less time."""
    if len({batch.uniform_query_len for batch in steps.counts} | {None}) > 2 or any(
        batch.uniform_query_len is None for batch in steps.counts
    ):
        other = "" if real <= expected * (1 + 1e-9) else f"; with these sizes the {objective} step takes {real:.4g} ms"
        yield (
            f"assumed: the {objective} step is the same one as with a graph of every size, and takes {expected:.4g} ms"
            f"{other}"
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


def _sentence(ladder: Ladder, groups: Sequence[SizedGroup], steps: int) -> str:
    for each in groups:
        if ladder.sizes and any(str(own) == str(ladder) and own.role is ladder.role for own in each.team.ladders):
            cost, least = each.cost % TAIL, each.group.problem.every_size % TAIL
            more = f", {cost / least - 1:.2%} more than with every size" if least else ""
            return (
                f"up to {ladder.sizes[-1]}, for {each.team.passes} passes in {counted(steps, 'step')}; "
                f"{cost / (NANO * SCALE):.4g} ms of a mean step{more}"
            )
    return "no size is left within the budget" if ladder.cut is Reason.BUDGET else "nothing that sizes could serve"


def _next_graph(groups: Sequence[SizedGroup]) -> float:
    """Return the largest gain of one more size in any group, for each graph that it takes."""
    gains = [0.0]
    for each in groups:
        more = each.group.program.value(len(each.sizes) + 1) if len(each.sizes) < each.group.program.most else None
        if more is not None:
            graphs = sum(len(reduced(ladder).cases) for ladder in each.team.ladders)
            gains.append((each.cost % TAIL - more % TAIL) / graphs)
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
    """Return the plan's forecast: what was chosen, and what it takes by the counts of the traffic as they are."""
    return Forecast(
        traffic=digest(measurements.traffic),
        profile=digest(measurements.profile),
        objective=spec.sizes.objective or "mean",
        expected=rounded(measured.expected),
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
