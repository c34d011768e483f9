"""The price of a budget: stated where it changes a plan, with the numbers of both plans."""

import re

import attrs
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.sizing import Ladder, fit, total
from capture_planner.planning.sizing.budget import PRICE_RULE, price_of
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import Domain
from capture_planner.records.spec import Budget, KindGraphs
from capture_planner.records.text import counted
from capture_planner.testing import deployments


def ladder(kind, sizes, last):
    """Return a ladder that may be thinned."""
    full = kind is Kind.DECODE
    return Ladder(
        role=Role.TARGET,
        kind=kind,
        mode=GraphMode.FULL if full else GraphMode.PIECEWISE,
        query_len=1 if full else None,
        domain=Domain.upto(last),
        sizes=tuple(sizes),
        adaptive=True,
        max_num_reqs=last,
    )


DECODES, MIXED = ladder(Kind.DECODE, range(1, 33), 32), ladder(Kind.MIXED, range(1, 65), 64)


@given(deployments(max_reqs=32, max_tokens=256, measured=False))
def test_budget_price_has_the_graphs_of_the_plan_with_and_without_the_budget(deployment):
    """And is there exactly where they differ, once, in the first role."""
    try:
        found = deployment.plan()
        free = attrs.evolve(deployment, spec=replace(deployment.spec, budget=Budget())).plan()
    except PlanningError:
        reject()
    stated = [(d.before, d.after) for role in found.roles for d in role.decisions if d.rule == PRICE_RULE]
    before, after = ({role.role: role.entries for role in plan.roles} for plan in (free, found))
    counts = counted(free.num_graphs, "graph"), counted(found.num_graphs, "graph")
    assert stated == ([] if before == after else [counts])
    assert not any(d.rule == PRICE_RULE for role in found.roles[1:] for d in role.decisions)


@given(deployments(max_reqs=32, max_tokens=256, measured=False))
def test_each_kind_of_batch_keeps_within_its_graphs(deployment):
    """Over all roles; a kind that has room for all of its graphs loses none to the other's bound."""
    budget = deployment.spec.budget
    alone = attrs.evolve(deployment, spec=replace(deployment.spec, budget=Budget(graphs=budget.graphs)))
    try:
        found, free = (
            {
                kind: [(role.role, entry) for role in plan.roles for entry in role.entries if is_of(entry, kind)]
                for kind in Kind
            }
            for plan in (alone.plan(), attrs.evolve(deployment, spec=replace(deployment.spec, budget=Budget())).plan())
        )
    except PlanningError:
        reject()
    for kind in Kind:
        most = budget.allowed_of(kind)
        if most is None or len(free[kind]) <= most:
            assert found[kind] == free[kind]
        else:
            assert len(found[kind]) <= most


def is_of(entry, kind):
    """Whether a graph is for a kind of batch."""
    return (entry.query_len is None) == (kind is Kind.MIXED)


@given(st.integers(2, 95))
def test_price_states_the_worst_padding_of_both_kinds(most):
    """To a tenth of a percent, before and after; a kind without graphs says so."""
    before, budget = (DECODES, MIXED), Budget(max_graphs=most)
    after = fit(before, most, Reason.BUDGET)
    text = price_of(budget, before, after)
    assert text.startswith(f"max_graphs {most} allows {most} of 96 graphs; ")
    for kind, name, old, new in zip(Kind, ("decodes", "mixed batches"), before, after, strict=True):
        assert old.kind is kind
        padding = f"{float(new.worst - 1):.1%}"
        becomes = f"0.0% becomes {padding}" if new.worst > 1 else "stays 0.0%"
        assert (f"worst padding of {name} {becomes}" if new.sizes else f"{name} lose all graphs") in text
    assert "are dropped" not in text


def test_price_says_how_many_lists_of_a_kind_are_dropped():
    """Where some of the kind are left."""
    after = DECODES, DECODES.dropped(Reason.BUDGET), MIXED
    text = price_of(Budget(max_graphs=96), (DECODES, DECODES, MIXED), after)
    assert text.partition("; ")[2] == (
        "worst padding of decodes stays 0.0%, and 1 of 2 lists of sizes are dropped; "
        "worst padding of mixed batches stays 0.0%"
    )


@pytest.mark.parametrize(
    ("budget", "start"),
    [
        (
            Budget(max_graphs=40, memory=1 << 30, memory_per_graph=16 << 20),
            "max_graphs 40 allows 40 of 96 graphs, memory 1GiB at 16MiB a graph would allow 64; ",
        ),
        (Budget(max_graphs=99, graphs=KindGraphs(mixed=20)), "graphs.mixed allows 20 of 64 graphs; worst"),
        (
            Budget(seconds=10, graphs=KindGraphs(mixed=20)),
            "graphs.mixed allows 20 of 64 graphs; seconds 10 at 0.25 s a graph allows 40 of 52 graphs; worst",
        ),
    ],
)
def test_price_names_every_limit_that_is_reached_and_what_others_would_allow(budget, start):
    """In the units of the file."""
    kinds = [fit([each], budget.allowed_of(each.kind) or total([each]), Reason.BUDGET)[0] for each in (DECODES, MIXED)]
    bound = budget.allowed_graphs()
    after = fit(kinds, bound[0], Reason.BUDGET) if bound else kinds
    text = price_of(budget, (DECODES, MIXED), after)
    assert text.startswith(start)
    assert not re.search(r"\d{6}", text)
