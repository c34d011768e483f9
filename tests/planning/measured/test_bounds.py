"""Bounds: what graphs take of a budget, added up a second time, and the smallest budget that admits them."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.planning import planner
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.bounds import MICRO, BudgetBounds, _counted
from capture_planner.planning.sizing import Ladder
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import Domain
from capture_planner.records.profile import GraphCost, Profile
from capture_planner.records.spec import Budget, KindGraphs, Limits, Spec
from capture_planner.testing import PlanInputs, deployments
from support.measured import MODEL, profile

MIB = 1 << 20
QUARTERS = st.integers(0, 40).map(lambda number: number / 4)
EIGHTHS = st.integers(0, 16).map(lambda number: number / 8)


@st.composite
def profiles(draw: st.DrawFn, roles: tuple[Role, ...]) -> Profile:
    """Draw costs of the graphs of some roles, in parts that are added up exactly."""
    graphs = tuple(
        GraphCost(
            role=role,
            mode=GraphMode.FULL,
            mib=draw(QUARTERS),
            driver_mib=draw(QUARTERS),
            mib_per_token=draw(EIGHTHS),
            largest_mib=draw(QUARTERS),
            seconds=draw(QUARTERS),
            seconds_per_token=draw(EIGHTHS),
        )
        for role in roles
        if draw(st.integers(0, 3))
    )
    pool = draw(st.sampled_from(Pool))
    return replace(profile(), graphs=graphs, pool=pool, base_mib=draw(QUARTERS), base_seconds=draw(EIGHTHS))


@st.composite
def problems(draw: st.DrawFn) -> tuple[PlanInputs, BudgetBounds, list[Ladder], Profile]:
    """Draw a deployment with a budget, and its ladders with some sizes each."""
    inputs = draw(deployments(max_reqs=12, max_tokens=48))
    budget = Budget(
        max_graphs=draw(st.none() | st.integers(1, 30)),
        graphs=KindGraphs(**{kind.value: draw(st.none() | st.integers(1, 9)) for kind in Kind}),
        memory=draw(st.none() | st.integers(0, 1600).map(lambda number: number * (MIB // 4))),
        seconds=draw(st.none() | st.sampled_from((0.5, 20.0, 150.0))),
        memory_per_graph=draw(st.integers(0, 9)) * MIB,
        seconds_per_graph=draw(QUARTERS) + 0.25,
    )
    spec = replace(inputs.spec, budget=budget)
    known = draw(profiles(spec.active_roles))
    try:
        spec, roles = planner._resolved(spec, inputs.environment, inputs.registry)
    except PlanningError:
        reject()
    for role in roles:
        role.choose_ladders()
    bounds = BudgetBounds(spec, roles, Costs(known))
    ladders = []
    for ladder in (ladder for role in roles for ladder in role.ladders if ladder.domain):
        last = ladder.domain.ceiling
        chosen = draw(st.sets(st.integers(1, last), max_size=4))
        ladders.append(attrs.evolve(ladder, sizes=ladder.domain.needed(chosen)))
    assume(ladders)
    return attrs.evolve(inputs, spec=spec), bounds, ladders, known


def cost_of(known: Profile, ladder: Ladder) -> GraphCost | None:
    return next((cost for cost in known.graphs if cost.role is ladder.role), None)


def seconds_of(known: Profile, budget: Budget, ladder: Ladder, size: int) -> Fraction:
    """Return the seconds that one graph takes to capture."""
    cost = cost_of(known, ladder)
    if cost is None:
        return Fraction(budget.seconds_per_graph)
    return Fraction(cost.seconds) + Fraction(cost.seconds_per_token) * size * (ladder.query_len or 1)


def bytes_of(known: Profile, budget: Budget, ladder: Ladder) -> int:
    """Return the bytes that one graph adds."""
    cost = cost_of(known, ladder)
    return budget.memory_per_graph if cost is None else int((cost.mib + cost.driver_mib) * MIB)


def pools_of(inputs: PlanInputs | SimpleNamespace, known: Profile, ladders: list[Ladder]) -> int:
    """Return the bytes of all pools: each is as large as its largest graph of each mode needs.

    A role with a pool of its own takes there what capturing takes once.
    """
    apart = Pool.PER_ROLE in (inputs.spec.pool, known.pool)
    needs: dict[object, list[int]] = {}
    for ladder in ladders:
        cost = cost_of(known, ladder)
        for size in ladder.sizes if cost is not None else ():
            tokens = size * (ladder.query_len or 1)
            need = int((cost.largest_mib + cost.mib_per_token * tokens) * MIB)
            needs.setdefault((ladder.role if apart else None, ladder.mode), []).append(need)
    captured = {ladder.role for ladder in ladders if ladder.sizes} if apart else set()
    return sum(map(max, needs.values())) + len(captured) * int(known.base_mib * MIB)


@settings(max_examples=max(settings.default.max_examples, 12))
@given(problems())
def test_what_graphs_take_is_added_up_over_all_of_them(
    problem: tuple[PlanInputs, BudgetBounds, list[Ladder], Profile],
) -> None:
    """Number, kinds, backends' graphs, seconds and memory: within the budget exactly where each sum is."""
    inputs, bounds, ladders, known = problem
    budget, spec = inputs.spec.budget, inputs.spec
    graphs = {ladder: ladder.num_graphs for ladder in ladders}
    seconds = sum(
        seconds_of(known, budget, ladder, size) * len(ladder.served(size))
        for ladder in ladders
        for size in ladder.sizes
    )
    memory = sum(bytes_of(known, budget, ladder) * number for ladder, number in graphs.items())
    memory += pools_of(inputs, known, ladders)
    apart = Pool.PER_ROLE in (spec.pool, known.pool)
    base = 0 if apart else int(known.base_mib * MIB)
    holds = True
    for kind in Kind:
        allowed = budget.allowed_of(kind)
        taken = sum(number for ladder, number in graphs.items() if ladder.kind is kind)
        holds &= allowed is None or taken <= allowed
    holds &= budget.max_graphs is None or sum(graphs.values()) <= budget.max_graphs
    for role in planner._resolved(spec, inputs.environment, inputs.registry)[1]:
        full = sum(number for each, number in graphs.items() if each.role is role.role and each.mode is GraphMode.FULL)
        holds &= all(group.support.max_graphs is None or full <= group.support.max_graphs for group in role.groups)
    holds &= budget.seconds is None or seconds + Fraction(known.base_seconds) <= Fraction(budget.seconds)
    holds &= budget.memory is None or memory + base <= budget.memory
    captured = {ladder.role for ladder in ladders if ladder.sizes}
    assert bounds.hold(ladders) == (holds or not captured)
    assert bounds.micros(ladders) == (seconds + Fraction(known.base_seconds) * bool(captured)) * MICRO
    assert bounds.memory(ladders) == memory + base * bool(captured)
    assert bounds.is_estimate == any((cost := cost_of(known, each)) and cost.seconds_per_token for each in ladders)
    for ladder in ladders:
        assert bounds.has_pool([ladder]) == (
            budget.memory is not None
            and pools_of(inputs, known, [attrs.evolve(ladder, sizes=(ladder.domain.ceiling,))]) > 0
        )


@given(problems())
def test_the_least_that_kinds_of_graphs_take_is_one_size_of_each(
    problem: tuple[PlanInputs, BudgetBounds, list[Ladder], Profile],
) -> None:
    """Decodes at their largest, mixed batches at their anchors; as many LoRA cases as serve all."""
    inputs, bounds, ladders, known = problem
    tops = []
    for ladder in ladders:
        top = ladder.domain.ceiling if ladder.kind is Kind.DECODE else max((1, *ladder.anchors))
        tops.append(attrs.evolve(ladder.reduced, sizes=(top,)))
        assert set(ladder.reduced.cases) == {ladder.cases[0], ladder.cases[-1]}
    least = bounds.least([[ladder] for ladder in ladders])
    for bound, taken in zip(bounds.all, least, strict=True):
        pools = pools_of(inputs, known, tops) if bound.is_memory else 0
        assert taken == pools + sum(bound.each(ladder) * len(ladder.cases) for ladder in tops)
        if bound.exact is None:
            assert bound.each(tops[0]) * tops[0].num_graphs == bound.taken(tops[0])


@given(problems())
def test_a_budget_of_the_amount_that_is_written_admits_what_was_taken(
    problem: tuple[PlanInputs, BudgetBounds, list[Ladder], Profile],
) -> None:
    """Rounded up, and by no more than the last digit."""
    inputs, bounds, ladders, known = problem
    budget = inputs.spec.budget
    for bound in bounds.all:
        taken = sum(bound.taken(ladder) for ladder in ladders)
        text = bound.amount(taken)
        if bound.path == ("budget", "seconds"):
            exact = Fraction(taken, MICRO) + Fraction(known.base_seconds)
            assert float(text) == pytest.approx(float(ceil(exact * 1000) / 1000), rel=1e-5)
            assert bound.text == f"seconds {budget.seconds:g}"
        elif bound.path == ("budget", "memory"):
            own = budget.memory - bound.limit
            assert text == f"{ceil(Fraction(taken + own, MIB))}MiB"
            assert bound.text == f"memory {budget.memory / MIB:g}MiB"
        else:
            assert text == str(taken)
            named = bound.path or ("can hold",)
            assert str(bound.limit) in bound.text
            assert named[-1].partition(".")[0] in bound.text
    assert {bound.path for bound in bounds.all if bound.path} == {
        ("budget", name) for name in ("max_graphs", "memory", "seconds") if getattr(budget, name) is not None
    } | {("budget", "graphs", kind.value) for kind in Kind if budget.allowed_of(kind) is not None}


@st.composite
def ladders_of_decodes(draw: st.DrawFn) -> Ladder:
    """Draw a ladder of decodes of two tokens or more, or of mixed batches, with sizes."""
    kind, last = draw(st.sampled_from(Kind)), draw(st.integers(2, 9))
    return Ladder(
        role=draw(st.sampled_from((Role.TARGET, Role.DRAFT_PREFILL))),
        kind=kind,
        mode=GraphMode.FULL,
        query_len=draw(st.integers(2, 4)) if kind is Kind.DECODE else None,
        domain=Domain.upto(last),
        sizes=tuple(sorted(draw(st.sets(st.integers(2, last), min_size=1)))),
        max_num_reqs=9,
    )


@settings(max_examples=max(settings.default.max_examples, 40))
@given(
    st.lists(ladders_of_decodes(), min_size=1, max_size=3, unique_by=lambda ladder: (ladder.role, ladder.kind)),
    profiles((Role.TARGET, Role.DRAFT_PREFILL)),
    st.integers(0, 1600),
)
def test_graphs_of_several_tokens_take_those_of_every_request(
    ladders: list[Ladder], known: Profile, quarters: int
) -> None:
    """Each kind counts its own graphs; time and memory go by tokens."""
    budget = Budget(graphs=KindGraphs(decode=3, mixed=2), memory=quarters * (MIB // 4), seconds_per_graph=0.5)
    limits = Limits(max_num_reqs=9, max_num_tokens=64)
    spec = Spec(model=MODEL, limits=limits, mode=GraphMode.FULL, backend="alpha", budget=budget)
    bounds = BudgetBounds(spec, (), Costs(known))
    inputs = SimpleNamespace(spec=spec)
    seconds = sum(seconds_of(known, budget, ladder, size) for ladder in ladders for size in ladder.sizes)
    memory = sum(bytes_of(known, budget, ladder) * len(ladder.sizes) for ladder in ladders)
    memory += pools_of(inputs, known, ladders)
    assert bounds.micros(ladders) == (seconds + Fraction(known.base_seconds)) * MICRO
    base = 0 if Pool.PER_ROLE in (spec.pool, known.pool) else int(known.base_mib * MIB)
    assert bounds.memory(ladders) - memory == base
    for bound in bounds.all:
        if bound.path[1] == "graphs":
            kinds = [ladder for ladder in ladders if ladder.kind.value == bound.path[2]]
            assert sum(map(bound.taken, ladders)) == sum(len(ladder.sizes) for ladder in kinds)


@pytest.mark.parametrize("own", Role)
def test_bound_of_a_backend_counts_the_full_graphs_of_its_role(own: Role) -> None:
    """The least that any of its groups holds, named; graphs of other roles and PIECEWISE ones are not counted."""
    groups = [
        SimpleNamespace(support=SimpleNamespace(max_graphs=most), registered=SimpleNamespace(name=f"holds {most}"))
        for most in (9, None, 4, 7)
    ]
    roles = [SimpleNamespace(role=role, groups=groups if role is own else groups[1:2]) for role in Role]
    (bound,) = _counted(Budget(), roles)  # type: ignore[arg-type]
    assert (bound.limit, bound.text, bound.path) == (4, "holds 4 can hold 4 full graphs", ())
    for role in Role:
        for mode in (GraphMode.FULL, GraphMode.PIECEWISE):
            ladder = Ladder(
                role=role, kind=Kind.MIXED, mode=mode, domain=Domain.upto(9), sizes=(1, 3, 9), max_num_reqs=9
            )
            assert bound.taken(ladder) == 3 * (role is own and mode is GraphMode.FULL)
