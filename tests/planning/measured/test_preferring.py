"""Preferred sizes: how many tables have of them, what that costs, and what it never gives up."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.measured import search
from capture_planner.planning.measured.allocation import SizeGroup
from capture_planner.planning.measured.search import ROUND, Limit, SizedGroup, Table, with_preferred
from capture_planner.planning.sizing.program import LadderProblem, LadderProgram
from capture_planner.records.batch import Entry, Kind

NEARLY = Fraction(1, 20)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Draw the best tables of one or two ladders."""
    groups, limit, measured = [], draw(st.sampled_from((None, Fraction(6, 5)))), draw(st.booleans())
    for role in draw(st.sampled_from(((Role.TARGET,), (Role.TARGET, Role.DRAFT_DECODE)))):
        count = draw(st.integers(2, 30))
        times = list(accumulate(draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)), initial=100))[1:]
        weights = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        top = draw(st.sampled_from((1, count)))
        known = draw(st.none() | st.integers(1, count))
        problem = LadderProblem.of(range(1, count + 1), times, weights, [3 * each for each in times], top, known=known)
        program = LadderProgram(problem, limit, measured)
        indices = program.sizes(max(len(program.least), min(draw(st.integers(1, 6)), program.most)))
        ladder: Any = SimpleNamespace(role=role, kind=Kind.DECODE, query_len=2)
        team: Any = SimpleNamespace(ladders=(ladder,), kind=Kind.DECODE)
        groups.append(SizedGroup(team=team, group=SizeGroup(program=program, takes=()), indices=indices))
    worst = max(each.group.problem.worst(each.indices) for each in groups)
    value = sum(each.cost for each in groups)
    return Table(
        groups=tuple(groups), waived=frozenset(), value=value, worst=worst, limit=Limit(limit, measured=measured)
    )


def entry(size: int) -> Entry:
    """Return a decode of so many requests, of two tokens each."""
    return Entry(mode=GraphMode.FULL, num_tokens=2 * size, num_reqs=size, query_len=2)


@given(tables(), st.sets(st.integers(1, 30)), st.integers(0, 30))
def test_preferred_sizes_cost_hardly_more(table: Table, today: set[int], largest: int) -> None:
    """As many sizes, none fewer of those preferred, within the share, the bound on the worst step and the budget."""

    def holds(each: Table) -> bool:
        return all(
            group.sizes[-1] >= min(largest, before.sizes[-1])
            for group, before in zip(each.groups, table.groups, strict=True)
        )

    graphs = tuple((Role.TARGET, entry(size)) for size in sorted(today))
    with mock.patch.object(search, "NEARLY", NEARLY):
        found = with_preferred(table, graphs, holds)
    assert found.value == sum(each.cost for each in found.groups)
    assert found.worst == max(each.group.problem.worst(each.indices) for each in found.groups)
    assert table.value <= found.value <= table.value * (1 + NEARLY)
    assert holds(found)
    for before, after in zip(table.groups, found.groups, strict=True):
        assert len(after.sizes) == len(before.sizes) == len(set(after.sizes))
        assert list(after.sizes) == sorted(after.sizes)
        assert after.indices[-1] >= after.group.problem.least_top
        assert table.limit.decodes is None or after.group.problem.worst(after.indices) <= table.limit.decodes
        border = after.group.problem.border if table.limit.measured else -1
        assert after.indices[-1] <= border or border < 0 or border in after.indices
        own = today if after.team.ladders[0].role is Role.TARGET and today else set(range(ROUND, 31, ROUND))
        assert len(own.intersection(after.sizes)) >= len(own.intersection(before.sizes))


def test_sizes_of_today_stay_where_times_hardly_grow() -> None:
    """A size that was 24 stays 24 although 23 is the best one; without sizes of today it is a multiple of eight."""
    times = [10_000 + n for n in range(1, 65)]
    problem = LadderProblem.of(range(1, 65), times, [1] * 64, [2 * each for each in times], 64)
    program = LadderProgram(problem)
    ladder: Any = SimpleNamespace(role=Role.TARGET, kind=Kind.DECODE, query_len=2)
    team: Any = SimpleNamespace(ladders=(ladder,), kind=Kind.DECODE)
    group = SizedGroup(team=team, group=SizeGroup(program=program, takes=()), indices=(22, 63))
    table = Table(groups=(group,), waived=frozenset(), value=group.cost, worst=Fraction(1))
    for today, expected in (((21,), (21, 64)), ((), (24, 64)), ((1,), (23, 64))):
        found = with_preferred(table, tuple((Role.TARGET, entry(size)) for size in today), lambda _: True)
        assert found.groups[0].sizes == expected
