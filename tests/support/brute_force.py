"""All tables of small deployments, judged by the planner's own judge: what measured sizes are compared with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any

import attrs
from hypothesis import assume

from capture_planner.modes import Role
from capture_planner.planning import planner
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.bounds import BudgetBounds
from capture_planner.planning.measured.choice import MeasuredSizes, _gaining, _teams, choose
from capture_planner.planning.measured.search import PRICE
from capture_planner.planning.measured.steps import LadderAnswers, Prices, passes_of, steps_of
from capture_planner.planning.measured.teams import NANO, SCALE, Demand
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.program import TAIL
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.testing import PlanInputs

MOST_TABLES = 20_000

Table = tuple[Ladder, ...]
"""The ladders of a team."""


class Problem:
    """A deployment before its sizes are chosen, and all its tables."""

    def __init__(self, inputs: PlanInputs) -> None:
        assert inputs.measurements is not None
        assert inputs.measurements.traffic is not None
        self.spec, self.measurements = inputs.spec, inputs.measurements
        _, self.roles = planner._resolved(inputs.spec, inputs.environment, inputs.registry)
        for role in self.roles:
            role.choose_ladders()
        self.costs = Costs(inputs.measurements.profile)
        self.bounds = BudgetBounds(self.spec, self.roles, self.costs)
        skeletons = [ladder for role in self.roles for ladder in role.ladders]
        self.prices = Prices(self.costs, self.spec, {role.role: role.mode for role in self.roles})
        teams = _teams(skeletons)
        ladders = _gaining(skeletons, teams, self.costs)
        self.teams = [tuple(ladders[i].reduced for i in team if ladders[i].domain) for team in teams]
        self.teams = [team for team in self.teams if team]
        self.steps = steps_of(inputs.measurements.traffic, self.spec)
        alive = [ladder for ladder in ladders if ladder.domain]
        objective = self.spec.sizes.objective or "mean"
        self.demand, self.alive = Demand(self.steps, self.spec, alive, objective), alive
        self.weights = [
            self.demand.team((next(each for each in alive if each.reduced == team[0]), *team[1:])).weights
            for team in self.teams
        ]
        self.tail: Batch | None = None
        if objective.startswith("p"):
            chains = {ladder.draft_steps for ladder in alive}
            self.tail = self.steps.percentile(
                float(objective[1:]), lambda batch: self.prices.step(batch, self.prices.on_every_size(batch, chains))
            )

    def all_passes(self) -> Iterator[tuple[Batch, int, int]]:
        """Each pass of the steps, how often it runs, and what those steps weigh."""
        for step, weight in self.demand.weights.items():
            for batch, repeats in passes_of(step, self.spec):
                yield batch, repeats, weight

    def choose(self) -> MeasuredSizes:
        return choose(self.spec, self.roles, self.measurements)

    @cached_property
    def choices(self) -> list[list[Table]]:
        """For each team, its ladders with all sizes that they may have, and without."""
        return [[(), *tables_of(team)] for team in self.teams]

    def tables(self) -> Iterator[list[Ladder]]:
        """All tables within the bounds, as ladders that have sizes."""
        assume(math.prod(map(len, self.choices)) <= MOST_TABLES)
        for chosen in itertools.product(*self.choices):
            ladders = [ladder for each in chosen for ladder in each]
            if not ladders or self.bounds.hold(ladders):
                yield ladders

    def charges(self, ladders: Sequence[Ladder]) -> bool:
        """Whether a table is within the bounds if each graph of a ladder takes what its largest does."""
        return all(
            sum(bound.each(ladder) * ladder.num_graphs for ladder in ladders) <= bound.limit
            for bound in self.bounds.all
            if bound.exact is not None
        )

    def best(self, tables: Sequence[Sequence[Ladder]]) -> tuple[tuple[int, int], Any]:
        """What the best table has: decodes without graphs that are to keep them, and its cost.

        Of the tables with the fewest such decodes: the least cost within the tightest bounds on the worst step of
        decodes and of mixed batches that the mean step pays at most ``PRICE`` for, with each by measured times if that
        pays as well.
        """
        fewest = min(map(self.kept, tables))
        costs = {number: self.cost(each) for number, each in enumerate(tables) if self.kept(each) == fewest}
        least = min(costs.values())
        if self.spec.sizes.objective == "regret":
            return fewest, least
        bound = Fraction(str(self.spec.sizes.max_slowdown or 0.15))
        levels = [1 + bound * 2**n for n in range(7)]
        limits = [(levels[0], mixed) for mixed in (*levels, math.inf)]
        limits += [(decodes, math.inf) for decodes in (*levels[1:], math.inf)]
        ratios = {number: self.worst_by_kind(tables[number]) for number in costs}
        measured = {number for number in costs if self.is_measured(tables[number])}
        for (decodes, mixed), known in itertools.product(limits, (measured, set(costs))):
            within = [
                costs[number]
                for number, (worst, worst_mixed) in ratios.items()
                if number in known and worst <= decodes and worst_mixed <= mixed
            ]
            if within and min(within) - least <= self.price(least):
                return fewest, min(within)
        return fewest, least

    def is_measured(self, ladders: Sequence[Ladder]) -> bool:
        """Whether no batch runs on a size that was not measured if a measured one holds it and takes less."""
        for team in self.teams:
            reach = min(self.costs.graph(ladder.family).reach for ladder in team)
            every = sizes_of(team)
            known = [size for size in every if size * team[0].unit <= reach]
            own = next((each.sizes for each in ladders if same(each, team[0])), ())
            if known and any(size > known[-1] for size in own) and known[-1] not in own:
                alone = [
                    [attrs.evolve(ladder, sizes=(size,)) for ladder in team] for size in every if size >= known[-1]
                ]
                time, *others = (self.passes(team, team[0].domain.intervals[0][0], each) for each in alone)
                if time < min(others):
                    return False
        return True

    def price(self, cost: int) -> Fraction:
        """The most that a bound on the worst step may add to a cost: to its mean, and nothing to its percentile."""
        return PRICE * (cost % TAIL + self.base * SCALE)

    @property
    def base(self) -> int:
        """Nanoseconds of a step besides its passes."""
        return 0 if self.spec.sizes.objective == "regret" else round(self.measurements.profile.base_overhead * NANO)

    def worst(self, ladders: Sequence[Ladder]) -> Fraction:
        """The worst ratio of all batches."""
        return max([Fraction(1), *(self.ratio(team, ladders, self.base) for team in self.teams)])

    def worst_by_kind(self, ladders: Sequence[Ladder]) -> tuple[Fraction, Fraction]:
        """The worst ratios of decodes and of mixed batches; mixed graphs that serve decodes count as theirs."""
        decodes, mixed = [Fraction(1)], [Fraction(1)]
        without = [team for team in self.teams if not any(same(each, team[0]) for each in ladders)]
        for team in self.teams:
            moved = any(serves(team, each) for each in without) and team not in without
            is_decode = team[0].kind is Kind.DECODE or moved
            (decodes if is_decode else mixed).append(self.ratio(team, ladders, self.base))
        return max(decodes), max(mixed)

    def kept(self, ladders: Sequence[Ladder]) -> tuple[int, int]:
        """How many teams of decodes have no graphs that are to have some; of the target's first.

        A target's are to have some if mixed graphs would serve them, a drafter's if an assumed time alone speaks
        against them.
        """
        known = {(curve.role, curve.mode) for curve in self.measurements.profile.curves}
        lost = [0, 0]
        for team in self.teams:
            alike = [each for other in self.teams if other is team or serves(other, team) for each in other]
            without = not any(same(each, team[0]) for each in ladders)
            of_target = any(each.role is Role.TARGET for each in team)
            assumed = any((each.role, each.mode) not in known for each in alike)
            if without and len(alike) > len(team) and (of_target or assumed):
                lost[of_target] += 1
        return lost[1], lost[0]

    def cost(self, ladders: Sequence[Ladder]) -> Any:
        """The worst ratio, or the weighted nanoseconds of all passes, those of a percentile above all."""
        if self.spec.sizes.objective == "regret":
            return self.worst(ladders)
        mean = sum(
            self.passes(team, count, self.mixed(team, ladders)) * weight
            for team, weights in zip(self.teams, self.weights, strict=True)
            for count, weight in enumerate(weights)
            if weight
        )
        return mean if self.tail is None else self.tail_time(ladders) * TAIL + mean

    def mixed(self, team: Table, ladders: Sequence[Ladder]) -> list[Ladder]:
        """The sizes that serve a team: its own; else for decodes mixed batches', and for chains single steps'."""
        own = [each for each in ladders if any(same(each, ladder) for ladder in team)]
        chain = team[0].draft_steps is not None
        single = [each for each in ladders if chain and each.role is Role.DRAFT_DECODE and each.draft_steps is None]
        return own or single or [each for each in ladders if each.kind is Kind.MIXED]

    def passes(self, team: Table, count: int, serving: Sequence[Ladder]) -> int:
        """Nanoseconds of a team's passes of a count on what serves it, or eager."""
        key = team, count, tuple(serving)
        if key not in self._times:
            answers = LadderAnswers(serving, self.spec)
            total = 0
            for ladder in team:
                batch = batch_of(ladder, count)
                entry = answers(batch) if ladder.draft_steps is None else self.chain(serving, count)
                total += self.nanoseconds(batch, entry, ladder.draft_steps or 1)
            self._times[key] = total
        return self._times[key]

    @cached_property
    def _times(self) -> dict[tuple[Table, int, tuple[Ladder, ...]], int]:
        return {}

    def chain(self, serving: Sequence[Ladder], count: int) -> Entry | None:
        """The chain's graph for a count, whatever length the schedule has for it."""
        ladders = [ladder for ladder in serving if ladder.role is Role.DRAFT_DECODE]
        sizes = [size for ladder in ladders for size in ladder.sizes if size >= count]
        return ladders[0].entry(min(sizes), 0) if sizes else None

    def ratio(self, team: Table, ladders: Sequence[Ladder], base: int) -> Fraction:
        """The worst ratio of a count's time, as it is served or eager, to that on a graph of its own size."""
        serving, domain = self.mixed(team, ladders), team[0].domain
        counts = [n for first, last in domain.intervals for n in range(first, last + 1)]
        sizes, worst = sizes_of(team), Fraction(1)
        for count in counts:
            best = min(
                self.passes(team, count, [attrs.evolve(x, sizes=(s,)) for x in team])
                for s in sizes
                if s >= domain.round_up(count)
            )
            worst = max(worst, Fraction(self.passes(team, count, serving) + base, max(best + base, 1)))
        return worst

    def tail_time(self, ladders: Sequence[Ladder]) -> int:
        """Nanoseconds of the step that a percentile is of, without the passes that no graph could serve."""
        assert self.tail is not None
        total, unserved = 0, {each for each, *_ in self.demand.unserved}
        for each, repeats in passes_of(self.tail, self.spec):
            # A price is a share of what sizes change.
            if each in unserved:
                continue
            entry = LadderAnswers(ladders, self.spec)(each)
            single = entry is None or entry.draft_steps is None
            total += self.nanoseconds(each, entry, 1) * (repeats if single else 1)
        return total

    def nanoseconds(self, batch: Batch, entry: Entry | None, repeats: int) -> int:
        """What passes of a batch add to a step, without the experts, which take the same whatever serves it."""
        return round((self.prices.of(batch, entry, repeats) - self.prices.experts(batch, repeats)) * NANO)


def serves(other: Table, team: Table) -> bool:
    """Whether graphs of other ladders serve the decodes of a team."""
    if team[0].kind is not Kind.DECODE or not {each.role for each in other} <= {each.role for each in team}:
        return False
    single = other[0].kind is Kind.DECODE and other[0].draft_steps is None and team[0].draft_steps is not None
    return single or other[0].kind is Kind.MIXED


def same(one: Ladder, other: Ladder) -> bool:
    """Whether two ladders are of the same graphs."""
    return (one.role, one.kind, one.query_len, one.draft_steps) == (
        other.role,
        other.kind,
        other.query_len,
        other.draft_steps,
    )


def batch_of(ladder: Ladder, count: int) -> Batch:
    """A batch of a count of a ladder."""
    if ladder.query_len is not None:
        return Batch.decode(ladder.role, count, ladder.query_len)
    return Batch(role=ladder.role, num_reqs=1, num_tokens=count, query_len=None, past_prompt=False)


def sizes_of(team: Table) -> list[int]:
    """All sizes that some count of a team needs."""
    domain = team[0].domain
    return sorted({domain.round_up(n) for first, last in domain.intervals for n in range(first, last + 1)})


def tables_of(team: Table) -> Iterator[Table]:
    """The team with every choice of sizes: decodes and anchors up to their largest."""
    sizes = sizes_of(team)
    least = sizes[-1] if team[0].kind is Kind.DECODE else min(max((1, *team[0].anchors)), sizes[-1])
    for number in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(sizes, number):
            if chosen[-1] >= least:
                yield tuple(attrs.evolve(ladder, sizes=chosen) for ladder in team)
