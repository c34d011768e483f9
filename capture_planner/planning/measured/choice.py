"""The policy ``measured``: the sizes of all roles and ladders at once that cost least, within every bound.

The passes of the traffic are counted by ladder, and ladders with the same counts form teams. ``search`` finds the table
of all teams that costs least, and what is said of it is read off that table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import attrs

from capture_planner.errors import PlanningError, Problem
from capture_planner.modes import Reason, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.bounds import MICRO, BudgetBounds
from capture_planner.planning.measured.search import Aim, BudgetedTable, Limit, SizedGroup, table_within
from capture_planner.planning.measured.steps import LadderAnswers, Modes, Prices, Steps, judge, passes_of, steps_of
from capture_planner.planning.measured.teams import NANO, SCALE, Demand, eager_of, prior_share
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.program import TAIL
from capture_planner.records._base import digest
from capture_planner.records.batch import Kind
from capture_planner.records.measurements import Measurements
from capture_planner.records.plan import Decision, Forecast
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Spec
from capture_planner.records.text import counted

MAX_SLOWDOWN = Fraction(15, 100)
"""Default bound on a step's extra time over a graph of its own size, as a share."""

DOUBLINGS = 7
"""Doublings of that bound where the budget does not hold it, before none is kept."""

_NO_GAIN = "by the profile a graph of {} tokens or more takes no less"


@attrs.frozen(kw_only=True)
class MeasuredSizes:
    """Sizes of every ladder, and what they are expected to cost."""

    ladders: tuple[Ladder, ...]
    """In the order in which the roles have them."""
    decisions: tuple[Decision, ...]
    """What the sizes of each ladder cost; and of the first role, what goes for all: notes, and a warning."""
    expected: float
    """The value of the objective, by the smoothed counts: milliseconds, or the worst ratio."""
    next_graph_ms: float
    """Milliseconds that one more graph takes off the mean step, next to others of its ladder."""
    prior: float
    """The prior's part of the weight."""
    table: BudgetedTable
    _spec: Spec
    _costs: Costs
    _steps: Steps

    def forecast(self, modes: Modes, measurements: Measurements) -> Forecast:
        """Return the plan's forecast: what was chosen, and what it takes by the counts of the traffic as they are.

        :param modes: the mode of each role: NONE where no size was left.
        :param measurements: as they were given, for their digests.
        """
        answer = LadderAnswers(self.ladders, self._spec)
        judged = judge(answer, self._steps, self._costs, self._spec, modes)
        figures = {
            "expected": self.expected,
            "mean_step_ms": judged.mean_step_ms,
            "regret": judged.regret,
            "eager_share": judged.eager_share,
            "mib": self.table.bounds.memory(self.ladders) / (1 << 20),
            "seconds": self.table.bounds.micros(self.ladders) / MICRO,
            "next_graph_ms": self.next_graph_ms,
            "slowdown": self.table.slowdown,
            "max_slowdown": self.table.max_slowdown,
            "prior": self.prior,
        }
        return Forecast(
            traffic=digest(measurements.traffic),
            profile=digest(measurements.profile),
            objective=self._spec.sizes.objective or "mean",
            graphs=sum(ladder.num_graphs for ladder in self.ladders),
            # Six digits, as a plan shows them.
            **{name: float(f"{figure:.6g}") for name, figure in figures.items()},
        )


def choose(spec: Spec, roles: Sequence[RoleInProgress], measurements: Measurements) -> MeasuredSizes:
    """Choose the sizes of every ladder of ``roles``.

    :param roles: with ladders that have no sizes yet.
    :raises PlanningError: no step of the traffic is within the limits, or the profile has no times of a role.
    """
    assert measurements.traffic is not None
    steps, costs = steps_of(measurements.traffic, spec), Costs(measurements.profile)
    if not steps.total:
        message = "the traffic has no steps of the target within the limits"
        remedy = "check its requests and tokens against limits, or give traffic of this deployment"
        raise PlanningError([Problem(path=("sizes", "traffic"), message=message, remedy=remedy)])
    # Where a graph of mixed batches gains nothing, no size is worth trying.
    skeletons = [ladder for working in roles for ladder in working.ladders]
    teams = _teams(skeletons)
    ladders = _gaining(skeletons, teams, costs)
    active = [ladder for ladder in ladders if ladder.domain]
    prices = Prices(costs, spec, {working.role: working.mode for working in roles})
    objective, tail, chains = spec.sizes.objective or "mean", None, {ladder.draft_steps for ladder in active}
    demand = Demand(steps, spec, active, objective)
    if objective.startswith("p"):
        # Which step it is depends on the sizes; it is taken to be the same one as with every size.
        tail = steps.percentile(
            float(objective[1:]), lambda batch: prices.step(batch, prices.on_every_size(batch, chains))
        )
        demand.add_tail(tail)
    alive = [tuple(ladders[index] for index in team if ladders[index].domain) for team in teams]
    fitted = [demand.team(each) for each in alive if each]
    bounds, aim = BudgetBounds(spec, roles, costs), aim_of(spec, measurements.profile)
    table = table_within(bounds, costs, ladders, fitted, aim, measurements.today)
    if tail is None:
        expected, said = _expected(spec, table, demand, prices), tuple[str, ...]()
    else:
        answer, modes = LadderAnswers(table.ladders, spec), prices.modes
        expected = judge(answer, Steps({tail: 1}), costs, spec, modes).mean_step_ms
        real = judge(answer, steps, costs, spec, modes).percentile(float(objective[1:]))
        said = tuple(_about_tail(objective, steps, expected, real))
    # The prior's part of the weight of all passes.
    passes = [demand.passes[ladder] for ladder in active]
    share = sum(float(prior_share(each)) * each for each in passes) / sum(passes) if any(passes) else 1.0
    reach = {ladder.family: ladder.sizes[-1] * ladder.unit for ladder in table.ladders if ladder.sizes}
    notes = (
        f"{steps.total} steps of the target; smoothing and the prior have {share:.0%} of the weight",
        *(f"assumed: {each}" for each in steps.assumptions),
        *steps.notes,
        *table.notes,
        *said,
        *_about_ladders(teams, ladders, table.ladders, demand),
        *costs.assumptions([ladder.family for ladder in active]),
        *(f"assumed: {each}" for each in costs.bounds(reach)),
    )
    sized = tuple(_priced(ladder, costs) for ladder in table.ladders)
    return MeasuredSizes(
        ladders=sized,
        decisions=tuple(_decisions(roles, sized, table, steps.total, notes)),
        expected=expected,
        next_graph_ms=_next_graph(table.table.groups),
        prior=share,
        table=table,
        spec=spec,
        costs=costs,
        steps=steps,
    )


def aim_of(spec: Spec, profile: Profile) -> Aim:
    """Return what the table of a spec is to be: its objective, and the bounds on the worst step to try in turn."""
    if spec.sizes.objective == "regret":
        return Aim(regret=True)
    # Read from its digits: a float near 0.15 is no bound that a person wrote.
    share = MAX_SLOWDOWN if spec.sizes.max_slowdown is None else Fraction(str(spec.sizes.max_slowdown))
    bounds = *(1 + share * 2**doubled for doubled in range(DOUBLINGS)), None
    # Decodes keep the bound as long as they can: most steps of a served load are decodes, whatever its size.
    pairs = *((bounds[0], mixed) for mixed in bounds), *((decodes, None) for decodes in bounds[1:])
    limits = tuple(Limit(*pair, measured=measured) for pair in pairs for measured in (True, False))
    return Aim(limits=limits, base=round(profile.base_overhead * NANO))


def _expected(spec: Spec, table: BudgetedTable, demand: Demand, prices: Prices) -> float:
    """Return the value of a mean, by step or by request, in milliseconds; of the objective regret the worst ratio."""
    if spec.sizes.objective == "regret":
        return float(table.table.worst)
    # The table's value has the passes that ladders serve. Add the others, the overhead of each step, and the experts of
    # all passes, which no size changes.
    apart = 0.0
    for each, repeats, count in demand.unserved:
        apart += (prices.of(each, None, repeats) - prices.experts(each, repeats)) * count
    for batch, weight in demand.weights.items():
        rest = prices.step(batch, ()) + sum(prices.experts(*each) for each in passes_of(batch, spec))
        apart += rest * weight
    return table.table.value / (NANO * SCALE) + apart / demand.total


def _about_tail(objective: str, steps: Steps, expected: float, real: float) -> Iterator[str]:
    """Say what a percentile rests on, except for decodes of one length: there more requests never take less time."""
    lengths = {batch.uniform_query_len for batch in steps.counts}
    if None in lengths or len(lengths) > 1:
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


def _gaining(ladders: Sequence[Ladder], teams: Iterable[Sequence[int]], costs: Costs) -> list[Ladder]:
    """End mixed ladders where a graph takes no less time than an eager pass, at no less than their anchors."""
    ended = list(ladders)
    for team in teams:
        mixed = [ladders[index] for index in team if ladders[index].kind is Kind.MIXED]
        if not mixed or not mixed[0].domain:
            continue
        domain = mixed[0].domain
        graphs = [costs.graph(ladder.family) for ladder in mixed]
        eager = [costs.eager(ladder.role, ladder.query_len) for ladder in mixed]
        least = max((0, *mixed[0].anchors))
        # From the top: a graph of the largest size that gains serves all counts below it.
        sizes = range(domain.ceiling, least, -domain.step)
        gaining = (n for n in sizes if sum(curve(n) for curve in graphs) < sum(curve(n) for curve in eager))
        top = next(gaining, least)
        for index in team:
            ended[index] = attrs.evolve(ladders[index], domain=domain.clipped(top))
    return ended


def _sentence(ladder: Ladder, groups: Sequence[SizedGroup], steps: int) -> str:
    for each in groups:
        # Sizes and LoRA cases have changed since, and a ladder's text has neither.
        if ladder.sizes and any(str(own) == str(ladder) and own.role is ladder.role for own in each.team.ladders):
            # What the batch of a percentile weighs says nothing of a mean step.
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
            graphs = sum(len(ladder.reduced.cases) for ladder in each.team.ladders)
            # Of the mean only: the weight of a percentile's batch is no cost.
            gains.append((each.cost % TAIL - more % TAIL) / graphs)
    return max(gains) / (NANO * SCALE)


def _priced(ladder: Ladder, costs: Costs) -> Ladder:
    """Say what is lost above a ladder's largest size."""
    # All of its batches run eager; the largest one loses most.
    if ladder.cut is Reason.BUDGET:
        eager, tokens = eager_of(ladder, costs), ladder.last * ladder.unit
        if eager is None:
            return attrs.evolve(ladder, price=f"the profile has no eager times of {ladder.role}")
        loss = eager(tokens) - costs.graph(ladder.family)(tokens)
        return attrs.evolve(ladder, price=f"at {ladder.last} that takes {loss:.3g} ms more than a graph")
    if ladder.kind is Kind.DECODE or not ladder.sizes:
        return ladder
    # Decodes are covered to the last; of mixed batches those above the largest size run eager.
    first, replay = ladder.sizes[-1] + 1, costs.graph(ladder.family)
    loss = costs.eager(ladder.role, None)(first) - replay(first)
    bound = "at least " if first > replay.reach and loss > 0 else ""
    price = f"at {first} that takes {bound}{loss:.3g} ms more than a graph" if loss > 0 else _NO_GAIN.format(first)
    return attrs.evolve(ladder, price=price)


def _about_ladders(
    teams: Iterable[Sequence[int]], before: Sequence[Ladder], after: Sequence[Ladder], demand: Demand
) -> Iterator[str]:
    """Say which ladders share their sizes, which have fewer LoRA cases, and which were never observed."""
    if any(len(team) > 1 and before[team[0]].domain for team in teams):
        yield "the draft prefill runs on the target's padded shape, so both have the same sizes"
    pairs = list(zip(before, after, strict=True))
    fewer = [str(new) for old, new in pairs if old.cases != new.cases and new.sizes]
    if fewer:
        yield f"fewer LoRA cases leave more sizes, and the profile has no times by adapters: {', '.join(fewer)}"
    for name in dict.fromkeys(str(new) for old, new in pairs if new.sizes and not demand.passes[old]):
        yield f"no batch of {name} was observed: its sizes follow the prior and the bound on the worst step"


def _decisions(
    roles: Sequence[RoleInProgress], ladders: Sequence[Ladder], table: BudgetedTable, steps: int, notes: Iterable[str]
) -> Iterator[Decision]:
    """Yield a decision of each ladder, and of the first role those about all of them."""
    before = (ladder for working in roles for ladder in working.ladders)
    for old, new in zip(before, ladders, strict=True):
        sizes, last = counted(len(new.sizes), "size"), old.last if old.domain else 0
        message = f"{new}: {_sentence(new, table.table.groups, steps)}"
        yield Decision(rule="sizes-measured", before=f"1..{last}", after=sizes, role=new.role, message=message)
    first = roles[0].role
    for note in notes:
        yield Decision(rule="sizes-measured", before="traffic and profile", after="sizes", role=first, message=note)
    if table.warning is not None:
        yield Decision(rule="budget-too-small", before="graphs", after="none", role=first, message=table.warning)
