"""Law 13 on whole plans: brute force over all tables of small deployments, judged by the planner's own judge.

A table has sizes for each ladder, or none. The target's ladders and the draft prefill's with the same counts have one
choice. A pass costs what ``Prices`` has for the entry that ``LadderAnswers`` gives; counts weigh what they are smoothed
to. Only the choice is tested: ``test_law13_measured`` has the programs that make it.
"""

import itertools
import math
from collections import Counter
from fractions import Fraction
from functools import cached_property, partial

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning import planner
from capture_planner.planning.answers import LadderAnswers
from capture_planner.planning.bounds import BudgetBounds, reduced
from capture_planner.planning.costs import Costs
from capture_planner.planning.demand import NANO, Demand
from capture_planner.planning.judging import Prices, judge
from capture_planner.planning.measured import _reachable, _teams, _with_every_size, measured_sizes
from capture_planner.planning.sizing.smoothing import SCALE
from capture_planner.planning.steps import Steps, passes_of, steps_of
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.spec import Budget, KindGraphs
from capture_planner.records.traffic import TrafficCount
from capture_planner.testing import deployments

MOST_TABLES = 20_000


@st.composite
def budgets(draw):
    """Bounds of which the number of graphs is one."""
    return Budget(
        max_graphs=draw(st.integers(1, 10)),
        graphs=KindGraphs(**{kind.value: draw(st.none() | st.integers(1, 6)) for kind in Kind}),
        memory=draw(st.none() | st.integers(0, 12).map(lambda number: number * (25 << 20))),
        seconds=draw(st.none() | st.sampled_from((0.1, 0.5, 1, 2.5))),
        memory_per_graph=draw(st.sampled_from((0, 7 << 20, 25 << 20))),
        seconds_per_graph=draw(st.sampled_from((0.05, 0.25))),
    )


@st.composite
def problems(draw, objectives=("mean", "regret", "p50", "p90")):
    """Small deployments with a budget and an objective."""
    inputs = draw(deployments(max_reqs=6, max_tokens=12, measured=True))
    sizes = replace(inputs.spec.sizes, objective=draw(st.sampled_from(objectives)))
    return attrs.evolve(inputs, spec=replace(inputs.spec, budget=draw(budgets()), sizes=sizes))


class Problem:
    """A deployment before its sizes are chosen, and all its tables."""

    def __init__(self, inputs):
        self.spec, self.measurements = inputs.spec, inputs.measurements
        self.roles = planner._resolved(inputs.spec, inputs.environment, inputs.registry)
        for role in self.roles:
            role.choose_ladders()
        self.costs = Costs(inputs.measurements.profile)
        self.bounds = BudgetBounds(self.spec, self.roles, self.costs)
        skeletons = [ladder for role in self.roles for ladder in role.ladders]
        self.prices = Prices(self.costs, self.spec, {role.role: role.mode for role in self.roles})
        teams = _teams(skeletons)
        ladders = _reachable(skeletons, teams, self.costs)
        self.teams = [tuple(reduced(ladders[i]) for i in team if ladders[i].domain) for team in teams]
        self.teams = [team for team in self.teams if team]
        self.steps = steps_of(self.measurements.traffic, self.spec)
        alive = [ladder for ladder in ladders if ladder.domain]
        self.demand = Demand(self.steps, self.spec, alive)
        self.weights = [
            self.demand.team((next(each for each in alive if reduced(each) == team[0]), *team[1:])).weights
            for team in self.teams
        ]
        objective = self.spec.sizes.objective
        self.tail = None
        if objective.startswith("p"):
            time = partial(_with_every_size, prices=self.prices, spec=self.spec, ladders=alive)
            self.tail = self.steps.percentile(float(objective[1:]), time)

    def choose(self):
        return measured_sizes(self.spec, self.roles, self.costs, self.measurements)

    @cached_property
    def choices(self):
        """For each team, its ladders with all sizes that they may have, and without."""
        return [[(), *_sized(team)] for team in self.teams]

    def tables(self):
        """All tables within the bounds, as ladders that have sizes."""
        assume(math.prod(map(len, self.choices)) <= MOST_TABLES)
        for chosen in itertools.product(*self.choices):
            ladders = [ladder for each in chosen for ladder in each]
            if not ladders or self.bounds.hold(ladders):
                yield ladders

    def value(self, ladders):
        """What a table is ranked by: less is better."""
        if self.spec.sizes.objective == "regret":
            return max([Fraction(1), *(self.ratio(team, ladders) for team in self.teams)])
        mean = sum(
            self.passes(team, count, self.mixed(team, ladders)) * weight
            for team, weights in zip(self.teams, self.weights, strict=True)
            for count, weight in enumerate(weights)
            if weight
        )
        return mean if self.tail is None else (self.tail_time(ladders), mean)

    def mixed(self, team, ladders):
        """The sizes that serve a team: its own, or for decodes those of a role's mixed batches."""
        own = [each for each in ladders if any(same(each, ladder) for ladder in team)]
        return own or [each for each in ladders if each.kind is Kind.MIXED]

    def passes(self, team, count, serving):
        key = team, count, tuple(serving)
        if key not in self._times:
            answers = LadderAnswers(serving, self.spec)
            total = 0
            for ladder in team:
                batch = batch_of(ladder, count)
                entry = answers(attrs.evolve(batch)) if ladder.draft_steps is None else self.chain(serving, count)
                total += round(self.prices.of(batch, entry, ladder.draft_steps or 1) * NANO)
            self._times[key] = total
        return self._times[key]

    @cached_property
    def _times(self):
        return {}

    def chain(self, serving, count):
        """The chain's graph for a count, whatever length the schedule has for it."""
        from capture_planner.planning.answers import entry_of

        sizes = [size for ladder in serving for size in ladder.sizes if size >= count]
        return entry_of(serving[0], min(sizes), 0) if sizes else None

    def ratio(self, team, ladders):
        """The worst ratio of a count's time to that of its own size; eager where the team has no sizes."""
        own = [each for each in ladders if any(same(each, ladder) for ladder in team)]
        domain = team[0].domain
        counts = [n for first, last in domain.intervals for n in range(first, last + 1)]
        tops = {domain.round_up(count): count for count in counts}
        worst = Fraction(1)
        for size, count in tops.items():
            best = min(self.passes(team, each, [attrs.evolve(x, sizes=(s,)) for x in team]) for s, each in tops.items() if s >= size)
            worst = max(worst, Fraction(self.passes(team, count, own), best))
        return worst

    def tail_time(self, ladders):
        total = 0
        for each, repeats in passes_of(self.tail, self.spec):
            entry = LadderAnswers(ladders, self.spec)(each)
            single = entry is None or entry.draft_steps is None
            total += round(self.prices.of(each, entry, 1) * NANO) * (repeats if single else 1)
        return total


def same(one, other):
    return (one.role, one.kind, one.query_len, one.draft_steps) == (
        other.role,
        other.kind,
        other.query_len,
        other.draft_steps,
    )


def batch_of(ladder, count):
    if ladder.kind is Kind.DECODE:
        return Batch.decode(ladder.role, count, ladder.query_len)
    return Batch(role=ladder.role, num_reqs=1, num_tokens=count, query_len=None, past_prompt=False)


def _sized(team):
    """The team with every choice of sizes: decodes and anchors up to their largest."""
    domain = team[0].domain
    sizes = sorted({domain.round_up(n) for first, last in domain.intervals for n in range(first, last + 1)})
    least = sizes[-1] if team[0].kind is Kind.DECODE else min(max((1, *team[0].anchors)), sizes[-1])
    for number in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(sizes, number):
            if chosen[-1] >= least:
                yield tuple(attrs.evolve(ladder, sizes=chosen) for ladder in team)


def problem_of(inputs):
    try:
        problem = Problem(inputs)
        found = problem.choose()
    except PlanningError:
        assume(False)
    return problem, found


@given(problems())
def test_no_table_within_the_budget_costs_less(inputs):
    """Law 13: mean, regret and percentile of whole plans, under bounds on graphs, their kinds, memory and seconds."""
    problem, found = problem_of(inputs)
    chosen = [ladder for ladder in found.ladders if ladder.sizes]
    assert not chosen or problem.bounds.hold(chosen)
    assert problem.value(chosen) == min(map(problem.value, problem.tables()))
