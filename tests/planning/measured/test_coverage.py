"""Which kinds of batch have graphs: the order in which sets of waived kinds are tried, and where that ends."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.measured import search as searching
from capture_planner.planning.measured.search import Aim, Table, least_table
from capture_planner.records.batch import Kind

COSTS = st.integers(0, 2)


def table(waived: Any, value: int) -> Table:
    """Return a table without ladders."""
    return Table(groups=(), waived=waived, value=value, worst=Fraction(1))


@given(
    st.dictionaries(st.frozensets(st.integers(0, 3)), st.tuples(COSTS, st.none() | COSTS, st.booleans()), min_size=7)
)
def test_the_set_that_costs_least_is_found(drawn: Mapping[frozenset[int], tuple[int, int | None, bool]]) -> None:
    """Of equal costs the one that waives least; some sets leave no room, or no table. What each costs at least, and
    how much more it costs, are drawn.
    """
    drawn = {**drawn, frozenset(range(9)): (9, 0, True)}
    tables: dict[frozenset[int], Any] = {
        dropped: None if more is None else table(dropped, least + more) for dropped, (least, more, _) in drawn.items()
    }
    sets = sorted(((least, dropped) for dropped, (least, _, _) in drawn.items()), key=lambda it: (it[0], len(it[1])))
    search = SimpleNamespace(
        forced=lambda: [[frozenset()]],
        sets=lambda forced, regret: sets,
        leaves_room=lambda dropped, limit: drawn[dropped][2],
        table=lambda dropped, limit, regret: tables[dropped],
    )
    with mock.patch.object(searching, "_WaivedSets", return_value=search):
        none: Any = None
        found = least_table([], none, none, Aim())
    possible = [each for dropped, each in tables.items() if each is not None and drawn[dropped][2]]
    assert found.proven
    assert (found.value, len(found.waived)) == min((each.value, len(each.waived)) for each in possible)


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3), st.integers(0, 5), st.integers(0, 5))
def test_a_mixed_ladder_pays_for_what_its_graphs_add_to_the_pool(own: list[int], decodes: int, other: int) -> None:
    """Only for what exceeds the decodes of the same pool, at each size; decodes of another pool do not count."""
    key: Any = (Role.TARGET, GraphMode.FULL)
    pools = SimpleNamespace(
        all=[SimpleNamespace(is_memory=True, limit=9)],
        pools=lambda pairs: {key: max((own[size] for _, size in pairs), default=0)},
    )
    ladder: Any = SimpleNamespace(domain=SimpleNamespace(ceiling=2))
    team: Any = SimpleNamespace(kind=Kind.MIXED, ladders=(ladder,))
    program: Any = SimpleNamespace(problem=SimpleNamespace(sizes=(0, 1, 2)))
    bounds: Any = SimpleNamespace(
        all=pools.all, pools=pools.pools, takes=lambda ladders: (), has_pool=lambda ladders: bool(own[2])
    )
    search = searching._WaivedSets([], bounds, program, Aim(), {})
    found = search._pool(team, program, {key: decodes, (Role.DRAFT_DECODE, GraphMode.FULL): other})
    extra = tuple(max(each - decodes, 0) for each in own)
    assert found == (extra if any(extra) and own[2] else None)
