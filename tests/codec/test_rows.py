"""Rows: entries as a file lists them."""

import attrs
import pytest
from hypothesis import given

from capture_planner.codec.rows import ENTRIES, EntryRow
from capture_planner.errors import InvalidValue
from capture_planner.modes import GraphMode
from capture_planner.records.batch import Entry
from capture_planner.testing import arbitrary_plans, plans

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


def _sorted(entries):
    return sorted(entries, key=lambda entry: entry.capture_order)


@pytest.mark.parametrize("others", [{"query_len": 2}, {"num_tokens": (8,)}, {"num_reqs": None, "num_tokens": (8,)}])
def test_a_row_of_varying_decodes_lists_requests_only(others):
    """Its tokens follow, and no request has an exact number of them."""
    with pytest.raises(InvalidValue, match="max_query_len: takes num_reqs, and neither query_len nor num_tokens"):
        EntryRow(**{"mode": FULL, "max_query_len": 4, "num_reqs": (2,)} | others)


def test_a_graph_of_varying_decodes_is_full_and_of_all_its_requests():
    """The planner, a file or a caller: nobody makes another one."""
    entry = Entry(mode=FULL, num_tokens=8, num_reqs=2, max_query_len=4)
    wrong = ({"mode": GraphMode.PIECEWISE}, {"num_reqs": None}, {"query_len": 4}, {"num_tokens": 7}, {"num_reqs": 3})
    for change in wrong:
        with pytest.raises(InvalidValue, match="a varying decode graph is FULL"):
            attrs.evolve(entry, **change)


@given(plans(max_reqs=64) | arbitrary_plans())
def test_packing_loses_nothing(plan):
    """Entries -> rows -> entries are the same entries, duplicates included."""
    for role in plan.roles:
        assert _sorted(ENTRIES.unpack(ENTRIES.pack(role.entries))) == list(role.entries)


@given(plans(max_reqs=512))
def test_planned_rows_are_compact(plan):
    """Decodes list requests only, piecewise graphs tokens only."""
    for role in plan.roles:
        for row in ENTRIES.pack(role.entries):
            assert (row.num_tokens is None) == (row.decodes != "")
            assert (row.num_reqs is None) == (row.mode is PIECEWISE)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"mode": GraphMode.NONE, "num_tokens": (1,)}, "mode: a graph is PIECEWISE or FULL, not NONE"),
        ({"mode": FULL, "query_len": 2}, "num_tokens: needed unless both query_len and num_reqs are given"),
        (
            {"mode": FULL, "num_tokens": (1, 2), "num_reqs": (1,)},
            "num_reqs: 1 request counts for 2 token counts; list one of each for every graph",
        ),
    ],
)
def test_a_row_that_means_nothing_is_refused(row, message):
    """With the field to look at."""
    with pytest.raises(InvalidValue) as caught:
        EntryRow(**row)
    assert str(caught.value) == message


@pytest.mark.parametrize(("num_tokens", "num_reqs"), [((1,), ()), ((), (1, 2))])
def test_an_empty_list_is_not_one_left_out(num_tokens, num_reqs):
    """Lists of different lengths are refused, an empty one included."""
    with pytest.raises(InvalidValue):
        EntryRow(mode=FULL, num_tokens=num_tokens, num_reqs=num_reqs)


def test_tokens_follow_from_requests():
    """R * q, for each adapter count."""
    row = EntryRow(mode=FULL, query_len=3, num_reqs=(4, 2), active_loras=(1, 0))
    assert {(e.num_tokens, e.active_loras) for e in row.entries()} == {(12, 0), (12, 1), (6, 0), (6, 1)}


def test_shapes_of_different_adapter_counts_get_rows_of_their_own():
    """What differs is not merged."""
    entries = tuple(Entry(mode=PIECEWISE, num_tokens=t, active_loras=loras) for t, loras in ((8, 0), (8, 1), (4, 0)))
    assert [(row.num_tokens, row.active_loras) for row in ENTRIES.pack(entries)] == [((8,), (1, 0)), ((4,), (0,))]
