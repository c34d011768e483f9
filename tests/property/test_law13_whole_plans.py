"""Law 13 on whole plans: brute force over all tables of small deployments, judged by the planner's own judge.

A table has sizes for each ladder, or none. The target's ladders and the draft prefill's with the same counts have one
choice. A pass costs what ``Prices`` has for the entry that ``LadderAnswers`` gives; counts weigh what they are smoothed
to. Only the choice is tested: ``test_law13_measured`` has the programs that make it.
"""

import math
from unittest import mock

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.modes import Chain, GraphMode, GraphSupport, Pool, Refresh, Role
from capture_planner.planning.costs import Curve
from capture_planner.planning.measured import search
from capture_planner.planning.measured.steps import LadderAnswers, judge
from capture_planner.planning.measured.teams import NANO, SCALE, prior_share
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.batch import Kind
from capture_planner.records.environment import Environment
from capture_planner.records.model import Method, Speculative
from capture_planner.records.profile import ExpertCost, GraphCost
from capture_planner.records.spec import Budget, KindGraphs, Limits, Lora, Parallel, Policy, Sizes, Spec
from capture_planner.testing import FakeBackend, PlanInputs, measurements
from support.brute_force import MOST_TABLES, Problem, same, tables_of
from support.measured import GPU, MODEL, decodes


@pytest.fixture(scope="module", autouse=True)
def exactly():
    """The best table itself, whatever sizes are preferred among those that cost nearly the same."""
    with mock.patch.object(search, "NEARLY", 0):
        yield


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
def problems(draw, objectives=("mean", "token", "regret", "p50", "p90"), slowdowns=(None, 0.01, 0.5, 1e9)):
    """Small deployments of one to three roles, with a budget and an objective."""
    most = draw(st.integers(1, 6))
    longest = draw(st.integers(0, 3))
    tokens = draw(st.integers(most, 12))
    speculative = None
    if longest:
        split = draw(st.integers(1, most))
        schedule = ((1, split, longest), (split + 1, most, longest - 1)) if draw(st.booleans()) and split < most else ()
        chain = draw(st.sampled_from(Chain))
        speculative = Speculative(method=Method.EAGLE3, num_tokens=longest, schedule=schedule, chain=chain)
    spec = Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=most, max_num_tokens=tokens),
        mode=draw(st.sampled_from([mode for mode in GraphMode if mode is not GraphMode.NONE])),
        backend="alpha",
        speculative=speculative,
        lora=draw(st.none() | st.just(Lora(max_active=2, specialize=True))),
        parallel=draw(st.sampled_from((Parallel(), Parallel(tensor=2, sequence=True)))),
        sizes=Sizes(
            policy=Policy.MEASURED,
            objective=draw(st.sampled_from(objectives)),
            max_slowdown=draw(st.sampled_from(slowdowns)),
        ),
        budget=draw(budgets()),
        pool=draw(st.sampled_from(Pool)),
    )
    support = dict.fromkeys(Role, Support(level=GraphSupport.ALWAYS, reason="drawn"))
    backend = FakeBackend(name="alpha", supports=support, refreshes=draw(st.sampled_from(Refresh)))
    registry = Registry([RegisteredBackend(backend=backend, distribution="d", version="1")])
    machine = Environment(name="h100", device=GPU)
    known = draw(measurements(spec, machine))
    if speculative is None or speculative.chain is Chain.SINGLE:
        apart = draw(st.sampled_from((0.0, 0.5, 5.0)))
        known = attrs.evolve(known, profile=replace(known.profile, step_milliseconds=apart))
    return PlanInputs(spec=spec, environment=machine, registry=registry, measurements=known)


def problem_of(inputs):
    """The problem with what was chosen, where a plan exists."""
    try:
        problem = Problem(inputs)
        return problem, problem.choose()
    except PlanningError:
        assume(False)


@settings(max_examples=max(settings.default.max_examples, 60))
@given(problems())
def test_no_table_within_the_budget_costs_less(inputs):
    """Law 13: mean, regret and percentile of whole plans, under bounds on graphs, their kinds, memory and seconds."""
    problem, found = problem_of(inputs)
    chosen = [ladder for ladder in found.ladders if ladder.sizes]
    assert not chosen or problem.bounds.hold(chosen)
    tables = list(problem.tables())
    least, value = problem.best(tables), (problem.kept(chosen), problem.cost(chosen))
    if any("charged each graph as the largest of its ladder" in note for note in found.table.notes):
        # Seconds by size decide here: what the search adds up is an upper bound of them, and it says so.
        fewest, most = problem.best([each for each in tables if problem.charges(each)])
        assert value <= (fewest, most + problem.price(most))
    else:
        assert value == least


@pytest.mark.thorough
@settings(max_examples=1000)
@given(problems())
def test_no_table_within_the_budget_costs_less_on_a_thousand_problems(inputs):
    """Law 13, at length."""
    test_no_table_within_the_budget_costs_less.hypothesis.inner_test(inputs)


@given(problems(), st.data())
def test_no_table_within_the_memory_costs_less(inputs, data):
    """Law 13: where largest graphs take most of the memory, mixed batches those beyond what decodes have."""
    share = st.sampled_from((0.5, 2.0, 7.0))
    graphs = tuple(
        GraphCost(role=role, mode=GraphMode.FULL, mib=data.draw(share), mib_per_token=data.draw(share), seconds=0.0)
        for role in inputs.spec.active_roles
    )
    budget = Budget(memory=data.draw(st.integers(1, 30)) * (5 << 20))
    known = attrs.evolve(inputs.measurements, profile=replace(inputs.measurements.profile, graphs=graphs, base_mib=0.0))
    problem, found = problem_of(attrs.evolve(inputs, spec=replace(inputs.spec, budget=budget), measurements=known))
    assume(math.prod(map(len, problem.choices)) <= MOST_TABLES // 20)
    chosen = [ladder for ladder in found.ladders if ladder.sizes]
    assert not chosen or problem.bounds.hold(chosen)
    shared = any("charged for the pool that both grow" in note for note in found.table.notes)
    assert shared or (problem.kept(chosen), problem.cost(chosen)) == problem.best(list(problem.tables()))


@given(problems(objectives=("mean", "token"), slowdowns=(1e9,)))
def test_what_is_said_of_sizes_is_what_they_cost(inputs):
    """The mean step by the smoothed counts, what each ladder adds to it, and what one more graph would take off."""
    problem, table = problem_of(inputs)
    chosen = [ladder for ladder in table.ladders if ladder.sizes]
    prices, demand = problem.prices, problem.demand
    extra = sum(prices.experts(*each) * weight for *each, weight in problem.all_passes())
    extra += sum(
        (prices.of(each, None, repeats) - prices.experts(each, repeats)) * weight
        for each, repeats, weight in demand.unserved
    )
    expected = problem.cost(chosen) / (NANO * SCALE) + extra / demand.total
    expected += problem.measurements.profile.base_overhead
    assert table.expected == pytest.approx(expected, rel=1e-6)  # each pass is rounded to nanoseconds
    assume(all(any(same(each, team[0]) for each in chosen) for team in problem.teams))
    gains = [0.0]
    for team, weights in zip(problem.teams, problem.weights, strict=True):

        def cost(ladders, team=team, weights=weights):
            return sum(problem.passes(team, count, ladders) * weight for count, weight in enumerate(weights) if weight)

        own = problem.mixed(team, chosen)
        spent, number = cost(own), len(own[0].sizes)
        costs = {}
        for ladders in tables_of(team):
            if table.table.table.limit.measured and not problem.is_measured(ladders):
                continue
            costs.setdefault(len(ladders[0].sizes), []).append(cost(ladders))
        least = min(map(min, costs.values()))
        graphs = sum(len(ladder.reduced.cases) for ladder in team)
        gains += [(spent - min(each)) / graphs for size, each in costs.items() if size == number + 1]
        for ladder, decision in zip(table.ladders, table.decisions, strict=False):
            sentence = decision.message.removeprefix(f"{ladder}: ")
            if any(same(ladder, each) for each in team):
                passes = problem.demand.team(tuple(e for e in problem.alive if same(e, team[0]))).passes
                assert sentence.startswith(f"up to {ladder.sizes[-1]}, for {passes} passes in ")
                assert f"; {spent / (NANO * SCALE):.4g} ms of a mean step" in sentence
                assert not least or sentence.endswith(f", {spent / least - 1:.2%} more than with every size")
    assert table.next_graph_ms == pytest.approx(max(gains) / (NANO * SCALE), rel=1e-9)
    shared = [each for each in table.decisions if each.message.endswith("so both have the same sizes")]
    assert bool(shared) == any(len(team) > 1 for team in problem.teams)
    passes = [problem.demand.passes[each] for each in problem.alive]
    weight = sum(float(prior_share(number)) * number for number in passes)
    assert table.prior == pytest.approx(weight / sum(passes) if any(passes) else 1.0)


@given(problems(objectives=("mean", "token", "regret")), st.sampled_from((0.25, 3.0, 40.0)))
def test_what_experts_take_chooses_no_size(inputs, each):
    """They skip padding, so a batch takes them on any graph and on none; the mean step is longer by them."""
    known, counts = inputs.measurements, tuple(range(1, 65))

    def eager(curve, more):
        times = tuple(Curve.of(curve)(n) + more * n * (curve.draft_steps or 1) for n in counts)
        return replace(curve, tokens=counts, milliseconds=times) if curve.mode is GraphMode.NONE else curve

    plain, slower = (tuple(eager(curve, more) for curve in known.profile.curves) for more in (0.0, each))
    experts = tuple(ExpertCost(role=role, tokens=(7,), milliseconds=(7 * each,)) for role in Role)
    (problem, one), (_, other) = (
        problem_of(attrs.evolve(inputs, measurements=attrs.evolve(known, profile=profile)))
        for profile in (
            replace(known.profile, curves=plain, experts=()),
            replace(known.profile, curves=slower, experts=experts),
        )
    )
    (kept, cost), (keeps, costs) = (
        (problem.kept(sized), problem.cost(sized))
        for sized in ([ladder for ladder in found.ladders if ladder.sizes] for found in (one, other))
    )
    assert kept == keeps
    # Nanoseconds are rounded.
    assert float(costs) == pytest.approx(float(cost), rel=1e-6)
    if inputs.spec.sizes.objective != "regret":
        more = sum(each * batch.num_tokens * runs * weight for batch, runs, weight in problem.all_passes())
        assert other.expected == pytest.approx(one.expected + more / problem.demand.total, rel=1e-6)


@given(problems(), st.data())
def test_a_larger_budget_never_costs_more(inputs, data):
    """Law 13, monotone in every budget: graphs, graphs by kind, memory, seconds, alone and together."""
    budget = inputs.spec.budget
    more = {
        "max_graphs": budget.max_graphs + data.draw(st.integers(0, 6)),
        "graphs": KindGraphs(
            **{
                kind.value: bound and bound + data.draw(st.integers(0, 3))
                for kind, bound in ((kind, getattr(budget.graphs, kind.value)) for kind in Kind)
            }
        ),
        "memory": None if budget.memory is None else budget.memory + data.draw(st.integers(0, 3)) * (25 << 20),
        "seconds": budget.seconds and budget.seconds * data.draw(st.sampled_from((1, 1.5, 3))),
    }
    larger = attrs.evolve(inputs, spec=replace(inputs.spec, budget=replace(budget, **more)))
    (problem, one), (_, other) = problem_of(inputs), problem_of(larger)
    sized = ([ladder for ladder in each.ladders if ladder.sizes] for each in (one, other))
    (before, cost), (after, later) = ((problem.kept(each), problem.cost(each)) for each in sized)
    assert after <= before
    # Within a larger budget a bound on the worst step may be kept that was not, at its price.
    assert after < before or later <= cost + (problem.price(cost) if problem.spec.sizes.objective != "regret" else 0)


@given(problems(objectives=("p50", "p90", "p99"), slowdowns=(1e9,)), st.data())
def test_no_table_has_a_lower_percentile_of_decodes(inputs, data):
    """Law 13: of decodes of one length, it is the percentile of whole steps, all their passes together."""
    speculative = inputs.spec.speculative
    if speculative is not None:
        inputs = attrs.evolve(inputs, spec=replace(inputs.spec, speculative=replace(speculative, schedule=())))
    query_len = 1 + (speculative.num_tokens if speculative else 0)
    limits = inputs.spec.limits
    most = min(limits.max_num_reqs, limits.max_num_tokens // query_len)
    assume(most)
    counts = data.draw(st.dictionaries(st.integers(1, most), st.sampled_from((1, 3, 50)), min_size=1))
    profile = inputs.measurements.profile
    slower = tuple(
        replace(curve, milliseconds=tuple(each * 20 for each in curve.milliseconds))
        if curve.mode is GraphMode.NONE
        else curve
        for curve in profile.curves
    )
    known = attrs.evolve(
        inputs.measurements, traffic=decodes(counts, query_len), profile=replace(profile, curves=slower)
    )
    problem, found = problem_of(attrs.evolve(inputs, measurements=known))
    percent = float(inputs.spec.sizes.objective[1:])

    def percentile(ladders):
        answers = LadderAnswers(ladders, problem.spec)
        return judge(answers, problem.steps, problem.costs, problem.spec, problem.prices.modes).percentile(percent)

    assume(math.prod(map(len, problem.choices)) <= MOST_TABLES // 10)
    tables = list(problem.tables())
    fewest = min(map(problem.kept, tables))
    least = min(percentile(each) for each in tables if problem.kept(each) == fewest)
    assert percentile(found.ladders) == pytest.approx(least, rel=1e-9)
    assert found.expected == pytest.approx(percentile(found.ladders), rel=1e-9)


@given(problems())
def test_eager_times_that_no_decode_needs_decide_nothing(inputs):
    """An engine whose graphs serve every draft decode has no eager times of them; sizes are the same without."""
    unbounded = attrs.evolve(inputs, spec=replace(inputs.spec, budget=Budget()))
    profile = inputs.measurements.profile
    curves = tuple(c for c in profile.curves if (c.role, c.mode) != (Role.DRAFT_DECODE, GraphMode.NONE))
    without = attrs.evolve(inputs.measurements, profile=replace(profile, curves=curves))
    # Beyond what was measured, an eager time is a bound on that of a graph; ranks pad it to a multiple of two.
    reaches = [c.tokens[-1] for c in curves if c.role is Role.DRAFT_DECODE]
    assume(reaches and min(reaches) > inputs.spec.limits.max_num_reqs)
    _, table = problem_of(unbounded)
    assume(any(ladder.sizes for ladder in table.ladders if ladder.role is Role.DRAFT_DECODE))
    _, again = problem_of(attrs.evolve(unbounded, measurements=without))
    assert [ladder.sizes for ladder in again.ladders] == [ladder.sizes for ladder in table.ladders]
