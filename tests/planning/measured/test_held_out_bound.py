"""The bound of ``benchmarks/traces_held_out.py``: no table takes less, and without a drafter the best takes as much."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from functools import cache
from itertools import chain, combinations

import pytest
from _traces_bound import least_mean
from hypothesis import given, settings
from hypothesis import strategies as st
from traces_held_out import Judge, profiles

from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch

Kind = tuple[bool, int | None]
"""Whether graphs are draft decodes, and the query length: None for mixed batches."""


@cache
def judge_of(name: str, drafts: int) -> Judge:
    return Judge(profiles()[name], drafts)


judges = st.sampled_from([(name, 0) for name in profiles()] + [(name, 3) for name in profiles() if "eagle" in name])


@st.composite
def steps_of(draw: st.DrawFn, drafts: int, most: int) -> dict[Batch, int]:
    """Return steps: decodes of up to 300 requests, beyond what was measured too, and mixed batches."""
    reqs = st.integers(1, 12) | st.integers(1, 300)
    decodes = st.builds(lambda n: Batch.decode(Role.TARGET, n, 1 + drafts), reqs)
    mixed = st.builds(
        lambda n, more: Batch.mixed(Role.TARGET, n, n + more), reqs, st.integers(1, 40) | st.integers(1, 4000)
    )
    return draw(st.dictionaries(decodes | mixed, st.integers(1, 9), min_size=1, max_size=most))


def counts_of(judge: Judge, steps: Mapping[Batch, int]) -> dict[Kind, list[int]]:
    """Return the counts that some pass has, by kind: all sizes that are worth trying."""
    found: dict[Kind, set[int]] = {}
    for batch in steps:
        for role, each, _, tokens, _ in judge.passes(batch):
            found.setdefault((role is Role.DRAFT_DECODE, each), set()).add(tokens)
    return {kind: sorted(counts) for kind, counts in found.items()}


def mean_of(judge: Judge, steps: Mapping[Batch, int], tables: Mapping[Kind, Collection[int]]) -> float:
    """Return the mean step where each pass runs on the next size of its kind, a mixed one eager if that is less."""
    total = 0.0
    for batch, count in steps.items():
        ways: list[list[tuple[GraphMode, int | None, int]]] = [[]]
        for role, each, _, tokens, _ in judge.passes(batch):
            sizes = sorted(tables[role is Role.DRAFT_DECODE, each])
            index = bisect_left(sizes, tokens)
            mode = GraphMode.PIECEWISE if each is None else GraphMode.FULL
            choices = [(mode, each, sizes[index])] if index < len(sizes) else []
            choices += [(GraphMode.NONE, None, tokens)] if each is None else []
            ways = [[*way, choice] for way in ways for choice in choices]
        total += count * min(judge.under_ways(batch, way) for way in ways)
    return total / sum(steps.values())


@settings(max_examples=max(settings.default.max_examples, 60))
@given(judges, st.data())
def test_no_table_takes_less_than_the_bound(judged: tuple[str, int], data: st.DataObject) -> None:
    judge, drafts = judge_of(*judged), judged[1]
    steps = data.draw(steps_of(drafts, 8))
    tables, graphs = {}, 0
    for (is_chain, each), counts in counts_of(judge, steps).items():
        some = data.draw(st.sets(st.sampled_from(counts)))
        sizes = some | {counts[-1]} if each is not None else some
        tables[is_chain, each] = sizes
        # The draft prefill has the target's sizes, and graphs of its own.
        graphs += len(sizes) * (2 if drafts and not is_chain else 1)
    assert least_mean(judge, steps, graphs) <= mean_of(judge, steps, tables) * (1 + 1e-9)


@settings(max_examples=max(settings.default.max_examples, 40))
@given(judges.filter(lambda judged: not judged[1]), st.integers(1, 4), st.data())
def test_the_best_table_takes_the_bound(judged: tuple[str, int], graphs: int, data: st.DataObject) -> None:
    """Without a drafter, by brute force over all tables of so many graphs."""
    judge = judge_of(*judged)
    steps = data.draw(steps_of(0, 5))
    counts = counts_of(judge, steps)
    every = [(kind, size) for kind, sizes in counts.items() for size in sizes]
    means = []
    for table in chain.from_iterable(combinations(every, number) for number in range(graphs + 1)):
        tables = {kind: [size for own, size in table if own == kind] for kind in counts}
        if all(each is None or counts[kind][-1] in tables[kind] for kind in counts for each in kind[1:]):
            means.append(mean_of(judge, steps, tables))
    assert least_mean(judge, steps, graphs) == pytest.approx(min(means, default=float("inf")), rel=1e-9)
