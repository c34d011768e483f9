"""The table within a budget: which bounds are searched, what ladders it leaves, and what is said of it."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from capture_planner.errors import BudgetError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured import search
from capture_planner.planning.measured.bounds import MICRO, BudgetBounds
from capture_planner.planning.measured.search import Aim, Table
from capture_planner.planning.measured.teams import Team
from capture_planner.planning.sizing import Ladder
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import Domain
from capture_planner.records.profile import GraphCost, Profile
from capture_planner.records.spec import Budget, Limits, Spec
from support.measured import MODEL, lines, profile

MIB = 1 << 20
SPEC = Spec(
    model=MODEL, limits=Limits(max_num_reqs=8, max_num_tokens=32), mode=GraphMode.FULL, backend="alpha",
)  # fmt: skip


def ladder(kind: Kind = Kind.DECODE, role: Role = Role.TARGET, **changes: Any) -> Ladder:
    """Return a ladder without sizes."""
    values = {
        "role": role,
        "kind": kind,
        "mode": GraphMode.FULL,
        "query_len": 1 if kind is Kind.DECODE else None,
        "domain": Domain.upto(8 if kind is Kind.DECODE else 32),
        "sizes": (),
        "max_num_reqs": 8,
    }
    return Ladder(**values | changes)


ROLES: Any = [SimpleNamespace(role=role, ladders=[ladder(role=role)], groups=()) for role in Role]


def known(
    *, base: float = 0.0, per_token: float = 0.0, eager: tuple[Role, ...] = tuple(Role), pool: float = 0.0
) -> Profile:
    """Return a profile whose graphs take a second each, and more by the token."""
    graphs = tuple(
        GraphCost(role=role, mode=GraphMode.FULL, mib=1.0, seconds=1.0, seconds_per_token=per_token, largest_mib=pool)
        for role in Role
    )
    families = [
        *((role, GraphMode.NONE, None, None) for role in eager),
        *((role, GraphMode.FULL, None, None) for role in Role),
    ]
    curves = lines(families, (1, 33), lambda index: (1.0 + index, 33.0 + index))
    return replace(profile(), curves=curves, graphs=graphs, base_seconds=base)


def within(budget: Budget, costs: Profile) -> tuple[Spec, Costs, BudgetBounds]:
    """Return the spec with a budget, and its bounds."""
    spec = replace(SPEC, budget=budget)
    return spec, Costs(costs), BudgetBounds(spec, ROLES, Costs(costs))


@given(
    st.none() | st.integers(1, 4000).map(lambda number: number / 8),
    st.integers(0, 40).map(lambda number: number / 4),
    st.sampled_from((0.0, 0.25)),
    st.booleans(),
)
def test_bounds_of_seconds_are_searched_from_the_loosest(
    seconds: float | None, base: float, per_token: float, regret: bool
) -> None:
    """None, except for the worst ratio, then four powers of two of a microsecond, the largest first, all above the
    budget's own, which is last.
    """
    _, _, bounds = within(Budget(seconds=seconds, max_graphs=9), known(base=base, per_token=per_token))
    assert bounds.is_estimate == (per_token > 0)
    expected: list[object] = []
    if seconds is not None and per_token and seconds > base:
        powers = [power for power in range(60) if 2**power > int((seconds - base) * MICRO)][:4]
        expected = [
            *([] if regret else [None]),
            *(pytest.approx(base + 2**power / MICRO, rel=1e-12) for power in reversed(powers)),
        ]
    found = list(search._charged(bounds, base, Aim(regret=regret)))
    assert found[-1] is bounds
    assert [each.seconds for each in found[:-1]] == expected
    assert all(each.all[0].text == "max_graphs 9" for each in found)


def sized(
    ladders: list[Ladder], sizes: dict[Ladder, tuple[int, ...]], waived: set[Ladder], bounds: Any
) -> list[Ladder]:
    """Return what becomes of ladders with a table of these sizes."""
    groups = [SimpleNamespace(sizes=each, team=SimpleNamespace(ladders=(one,))) for one, each in sizes.items()]
    return search._sized(ladders, SimpleNamespace(groups=groups, waived=waived), bounds)  # type: ignore[arg-type]


@given(
    st.lists(st.sets(st.integers(1, 8), max_size=3), min_size=3, max_size=3),
    st.sets(st.integers(0, 2)),
    st.integers(1, 40),
)
@example([{1}, {1}, {1}], set(), 8)
def test_ladders_get_their_sizes_and_their_adapters_where_there_is_room(
    drawn: list[set[int]], dropped: set[int], graphs: int
) -> None:
    """In their order: each that still fits with all its LoRA cases has them; mixed ladders end at their last size."""
    ladders = [
        ladder(cases=(0, 1, 2, 3)),
        ladder(Kind.MIXED, cases=(0, 2, 4)),
        ladder(role=Role.DRAFT_PREFILL, query_len=2),
    ]
    sizes = {
        each: tuple(sorted(some))
        for index, (each, some) in enumerate(zip(ladders, drawn, strict=True))
        if index not in dropped and some
    }
    _, _, bounds = within(Budget(max_graphs=graphs), known())
    waived = {ladders[index] for index in dropped}
    found = sized(ladders, sizes, waived, bounds)
    wanted = []
    for each in ladders:
        if each in waived:
            wanted.append(each.dropped(Reason.BUDGET))
            continue
        own = sizes.get(each, ())
        last = own[-1] if own else 0
        domain = Domain.upto(last) if each.kind is Kind.MIXED else each.domain
        few = tuple(sorted({each.cases[0], each.cases[-1]}))
        wanted.append(attrs.evolve(each, sizes=own, domain=domain, cases=few))
    for index, each in enumerate(ladders):
        full = attrs.evolve(wanted[index], cases=each.cases)
        others = sum(one.num_graphs for place, one in enumerate(wanted) if place != index)
        if wanted[index].sizes and others + full.num_graphs <= graphs:
            wanted[index] = full
    assert found == wanted


def team(*ladders: Ladder) -> Team:
    """Return a team without traffic."""
    return Team(ladders=ladders, weights=(), passes=0)


def test_passes_without_eager_times_are_not_waived() -> None:
    """Each bound that leaves no room for their graphs is named, with the smallest that does."""
    drafts = ladder(role=Role.DRAFT_DECODE)
    target = ladder()
    _, costs, bounds = within(Budget(memory=MIB // 2, seconds=0.5), known(eager=(Role.TARGET,)))
    teams = [team(target), team(drafts)]

    def table(*waived: Ladder) -> Table:
        return Table(groups=(), waived=frozenset(waived), value=0, worst=Fraction(1))

    search._refuse_absent(teams, table(target), bounds, costs)
    with pytest.raises(BudgetError) as raised:
        search._refuse_absent(teams, table(target, drafts), bounds, costs)
    problems = raised.value.problems
    assert [problem.path for problem in problems] == [("budget", "seconds"), ("budget", "memory")]
    assert "seconds 0.5 leaves draft_decode (FULL decode, query length 1) without a graph" in problems[0].message
    assert problems[0].remedy == "the smallest budget is 1; raise it, or measure eager times too"
    assert problems[1].remedy == "the smallest budget is 1MiB; raise it, or measure eager times too"
    _, _, loose = within(Budget(memory=MIB, seconds=0.5), known(eager=(Role.TARGET,)))
    with pytest.raises(BudgetError) as raised:
        search._refuse_absent(teams, table(target, drafts), loose, costs)
    assert [problem.path for problem in raised.value.problems] == [("budget", "seconds")]


def test_bounds_that_leave_no_graph_are_named_with_what_the_cheapest_takes() -> None:
    """Of each bound by itself; where every bound has room for a graph, nothing is said."""
    teams = [team(ladder(), ladder(role=Role.DRAFT_PREFILL)), team(ladder(Kind.MIXED, anchors=(8,)))]
    texts = ("seconds 0.5, where the cheapest takes 1", "memory 0.5MiB, where the cheapest takes 1MiB")
    for seconds, memory in ((1.0, MIB), (0.5, MIB), (1.0, MIB // 2), (0.5, MIB // 2)):
        _, _, bounds = within(Budget(seconds=seconds, memory=memory), known())
        short = [text for text, few in zip(texts, (seconds < 1, memory < MIB), strict=True) if few]
        message = search._nothing(teams, bounds)
        assert message == (f"no graph is within the budget: {'; '.join(short)}" if short else None)


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("per_token", [0.0, 0.25])
@pytest.mark.parametrize("mixed", [1, 2])
@pytest.mark.parametrize("memory", [None, 1 << 40])
def test_table_says_what_keeps_another_from_costing_more(
    monkeypatch: pytest.MonkeyPatch, proven: bool, per_token: float, mixed: int, memory: int | None
) -> None:
    """Too many sets, seconds that were charged as the largest, and a pool that two roles grow; nothing else."""
    mixes = [ladder(Kind.MIXED, role) for role in (Role.TARGET, Role.DRAFT_PREFILL)[:mixed]]
    ladders = [ladder(), *mixes]
    teams = [team(each) for each in ladders]
    _, costs, bounds = within(Budget(seconds=90.0, memory=memory), known(base=2.0, per_token=per_token, pool=1.0))
    groups: Any = (SimpleNamespace(sizes=(2, 4), team=teams[0]),)
    table = Table(groups=groups, waived=frozenset(mixes), value=0, worst=Fraction(1), proven=proven)
    charged = []

    def least_table(given: object, within: BudgetBounds, *arguments: object, **named: object) -> Table:
        charged.append(within.seconds)
        return table

    monkeypatch.setattr(search, "least_table", least_table)
    monkeypatch.setattr(search, "with_preferred", lambda table, *others: table)
    found = search.table_within(bounds, costs, ladders, teams, Aim())
    assert [each.sizes for each in found.ladders] == [(2, 4), *[()] * mixed]
    assert found.table is table
    assert found.warning is None
    # The first and loosest bound, of none at all, is kept: what it leads to is within the budget.
    assert charged == ([None] if per_token else [90.0])
    alone = [] if memory or not per_token else ["90 s are more than the fewest sizes within 1% of every size take"]
    words = [] if proven else [f"{len(teams)} kinds of graphs have too many sets to try all: of the 1024 "]
    words += alone
    if memory is not None and mixed == 2:
        words.append("mixed batches of two roles are sized apart, and each is charged for the pool")
    assert len(found.notes) == len(words)
    assert all(note.startswith(start) for note, start in zip(found.notes, words, strict=True))


def test_search_goes_on_until_its_table_is_within_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each graph of four tokens takes two seconds and more; the bound that is used is named with what was taken."""
    spec, costs, bounds = within(Budget(seconds=9.0), known(base=2.0, per_token=0.25))
    target, charged = ladder(), []

    def least_table(given: object, within: BudgetBounds, *arguments: object, **named: object) -> Table:
        charged.append(within.seconds)
        sizes = (1, 2, 4, 8)[: 5 - len(charged)]
        return Table(
            groups=(SimpleNamespace(sizes=sizes, team=team(target)),),  # type: ignore[arg-type]
            waived=frozenset(),
            value=0,
            worst=Fraction(1),
        )

    monkeypatch.setattr(search, "least_table", least_table)
    monkeypatch.setattr(search, "with_preferred", lambda table, *others: table)
    found = search.table_within(bounds, costs, [target], [team(target)], Aim())
    # Four graphs take 2 + 4 + 15 / 4 seconds, three 2 + 3 + 7 / 4.
    assert found.ladders[0].sizes == (1, 2, 4)
    assert charged == [None, pytest.approx(2 + 2**26 / MICRO)]
    assert found.notes == (
        "capturing takes 6.75 of 9 s; the search charged each graph as the largest of its ladder, so another table "
        "within the budget may cost less",
    )
    nothing = Table(groups=(), waived=frozenset([target]), value=0, worst=Fraction(1))
    monkeypatch.setattr(search, "least_table", lambda *given, **named: nothing)
    short = replace(spec, budget=Budget(seconds=2.5))
    found = search.table_within(BudgetBounds(short, ROLES, costs), costs, [target], [team(target)], Aim())
    assert found.notes == ()
    assert found.warning == "no graph is within the budget: seconds 2.5, where the cheapest takes 5"
    assert found.ladders[0].cut is Reason.BUDGET
