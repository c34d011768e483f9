"""Law 13, measured sizes are optimal: no other table costs less, and a larger budget never costs more."""

import itertools
from fractions import Fraction
from unittest import mock

import attrs
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.measuring.fits import predict
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured import allocation
from capture_planner.planning.measured.allocation import SizeGroup, allocate, least_worst
from capture_planner.planning.sizing.policies import DEFAULT_RATIO
from capture_planner.planning.sizing.program import LadderProblem, LadderProgram
from capture_planner.records._base import replace
from capture_planner.testing import deployments
from support.forecasts import forecast

small = st.integers(0, 6)


@st.composite
def raw_ladders(draw, most=7, longest=12):
    """Sizes with times in any order, weights, eager times that grow, and the least top."""
    count = draw(st.integers(1, most))
    sizes = sorted(draw(st.sets(st.integers(1, 40), min_size=count, max_size=count)))
    times = [draw(st.integers(1, longest)) for _ in sizes]
    weights = [draw(st.sampled_from((0, 0, 1, 2, 7))) for _ in sizes]
    eager = sorted(draw(st.integers(1, 40)) for _ in sizes)
    return sizes, times, weights, eager, draw(st.sampled_from(sizes))


@st.composite
def small_groups(draw, bounds, longest=12):
    """A few groups that take of the bounds, some of which pay for their largest size too."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        raw = draw(raw_ladders(most=5, longest=longest))
        problem = LadderProblem.of(*raw, known=draw(st.none() | st.sampled_from(raw[0])))
        takes = tuple(draw(st.integers(0, 3)) for _ in range(bounds))
        pool = tuple(itertools.accumulate(draw(small) for _ in problem.sizes)) if draw(st.booleans()) else None
        limit = draw(st.sampled_from((None, None, Fraction(5, 4), Fraction(2))))
        program = LadderProgram(problem, limit, measured=draw(st.booleans()))
        groups.append(SizeGroup(program=program, takes=takes, pool=pool if bounds else None))
    return groups


def tables(problem):
    """Every choice of sizes, by index, that may be a ladder."""
    count = len(problem.sizes)
    for number in range(1, count + 1):
        for chosen in itertools.combinations(range(count), number):
            if chosen[-1] >= problem.least_top:
                yield chosen


def near(group):
    """Every choice of sizes that the group's limit allows."""
    return allowed(group.program)


def allowed(program):
    """Every choice of sizes within the ratio, where asked for with the largest measured size below larger ones."""
    problem, border = program.problem, program.problem.border if program.measured else -1
    near = [each for each in tables(problem) if each[-1] <= border or border < 0 or border in each]
    return [each for each in near if program.limit is None or problem.worst(each) <= program.limit]


def within(groups, choice, bounds):
    """Whether a choice for all groups is within every bound."""
    taken = [group.taken(len(chosen), chosen[-1]) for group, chosen in zip(groups, choice, strict=True)]
    return all(sum(each[i] for each in taken) <= bound for i, bound in enumerate(bounds))


def cost(groups, choice):
    return sum(group.problem.cost(chosen) for group, chosen in zip(groups, choice, strict=True))


def worst(groups, choice):
    return max(group.problem.worst(chosen) for group, chosen in zip(groups, choice, strict=True))


def bounded(groups):
    """Whether every group takes of a bound; others have as many sizes as a tolerance says."""
    return all(any(group.takes) or group.pool is not None for group in groups)


@given(raw_ladders())
def test_sizes_that_are_not_worth_a_graph_are_never_needed(raw):
    """Law 13: with all sizes to choose from, no ladder costs less than the best of those that are kept."""
    sizes, times, weights, eager, least_top = raw
    program = LadderProgram(LadderProblem.of(*raw))
    for number in range(1, len(sizes) + 1):
        best = None
        for chosen in itertools.combinations(range(len(sizes)), number):
            if sizes[chosen[-1]] < least_top:
                continue
            total, first = 0, 0
            for index in chosen:
                total += times[index] * sum(weights[first : index + 1])
                first = index + 1
            total += sum(w * e for w, e in zip(weights[first:], eager[first:], strict=True))
            best = total if best is None else min(best, total)
        # As many sizes, or fewer where fewer are worth a graph.
        values = [program.value(n) for n in range(1, min(number, program.most) + 1)]
        found = min((value for value in values if value is not None), default=None)
        assert found is not None
        assert best is None or found <= best or len(sizes) > program.most


@given(raw_ladders())
def test_the_program_finds_the_least_cost_for_every_number_of_sizes(raw):
    """Law 13: equal to brute force, and of equal costs the smallest sizes, the largest first."""
    problem = LadderProblem.of(*raw)
    program = LadderProgram(problem)
    for number in range(1, program.most + 1):
        for highest in (None, *range(program.most)):
            choices = [
                (problem.cost(chosen), chosen[::-1])
                for chosen in tables(problem)
                if len(chosen) == number and (highest is None or chosen[-1] <= highest)
            ]
            assert program.value(number, highest) == min(choices, default=(None,))[0]
            if choices:
                assert program.sizes(number, highest) == min(choices)[1][::-1]
    assert problem.every_size == min(map(problem.cost, tables(problem)))


@st.composite
def mixed_problems(draw):
    """Problems of sizes that also serve other counts, which take less on graphs of their own."""
    sizes, times, weights, eager, least_top = draw(raw_ladders())
    own = [max(time - draw(st.integers(0, 3)), 1) for time in times]
    alone = [draw(st.fractions(1, 3)) for _ in times]
    base, every_top, known = draw(st.sampled_from((0, 0, 3))), draw(st.booleans()), draw(st.sampled_from(sizes))
    return LadderProblem.of(
        sizes, times, weights, eager, least_top, own=own, alone=alone, base=base, known=known, every_top=every_top
    )


@settings(max_examples=max(settings.default.max_examples, 80))
@given(mixed_problems(), st.none() | st.fractions(1, 4), st.booleans(), st.data())
def test_the_program_finds_the_least_cost_within_a_ratio(problem, limit, measured, data):
    """Law 13, no count takes longer than so many times its own size: equal to brute force for every number of sizes.

    Nor does one that a measured size holds run on one that was not measured, where that is asked for.
    """
    program = LadderProgram(problem, limit, measured=measured)
    near = allowed(program)
    assert program.least == min(near, key=lambda chosen: (len(chosen), chosen[::-1]), default=())
    if near:
        assert program.every_size == min(map(problem.cost, near))
        prices = data.draw(st.lists(small, min_size=program.most, max_size=program.most))
        for each in (0, 3):
            priced = {chosen: problem.cost(chosen) + each * len(chosen) + prices[chosen[-1]] for chosen in near}
            value, number, top = program.penalised(each, prices)
            assert value == min(priced.values())
            assert value in [price for chosen, price in priced.items() if (len(chosen), chosen[-1]) == (number, top)]
    for number in range(1, program.most + 1):
        for highest in (None, *range(program.most)):
            choices = [
                (problem.cost(chosen), chosen[::-1])
                for chosen in near
                if len(chosen) == number and (highest is None or chosen[-1] <= highest)
            ]
            assert program.value(number, highest) == min(choices, default=(None,))[0]
            if choices:
                assert program.sizes(number, highest) == min(choices)[1][::-1]


@settings(max_examples=max(settings.default.max_examples, 50))
@given(raw_ladders(longest=4) | raw_ladders(), st.data())
def test_the_worst_ratio_is_that_of_some_size(raw, data):
    """Law 13, regret: each size's time where it is served, or its eager time, to its own; a time of nothing is one."""
    sizes, times, weights, eager, least_top = raw
    times = [time - data.draw(st.integers(0, 1)) for time in times]
    problem = LadderProblem.of(sizes, times, weights, eager, least_top)
    for chosen in tables(problem):
        ratios = [Fraction(1)]
        for index, own in enumerate(problem.times):
            serving = [problem.times[other] for other in chosen if other >= index]
            ratios.append(Fraction(serving[0] if serving else problem.eager[index], max(own, 1)))
        assert problem.worst(chosen) == max(ratios)
    ratios = [Fraction(each, max(own, 1)) for each, own in zip(problem.eager, problem.times, strict=True)]
    assert problem.alone[-1] == max(ratios)


@given(raw_ladders(), st.fractions(1, 6))
def test_the_fewest_sizes_within_a_ratio(raw, ratio):
    """Law 13, regret: the fewest sizes by brute force, and the smallest of those."""
    problem = LadderProblem.of(*raw)
    near = [chosen for chosen in tables(problem) if problem.worst(chosen) <= ratio]
    assume(near)
    assert problem.within(ratio) == min(near, key=lambda chosen: (len(chosen), chosen[::-1]))


@settings(max_examples=max(settings.default.max_examples, 60))
@given(st.data(), st.integers(1, 3), st.sampled_from((12, 60)))
def test_no_table_within_the_bounds_costs_less(data, count, longest):
    """Law 13, all groups together: equal to brute force; of equal costs the fewest sizes."""
    assert_no_table_costs_less(data, count, longest)


@settings(max_examples=max(settings.default.max_examples, 60))
@given(st.data(), st.integers(1, 3), st.sampled_from((12, 60)))
def test_prices_on_the_bounds_leave_out_no_table_that_costs_less(data, count, longest):
    """Law 13: the same where choices are dropped that cannot be completed at the cost of a known table."""
    with mock.patch.object(allocation, "FEW", 0):
        assert_no_table_costs_less(data, count, longest)


def assert_no_table_costs_less(data, count, longest):
    groups = data.draw(small_groups(count, longest).filter(bounded))
    least = [sum(group.least()[i] for group in groups) for i in range(count)]
    bounds = [each + data.draw(st.sampled_from((-1, *range(10)))) for each in least]
    assert_nothing_costs_less(groups, bounds)


def assert_nothing_costs_less(groups, bounds):
    """Compare the choice for all groups with every other one, for the mean and for the regret."""
    found = allocate(groups, bounds)
    choices = [choice for choice in itertools.product(*map(near, groups)) if within(groups, choice, bounds)]
    if found is None:
        assert any(sum(group.least()[i] for group in groups) > bound for i, bound in enumerate(bounds))
    else:
        assert within(groups, found, bounds)
        least = min((cost(groups, choice), sum(map(len, choice))) for choice in choices)
        assert (cost(groups, found), sum(map(len, found))) == least
    free = [attrs.evolve(group, program=LadderProgram(group.problem)) for group in groups]
    choices = [choice for choice in itertools.product(*map(near, free)) if within(free, choice, bounds)]
    regretted = least_worst(free, bounds)
    assert (regretted is None) == (not choices)
    if regretted is not None:
        assert within(groups, regretted, bounds)
        assert worst(groups, regretted) == min(worst(groups, choice) for choice in choices)


def test_the_largest_size_of_an_earlier_group_is_paid_for():
    """Law 13: two groups that both pay for their largest size, within a bound that the costliest choice exceeds."""
    one, other = ([5, 8, 10], [3, 2, 3], [11, 25, 37], 1), ([2, 8, 9], [1, 1, 3], [21, 22, 36], 2)
    groups = [
        SizeGroup(program=LadderProgram(LadderProblem.of([1, 2, 3], *raw)), takes=(2,), pool=pool)
        for raw, pool in ((one, (3, 4, 6)), (other, (0, 2, 6)))
    ]
    assert_nothing_costs_less(groups, [15])


@pytest.mark.thorough
@settings(max_examples=1000)
@given(st.data(), st.integers(1, 3))
def test_no_table_within_the_bounds_costs_less_on_a_thousand_problems(data, count):
    """Law 13, at length."""
    assert_no_table_costs_less(data, count, 60)


@settings(max_examples=max(settings.default.max_examples, 40))
@given(raw_ladders(most=8, longest=60), st.integers(1, 7))
@example(raw=([1, 2, 3, 4, 5], [1, 20, 30, 39, 41], [1] * 5, [1, 20, 30, 39, 41], 5), graphs=2)
def test_ratios_that_are_near_to_each_other_are_told_apart(raw, graphs):
    """Law 13, regret: of many sizes whose times differ little, the least worst ratio by brute force."""
    sizes, times, weights, eager, least_top = raw
    problem = LadderProblem.of(sizes, [240 + t for t in times], weights, [300 + e for e in eager], least_top)
    group = SizeGroup(program=LadderProgram(problem), takes=(1,), pool=None)
    (chosen,) = least_worst([group], [graphs])
    assert problem.worst(chosen) == min(problem.worst(each) for each in tables(problem) if len(each) <= graphs)


@given(small_groups(0))
@example([SizeGroup(program=LadderProgram(LadderProblem.of([1, 2], [8, 9], [1, 1], [20, 21], 2)), takes=())])
def test_groups_that_no_bound_limits_have_the_tolerance_of_the_default(groups):
    """Law 13: the fewest sizes within the worst padding that the policy without data allows, or 1 % of the least."""
    assert least_worst(groups, []) == [group.problem.within(DEFAULT_RATIO) for group in groups]
    chosen = allocate(groups, [])
    assert (chosen is None) == (not all(map(near, groups)))
    for group, found in zip(groups, chosen or (), strict=bool(chosen)):
        costs = {chosen: group.problem.cost(chosen) for chosen in near(group)}
        close = [chosen for chosen, price in costs.items() if 100 * price <= 101 * min(costs.values())]
        assert found in close
        assert len(found) == min(map(len, close))


@given(st.data(), st.integers(1, 3))
def test_a_larger_bound_never_costs_more(data, count):
    """Law 13, monotone: in every bound, for the mean and for the regret."""
    groups = data.draw(small_groups(count).filter(bounded))
    bounds = [data.draw(st.integers(0, 20)) for _ in range(count)]
    larger = [bound + data.draw(small) for bound in bounds]
    for choose, price in ((allocate, cost), (least_worst, worst)):
        limited = groups if choose is allocate else [attrs.evolve(g, program=LadderProgram(g.problem)) for g in groups]
        one, other = choose(limited, bounds), choose(limited, larger)
        if one is not None:
            assert price(groups, other) <= price(groups, one)


def plan_of(inputs):
    """The plan, where one exists."""
    try:
        return inputs.plan()
    except PlanningError:
        assume(False)


@given(deployments(max_reqs=64, measured=True))
def test_the_forecast_is_what_the_dispatcher_gives(inputs):
    """Law 13: a plan's forecast is that of its own entries, walked by the dispatcher over the traffic."""
    plan = plan_of(inputs)
    judged = forecast(plan, inputs.measurements.traffic, Costs(inputs.measurements.profile))
    assert plan.forecast is not None
    assert plan.forecast.graphs == plan.num_graphs
    assert plan.forecast.mean_step_ms == pytest.approx(judged.mean_step_ms, rel=1e-5)
    assert plan.forecast.eager_share == pytest.approx(judged.eager_share, abs=1e-5)
    assert plan.forecast.regret == pytest.approx(judged.regret, rel=1e-5, abs=1e-5)
    assert judged.percentile(100) >= judged.percentile(50) >= judged.times[0][0]


@given(deployments(max_reqs=64, measured=True))
def test_a_measured_plan_is_within_its_budget(inputs):
    """Law 13: graphs, graphs by kind, memory and seconds, as the profile has them."""
    plan = plan_of(inputs)
    budget, kinds = inputs.spec.budget, {"decode": 0, "mixed": 0}
    for role in plan.roles:
        for entry in role.entries:
            kinds["mixed" if entry.query_len is None else "decode"] += 1
    for kind, bound in (("decode", budget.graphs.decode), ("mixed", budget.graphs.mixed)):
        assert bound is None or kinds[kind] <= bound
    assert budget.max_graphs is None or plan.num_graphs <= budget.max_graphs
    assert budget.memory is None or plan.forecast.mib * (1 << 20) <= budget.memory * (1 + 1e-5)
    assert budget.seconds is None or plan.forecast.seconds <= budget.seconds * (1 + 1e-5)
    # An engine without graphs does not begin to capture.
    assert plan.num_graphs or plan.forecast.mib == plan.forecast.seconds == 0


@given(deployments(max_reqs=64, measured=True))
def test_measured_plans_are_the_same_each_time(inputs):
    """Law 13: ties are broken the same way everywhere; nothing depends on the order of a file's lines."""
    plan = plan_of(inputs)
    assert inputs.plan() == plan
    profile, traffic = inputs.measurements.profile, inputs.measurements.traffic
    for changes in (
        {"traffic": replace(traffic, batches=tuple(reversed(traffic.batches)))},
        {"profile": replace(profile, curves=tuple(reversed(profile.curves)), graphs=tuple(reversed(profile.graphs)))},
    ):
        again = attrs.evolve(inputs, measurements=attrs.evolve(inputs.measurements, **changes)).plan()
        assert [role.entries for role in again.roles] == [role.entries for role in plan.roles]


@given(deployments(max_reqs=64, measured=True))
def test_the_forecast_is_what_its_capture_is_predicted_to_take(inputs):
    """Law 13: memory and seconds, where the profile has costs of every role."""
    plan, profile = plan_of(inputs), inputs.measurements.profile
    assume({role.role for role in plan.roles if role.entries} <= {each.role for each in profile.graphs})
    expected = predict(profile, plan)
    assert plan.forecast.mib == pytest.approx(expected.memory_mib, rel=1e-5, abs=1e-4)
    assert plan.forecast.seconds == pytest.approx(expected.seconds, rel=1e-4, abs=1e-4)


def test_ratio_of_a_fraction_is_exact():
    """Law 13: a bound that is reached counts as kept."""
    problem = LadderProblem.of([1, 2], [2, 3], [1, 1], [9, 9], 2)
    assert problem.within(Fraction(3, 2)) == (1,)
    assert problem.within(Fraction(3, 2) - Fraction(1, 10**9)) == (0, 1)
