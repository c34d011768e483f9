"""Sizes for vLLM: no list is smaller, and no decode misses its graph, by enumeration of all batches."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.sizing.engine_lists import vllm_tokens
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import DecodeFamily, Domain
from capture_planner_vllm.emulation.size_list import examine, full_graphs, nearest, size_list
from support.small_engines import vllm_table

SCHEDULES = {
    "2/1": ((1, 16, 2), (17, 256, 1)),
    "5/3/1": ((1, 16, 5), (17, 64, 3), (65, 256, 1)),
    "4/2/0": ((1, 16, 4), (17, 64, 2), (65, 256, 0)),
}
"""The published schedules, with 256 requests."""

MISSED = {"2/1": 20, "5/3/1": 44, "4/2/0": 80}


def family(query_len, intervals):
    """Return decodes of one query length."""
    return DecodeFamily(query_len=query_len, draft_steps=None, requests=Domain(intervals))


def most_tokens(decodes):
    """Return the tokens of the largest batch of all."""
    return max(d.requests.intervals[-1][1] * d.query_len for d in decodes)


def decodes_of(schedule):
    """Return the decodes of a schedule."""
    return tuple(family(1 + k, ((first, last),)) for first, last, k in sorted(schedule, key=_k))


def _k(tier):
    return tier[2]


def default_sizes(schedule):
    """Return what vLLM captures by default."""
    longest = max(k for *_, k in schedule)
    return vllm_tokens(
        max_num_reqs=256,
        max_num_tokens=8192,
        query_len=1 + longest,
        platform_max=512,
        tiers=[(1 + k, last) for _, last, k in schedule],
    )


def searched(sizes, query_lens, max_num_reqs):
    """Return the rule of a table in which every graph is looked at."""
    table = vllm_table(Role.TARGET, GraphMode.FULL_DECODE_ONLY, sizes, query_lens, max_num_reqs)

    def answer(num_reqs, query_len):
        batch = Batch(role=Role.TARGET, num_reqs=num_reqs, num_tokens=num_reqs * query_len, query_len=query_len)
        entry = table.dispatch(batch).entry
        return None if entry is None else entry.num_tokens

    return answer


@st.composite
def small_schedules(draw):
    """Return decodes of a few tiers that can be searched by force, and their requests."""
    ends = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True).map(sorted))
    widths = draw(st.permutations((1, 2, 3)))[: len(ends)]
    tiers = [family(q, ((first + 1, last),)) for first, last, q in zip((0, *ends), ends, widths, strict=False)]
    return tuple(tiers), ends[-1]


@st.composite
def any_schedules(draw):
    """Return decodes of up to four tiers, in any order of widths."""
    ends = draw(st.lists(st.integers(1, 48), min_size=1, max_size=4, unique=True).map(sorted))
    widths = draw(st.lists(st.integers(1, 8), min_size=len(ends), max_size=len(ends), unique=True))
    tiers = [family(q, ((first + 1, last),)) for first, last, q in zip((0, *ends), ends, widths, strict=False)]
    return tuple(tiers), ends[-1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_default_sizes_miss_the_published_counts(name):
    """20, 44 and 80 of 256 batch sizes miss a captured graph."""
    decodes, sizes = decodes_of(SCHEDULES[name]), default_sizes(SCHEDULES[name])
    missed, _ = examine(decodes, nearest(sizes, [d.query_len for d in decodes], 256))
    assert len(missed) == MISSED[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_size_list_misses_nothing_and_costs_no_more(name):
    """All 256 batch sizes have a graph: fewer than by default, and less than 6.3% of padding."""
    decodes = decodes_of(SCHEDULES[name])
    lengths = [d.query_len for d in decodes]
    captured = len(full_graphs(default_sizes(SCHEDULES[name]), lengths, 256))
    result = size_list(decodes, 256, graphs=captured)
    assert result.graphs <= captured
    missed, worst = examine(decodes, searched(result.sizes, lengths, 256))
    assert (missed, worst) == ((), result.worst)
    assert worst <= 1 + Fraction(1, 16)


@pytest.mark.parametrize("name", SCHEDULES)
def test_size_list_halves_graphs_at_a_quarter_of_padding(name):
    """With a quarter of padding, less than half of the default graphs are left, and none is missed."""
    decodes = decodes_of(SCHEDULES[name])
    captured = full_graphs(default_sizes(SCHEDULES[name]), [d.query_len for d in decodes], 256)
    result = size_list(decodes, 256, worst=Fraction(5, 4))
    assert examine(decodes, searched(result.sizes, [d.query_len for d in decodes], 256))[0] == ()
    assert result.worst <= Fraction(5, 4)
    assert 2 * result.graphs < len(captured)


@given(small_schedules(), st.sampled_from((Fraction(1), Fraction(5, 4), Fraction(3, 2), Fraction(2))))
def test_size_list_is_minimal(case, worst):
    """Of all lists up to the largest batch, none that keeps the bound has fewer graphs, then sizes."""
    decodes, most = case
    lengths = [d.query_len for d in decodes]
    top = most_tokens(decodes)
    assume(top <= 9)
    best = None
    for count in range(1, top + 1):
        for sizes in itertools.combinations(range(1, top + 1), count):
            missed, found = examine(decodes, nearest(sizes, lengths, most))
            if not missed and found <= worst and sizes[-1] == top:
                size = len(full_graphs(sizes, lengths, most)), count
                best = size if best is None else min(best, size)
    result = size_list(decodes, most, worst=worst)
    assert examine(decodes, searched(result.sizes, lengths, most))[0] == ()
    assert result.worst <= worst
    assert (result.graphs, len(result.sizes)) == best


@given(any_schedules(), st.fractions(1, 2), st.lists(st.integers(1, 500), max_size=3), st.booleans())
def test_size_list_exists_for_every_schedule(case, worst, wider, one_more):
    """Any widths in any order, wider sizes for mixed batches, a captured width that no batch has."""
    decodes, most = case
    lengths = {d.query_len for d in decodes} | ({9} if one_more else set())
    result = size_list(decodes, most, worst=worst, wider=wider, query_lens=lengths)
    assert {size for size in wider if size > most_tokens(decodes)} <= set(result.sizes)
    missed, found = examine(decodes, searched(result.sizes, sorted(lengths), most))
    assert (missed, found) == ((), result.worst)
    assert result.worst <= worst
    assert result.graphs == len(full_graphs(result.sizes, lengths, most))


@given(any_schedules())
def test_exact_counts_miss_nothing(case):
    """Nothing is nearer than the count itself: which is why a list exists for every schedule."""
    decodes, most = case
    sizes = {count * d.query_len for d in decodes for count, _ in d.requests.counts()}
    assert examine(decodes, nearest(sizes, [d.query_len for d in decodes], most)) == ((), 1)


def test_size_list_keeps_a_number_of_graphs_where_possible():
    """The bound on padding loosens until the graphs fit; where none fits, the loosest is left."""
    decodes, limits = decodes_of(SCHEDULES["4/2/0"]), (180, 60, 30, 16)
    found = [size_list(decodes, 256, graphs=limit) for limit in limits]
    assert all(each.graphs <= limit for each, limit in zip(found, limits, strict=True))
    assert [each.worst for each in found] == sorted(each.worst for each in found)
    assert size_list(decodes, 256, graphs=1) == found[-1]


def test_size_list_without_decodes_has_only_wider_sizes():
    """No decode needs a size."""
    assert size_list((), 8, worst=Fraction(1)).sizes == ()
    assert size_list((), 8, wider=(16,)).sizes == (16,)
