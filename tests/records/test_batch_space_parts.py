"""Admissible batches, part by part: counts of any ranges, lengths of queries, ranges that are split and joined."""

from __future__ import annotations

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import (
    Domain,
    batches,
    decode_families,
    decode_tiers,
    draft_prefill_of,
    draft_steps,
    extra_slots,
    kind_of,
    max_query_len,
    most_loras,
    most_tokens,
    query_len_of,
    split_at,
    split_when,
    union,
)
from capture_planner.records.spec import Spec
from capture_planner.testing import specs
from support.reference import extra_rows, is_chain

LAST = 24


@st.composite
def domains(draw: st.DrawFn) -> tuple[list[int], Domain]:
    """Draw counts, as ranges that may touch, and the step of their sizes."""
    counts = sorted(draw(st.sets(st.integers(1, LAST), min_size=1)))
    intervals: list[tuple[int, int]] = []
    for count in counts:
        if intervals and intervals[-1][1] == count - 1 and draw(st.integers(0, 4)):
            intervals[-1] = intervals[-1][0], count
        else:
            intervals.append((count, count))
    return counts, Domain(tuple(intervals), draw(st.integers(1, 4)))


@given(domains())
def test_domain_is_the_set_of_its_counts(drawn: tuple[list[int], Domain]) -> None:
    """Neighbours, sizes, and the parts below and above each count."""
    counts, domain = drawn
    step = domain.step

    def up(count: int) -> int:
        return next(size for size in range(count, count + step) if size % step == 0)

    useful = {up(count) for count in counts}
    assert domain.ceiling == max(useful)
    for count in range(-1, LAST + 6):
        assert (count in domain) == (count in counts)
        assert domain.after(count) == min((n for n in counts if n > count), default=None)
        assert domain.upto_count(count) == max((n for n in counts if n <= count), default=None)
        assert domain.round_up(count) == up(count)
        assert domain.tight(count) == max((size for size in useful if size <= count), default=None)
        for part, kept in (
            (domain.clipped(count), [n for n in counts if n <= count]),
            (domain.above(count), [n for n in counts if n > count]),
        ):
            assert part.step == step
            assert bool(part) == bool(kept)
            assert [n for first, last in part.intervals for n in range(first, last + 1)] == kept
        for upto in (None, 0, 5, LAST):
            listed = list(domain.counts(count, upto))
            assert [n for first, last in listed for n in range(first, last + 1)] == [n for n in counts if n >= count]
            single = [n for n in counts if n >= count and (upto is None or n <= upto)]
            assert listed[: len(single)] == [(n, n) for n in single] or upto is not None
            assert {first for first, last in listed if first == last} >= set(single)


@given(domains(), st.sets(st.integers(1, LAST + 4)))
def test_size_serves_the_counts_above_the_size_before(drawn: tuple[list[int], Domain], sizes: set[int]) -> None:
    """Ascending, each with the least; a size that no count needs is left out."""
    counts, domain = drawn
    ordered = sorted(sizes)
    wanted = []
    for before, size in zip([0, *ordered], ordered, strict=False):
        own = [n for n in counts if before < n <= size]
        if own:
            wanted.append((size, own[0]))
    assert list(domain.served(ordered)) == wanted
    rounded = sorted({domain.round_up(size) for size in sizes})
    assert domain.needed(sizes) == tuple(size for size, _ in domain.served(rounded))


@given(specs(max_reqs=20))
def test_queries_are_as_long_as_the_drafts_of_the_batch_size(spec: Spec) -> None:
    """One token more than the drafts, with the slots of a drafter in its first pass, and one in a draft decode."""
    slots, speculative, most = extra_rows(spec.speculative), spec.speculative, spec.limits.max_num_reqs
    assert extra_slots(spec) == slots
    drafts = [0 if speculative is None else speculative.draft_tokens(n) for n in range(1, most + 1)]
    assert [k for first, last, k in decode_tiers(spec) for _ in range(first, last + 1)] == drafts
    for role in Role:
        more = slots if role is Role.DRAFT_PREFILL else 0
        lens = [1 if role is Role.DRAFT_DECODE else 1 + k + more for k in drafts]
        assert [query_len_of(role, spec, n) for n in range(1, most + 1)] == lens
        assert max_query_len(role, spec) == max(lens)
        assert most_tokens(role, spec) == spec.limits.max_num_tokens - (slots if role is Role.TARGET else 0)
        loras = spec.lora.max_active + 1 if spec.lora and role is Role.TARGET else 0
        assert most_loras(role, spec) == loras
        for num_reqs, k in enumerate(drafts, 1):
            chain = max(k - 1, 0) if is_chain(speculative) else 0
            wanted = chain if role is Role.DRAFT_DECODE and speculative is not None else None
            assert draft_steps(role, num_reqs, speculative) == wanted


@given(specs(max_reqs=12, max_tokens=40), st.sampled_from(Role), st.none() | st.integers(1, 30))
def test_batches_are_listed_with_those_that_they_stand_for(spec: Spec, role: Role, upto: int | None) -> None:
    """Every uniform decode and every number of tokens, with each number of adapters that so many requests can have."""
    families = decode_families(role, spec)
    decodes, mixed = set(), set()
    for batch, last in batches(role, spec, upto=upto):
        assert batch.active_loras <= min(most_loras(role, spec), batch.num_reqs)
        count = batch.num_reqs if batch.past_prompt and batch.query_len else batch.num_tokens
        assert upto is None or batch.num_tokens <= upto or last >= count
        assert upto is not None or last == count
        for each in range(count, last + 1):
            if batch.query_len:
                assert batch.num_tokens == batch.num_reqs * batch.query_len
                decodes.add((each, batch.query_len, batch.active_loras))
                assert kind_of(Batch.decode(role, each, batch.query_len), families) is Kind.DECODE
            else:
                mixed.add((each, batch.active_loras))
                assert batch.num_reqs == min(batch.num_tokens, spec.limits.max_num_reqs)
        if batch.num_tokens <= (upto or 0):
            assert last == count
    loras = range(min(most_loras(role, spec), spec.limits.max_num_reqs) + 1)
    counts = range(1, spec.limits.max_num_reqs + 1)
    assert decodes == {
        (n, family.query_len, each)
        for family in families
        for n in counts
        for each in loras
        if n in family.requests and each <= n
    }
    tokens = () if role is Role.DRAFT_DECODE else range(1, most_tokens(role, spec) + 1)
    assert mixed == {(n, each) for n in tokens for each in loras if each <= n}


@pytest.mark.parametrize("number", range(4))
def test_union_has_the_same_numbers_in_the_fewest_ranges(number: int) -> None:
    """Ascending; ranges that touch are one, and one inside another adds nothing."""
    every = [(first, last) for first in range(7) for last in range(first, 7)]
    for ranges in combinations(every, number):
        numbers = {n for first, last in ranges for n in range(first, last + 1)}
        joined = union(reversed(ranges))
        assert [n for first, last in joined for n in range(first, last + 1)] == sorted(numbers)
        assert [first for first, _ in joined] == [n for n in sorted(numbers) if n - 1 not in numbers]


@given(st.integers(0, 6), st.integers(0, 8), st.lists(st.integers(-1, 16), max_size=5))
def test_ranges_are_split_after_each_stop(first: int, more: int, stops: list[int]) -> None:
    """Those inside; the parts are the range."""
    last = first + more
    parts = list(split_at(first, last, stops))
    assert [n for start, end in parts for n in range(start, end + 1)] == list(range(first, last + 1))
    assert {end for _, end in parts} == {stop for stop in stops if first <= stop < last} | {last}
    assert [start for start, _ in parts] == [first, *(end + 1 for _, end in parts[:-1])]


@given(st.lists(st.integers(0, 3), max_size=8))
def test_runs_end_between_neighbours_that_are_apart(items: list[int]) -> None:
    """None is empty, and together they are all."""
    runs = list(split_when(lambda one, other: other < one, items))
    assert [item for run in runs for item in run] == items
    assert all(run and run == sorted(run) for run in runs)
    assert all(one[-1] > other[0] for one, other in pairwise(runs))


@pytest.mark.parametrize("query_len", [None, 3])
def test_first_draft_pass_has_more_rows_and_no_adapters(query_len: int | None) -> None:
    """As many more of each request as the method has slots; a uniform batch stays one."""
    named: Any = {"num_reqs": 4, "num_tokens": 12, "query_len": query_len, "past_prompt": True, "active_loras": 2}
    found = draft_prefill_of(Batch(role=Role.TARGET, **named), 5)
    assert (found.role, found.num_reqs, found.num_tokens, found.active_loras) == (Role.DRAFT_PREFILL, 4, 32, 0)
    assert found.query_len == (None if query_len is None else 8)
    assert draft_steps(Role.DRAFT_DECODE, 4, None) is None
    assert extra_slots(SimpleNamespace(speculative=None)) == 0  # type: ignore[arg-type]
