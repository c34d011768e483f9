"""Law 13 with more kinds of graphs than all sets of which are tried: draft lengths by batch size, each with its own."""

from __future__ import annotations

from itertools import combinations
from unittest import mock

from capture_planner.modes import Chain, GraphMode, GraphSupport, Refresh, Role
from capture_planner.planning import planner
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured import search as searching
from capture_planner.planning.measured.bounds import BudgetBounds
from capture_planner.planning.measured.choice import _teams
from capture_planner.planning.measured.search import Limit
from capture_planner.planning.measured.steps import steps_of
from capture_planner.planning.measured.teams import Demand
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Budget, Limits, Policy, Sizes, Spec
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner.testing import FakeBackend
from support.measured import GPU, MODEL
from support.tuning import profile

MACHINE = Environment(name="h100", device=GPU)
SUPPORT = dict.fromkeys(Role, Support(level=GraphSupport.ALWAYS, reason="drawn"))
BACKEND = FakeBackend(name="alpha", supports=SUPPORT, refreshes=Refresh.IN_GRAPH)
REGISTRY = Registry([RegisteredBackend(backend=BACKEND, distribution="d", version="1")])


def spec_of(longest: int, graphs: int) -> Spec:
    """A deployment that drafts ``longest`` tokens for one request, and one fewer for each more."""
    schedule = tuple((number, number, longest + 1 - number) for number in range(1, longest + 1))
    return Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=longest, max_num_tokens=4 * longest),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend="alpha",
        speculative=Speculative(method=Method.EAGLE3, num_tokens=longest, schedule=schedule, chain=Chain.FUSED),
        sizes=Sizes(policy=Policy.MEASURED),
        budget=Budget(max_graphs=graphs),
    )


def measured(spec: Spec) -> Measurements:
    """Steps of every number of requests, the more the rarer."""
    assert spec.speculative is not None
    batches = []
    for num_reqs in range(1, spec.limits.max_num_reqs + 1):
        query_len = 1 + spec.speculative.draft_tokens(num_reqs)
        tokens, count = num_reqs * query_len, 1000 // num_reqs**2
        batches.append(
            TrafficCount(
                role=Role.TARGET,
                num_reqs=num_reqs,
                num_tokens=tokens,
                query_len=query_len,
                past_prompt=True,
                count=count,
            )
        )
    costs = profile(tuple(Role), speculative=replace(spec.speculative, schedule=()))
    return Measurements(traffic=Traffic(sources=("drawn",), batches=tuple(batches)), profile=costs)


def searched(spec: Spec, measurements: Measurements) -> searching._WaivedSets:
    """The search in which sets of waived teams are tried."""
    spec, roles = planner._resolved(spec, MACHINE, REGISTRY)
    for role in roles:
        role.choose_ladders()
    ladders = [ladder for role in roles for ladder in role.ladders]
    costs = Costs(measurements.profile)
    demand = Demand(steps_of(measurements.traffic, spec), spec, ladders, "mean")
    teams = [demand.team(tuple(ladders[index] for index in team)) for team in _teams(ladders)]
    return searching._WaivedSets(teams, BudgetBounds(spec, roles, costs), costs, searching.Aim(), {})


def test_more_than_ten_kinds_are_chosen_as_if_all_sets_were_tried() -> None:
    """Twelve kinds and five graphs: every set of kinds by brute force."""
    spec = spec_of(6, 5)
    known = measured(spec)
    search = searched(spec, known)
    number = len(search._teams)
    assert number == 12
    # The target's decodes keep their graphs where any table has them.
    tables = [
        (len(frozenset(dropped) & frozenset(search._kept)), search.table(frozenset(dropped), Limit(), regret=False))
        for count in range(number + 1)
        for dropped in combinations(range(number), count)
    ]
    _, best = min((kept, table.value) for kept, table in tables if table is not None)
    chosen = searching.least_table(search._teams, search._bounds, search._costs, searching.Aim())
    assert chosen.value == best
    assert chosen.proven


def test_what_is_not_known_to_be_best_says_so() -> None:
    """With so few graphs for so many kinds, sets of waived kinds are too many: the plan has a decision about it."""
    spec = spec_of(6, 5)
    with mock.patch.object(searching, "MOST_SETS", 8):
        plan = planner.plan(spec, MACHINE, REGISTRY, measured(spec))
    said = [each.message for each in plan.roles[0].decisions if "another may cost less" in each.message]
    assert said
    assert "too many sets to try all" in said[0]
    roomy = planner.plan(replace(spec, budget=Budget(max_graphs=500)), MACHINE, REGISTRY, measured(spec))
    assert not [each for each in roomy.roles[0].decisions if "another may cost less" in each.message]
