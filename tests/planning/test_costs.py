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
QUERY_LENS, CHAINS = (None, 1, 2, 4, 7), (None, 1, 2, 3, 6)
FAMILIES = st.tuples(
    st.sampled_from((Role.TARGET, Role.DRAFT_DECODE)),
    st.sampled_from(MODES),
    st.sampled_from(QUERY_LENS),
    st.sampled_from(CHAINS),
)

GRAPHS = FAMILIES.filter(lambda family: family[1] is not GraphMode.NONE)


@given(st.dictionaries(st.integers(1, 12), st.integers(1, 60), min_size=1), st.sampled_from((1, 3)))
def test_times_lie_on_the_line_between_measured_sizes(times: dict[int, int], passes: int) -> None:
    """Never less for more; below the first its time, above the last along the last line; times the passes."""
    sizes = sorted(times)
    highest = {size: max(times[each] for each in sizes if each <= size) for size in sizes}
    measured = CostCurve(
        role=Role.TARGET,
        mode=GraphMode.FULL,
        tokens=tuple(sizes),
        milliseconds=tuple(float(times[size]) for size in sizes),
    )
    for tokens in range(1, 16):
        around = [pair for pair in pairwise(sizes) if pair[0] <= tokens <= pair[1]] or list(pairwise(sizes))[-1:]
        if tokens <= sizes[0] or not around:
            expected = Fraction(highest[sizes[0]])
        else:
            left, right = around[0]
            rise = Fraction(highest[right] - highest[left], right - left)
            expected = highest[left] + rise * (tokens - left)
        assert Curve.of(measured, passes)(tokens) == pytest.approx(float(expected * passes), rel=1e-9)


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
        time = (1 + index) * (family[3] or 1) / (key[3] or 1)
        assert costs.graph(family)(1) == pytest.approx(time)
        assert costs.known(family) == costs.graph(family)
        assert costs.reach(family) == 5 + index
        told = [f"times of {family_name(*family)} are taken from {family_name(*key)}, which the profile has"]
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
