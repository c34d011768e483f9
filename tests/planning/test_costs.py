"""Costs: times between measured sizes, and which family of a profile stands for another."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs, Curve, Family
from capture_planner.records._base import replace
from capture_planner.records.profile import CostCurve, GraphCost, family_name
from support.measured import profile

MODES = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)
QUERY_LENS, CHAINS = (None, 1, 2, 4, 7), (None, 1, 2, 3, 4, 6)
FAMILIES = st.tuples(
    st.sampled_from((Role.TARGET, Role.DRAFT_DECODE)),
    st.sampled_from(MODES),
    st.sampled_from(QUERY_LENS),
    st.sampled_from(CHAINS),
)

GRAPHS = FAMILIES.filter(lambda family: family[1] is not GraphMode.NONE)


TIMES = st.dictionaries(st.integers(1, 12), st.integers(1, 60), min_size=1)


def curve(times: dict[int, int], mode: GraphMode = GraphMode.FULL) -> CostCurve:
    """Return a measured curve of the target."""
    sizes = tuple(sorted(times))
    return CostCurve(
        role=Role.TARGET, mode=mode, tokens=sizes, milliseconds=tuple(float(times[each]) for each in sizes)
    )


def on_the_line(times: dict[int, int], tokens: int) -> Fraction:
    """Return the time between measured sizes, below the first its own, above the last as over the last doubling."""
    sizes = sorted(times)
    highest = {size: max(times[each] for each in sizes if each <= size) for size in sizes}
    if tokens <= sizes[0] or len(sizes) == 1:
        return Fraction(highest[sizes[0]])
    if tokens > (last := sizes[-1]):
        half = max(sizes[0], last // 2)
        return highest[last] + (highest[last] - on_the_line(times, half)) / (last - half) * (tokens - last)
    left, right = next(pair for pair in pairwise(sizes) if pair[0] <= tokens <= pair[1])
    return highest[left] + Fraction(highest[right] - highest[left], right - left) * (tokens - left)


@given(TIMES, st.sampled_from((1, 3)))
def test_times_lie_on_the_line_between_measured_sizes(times: dict[int, int], passes: int) -> None:
    """Never less for more; below the first its time; times the passes. Beyond: eager ones as over the last doubling,
    so that two sizes near each other cannot make it much longer: twice in proportion at most.
    """
    for tokens in range(1, 16):
        eager = Curve.of(curve(times, GraphMode.NONE), passes)
        assert eager(tokens) == pytest.approx(float(on_the_line(times, tokens) * passes), rel=1e-9)
        if tokens <= (last := max(times)):
            assert Curve.of(curve(times), passes)(tokens) == pytest.approx(eager(tokens))
        else:
            assert (
                len(times) == 1
                or min(times) > last // 2
                or eager(tokens) <= eager(last) * (2 * tokens / last - 1) + 1e-9
            )


@given(TIMES, st.none() | TIMES, st.sampled_from(((GraphMode.FULL, True), (GraphMode.PIECEWISE, False))))
def test_what_was_not_measured_is_a_bound(
    times: dict[int, int], eager: dict[int, int] | None, asked: tuple[GraphMode, bool]
) -> None:
    """Beyond the largest graph its time in proportion; an assumed PIECEWISE graph takes its pieces longer; neither
    takes longer than an eager pass that was measured at so many tokens, nor less than the graph that it is taken from.
    """
    mode, measured = asked
    curves = [curve(times)] + ([curve(eager, GraphMode.NONE)] if eager else [])
    costs = Costs(replace(profile(), curves=tuple(curves)))
    last, found = max(times), []
    for tokens in range(1, 30):
        own = on_the_line(times, min(tokens, last))
        expected = own if measured and tokens <= last else own * Fraction(max(tokens, last), last)
        if not measured:
            expected += Fraction(13, 10) * times[min(times)]
        if eager and tokens <= max(eager) and (tokens > last or not measured):
            expected = min(expected, on_the_line(eager, tokens))
        found.append(costs.graph((Role.TARGET, mode, None, None))(tokens))
        assert found[-1] == pytest.approx(float(max(expected, own)), rel=1e-9)
    assert found == sorted(found)
    assert costs.has_mode(Role.TARGET, mode) is measured


def test_what_is_assumed_and_what_is_a_bound_is_said() -> None:
    """The pieces of an assumed PIECEWISE graph, and where bounds begin."""
    costs = Costs(replace(profile(), curves=(curve({1: 2, 8: 4}),)))
    family = (Role.TARGET, GraphMode.PIECEWISE, None, None)
    assert list(costs.assumptions([family])) == [
        "times of target PIECEWISE (mixed batches) are taken from target FULL (mixed batches), which the profile has, "
        "and 2.6 ms more for the pieces, up to the eager time"
    ]
    assert list(costs.bounds({family: 9})) == [
        "beyond 8 tokens times of target PIECEWISE (mixed batches) are a bound: they grow in proportion to the tokens, "
        "up to the eager time"
    ]
    assert list(costs.bounds({family: 8, (Role.TARGET, GraphMode.NONE, None, None): 100})) == []


def nearest(keys: list[Family], family: Family) -> Family:
    """Return the nearest family by one criterion after the other; each leaves those that are best by it."""
    _, wanted, query_len, steps = family
    criteria = (
        lambda key: key[3] != steps,
        lambda key: key[3] is not None,
        lambda key: abs((key[3] or 1) - (steps or 1)),
        lambda key: key[1] is not wanted,
        lambda key: (key[2] is None) != (query_len is None),
        lambda key: abs((key[2] or 0) - (query_len or 0)),
        lambda key: key[2] or 0,
        lambda key: key[3] or 0,
    )
    for criterion in criteria:
        least = min(map(criterion, keys))
        keys = [key for key in keys if criterion(key) == least]
    (key,) = keys
    return key


@given(st.lists(FAMILIES, min_size=1, max_size=20, unique=True), FAMILIES)
def test_the_nearest_family_stands_for_one_that_was_not_measured(known: list[Family], first: Family) -> None:
    """Of its role, eager for eager: the length of the chain first, then mode, kind of batch and query length."""
    curves = [
        CostCurve(
            role=role, mode=mode, query_len=each, draft_steps=steps, tokens=(5 + i,), milliseconds=(float(1 + i),)
        )
        for i, (role, mode, each, steps) in enumerate(known)
    ]
    costs = Costs(replace(profile(), curves=tuple(curves)))
    role, mode, _, _ = first
    for family in ((role, mode, each, steps) for each in QUERY_LENS for steps in CHAINS):
        alike = [
            key for key in known if key[0] is family[0] and (key[1] is GraphMode.NONE) == (family[1] is GraphMode.NONE)
        ]
        if not alike:
            kind = "eager times" if family[1] is GraphMode.NONE else "times of graphs"
            assert costs.known(family) is None
            with pytest.raises(PlanningError, match=f"the profile has no {kind} of {family[0]}"):
                costs.graph(family)
            continue
        key = nearest(alike, family)
        index = known.index(key)
        time, more = (1 + index) * (family[3] or 1) / (key[3] or 1), ""
        if (mode, key[1]) == (GraphMode.PIECEWISE, GraphMode.FULL):
            eager = costs.known((role, GraphMode.NONE, *family[2:]))
            time = max(time, min(2.3 * time, eager(1))) if eager else 2.3 * time
            more = f", and {1.3 * (1 + index):.3g} ms more for the pieces, up to the eager time"
        assert costs.graph(family)(1) == pytest.approx(time)
        assert costs.known(family) == costs.graph(family)
        assert costs.graph(family).reach == 5 + index
        told = [f"times of {family_name(*family)} are taken from {family_name(*key)}, which the profile has{more}"]
        assert list(costs.assumptions([family])) == (told if key != family else [])


@given(st.lists(GRAPHS, max_size=5, unique=True), GRAPHS)
def test_graphs_of_a_role_cost_what_the_nearest_of_it_does(known: list[Family], family: Family) -> None:
    """Memory and time of one graph; none of another role."""
    graphs = tuple(
        GraphCost(role=role, mode=mode, query_len=each, draft_steps=steps, mib=float(i), seconds=1.0)
        for i, (role, mode, each, steps) in enumerate(known)
    )
    costs = Costs(replace(profile(), graphs=graphs))
    alike = [key for key in known if key[0] is family[0]]
    if alike:
        assert costs.of_graph(family).key == nearest(alike, family)
    else:
        assert costs.cost_of(family) is None
        with pytest.raises(PlanningError, match=f"the profile has no costs of graphs of {family[0].value}"):
            costs.of_graph(family)
