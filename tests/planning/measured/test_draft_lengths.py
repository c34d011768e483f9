"""Draft lengths: the choice of K and sizes equals brute force, and is never below the best fixed K."""

import itertools
import math

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from capture_planner.planning.measured.schedule import (
    NOISE,
    SWITCH,
    WIDTH,
    DraftLength,
    DraftProblem,
    Span,
    optimum,
    ranges,
    schedule,
)
from capture_planner.records.model import MAX_TIERS

TIMES = st.sampled_from((0.5, 1.0, 1.01, 2.0, 3.5, 9.0)) | st.floats(0.1, 10)


@st.composite
def problems(draw, most=5, longest=3, budget=True):
    """Up to four K over a few batch sizes; times grow or step with the size, one K admits every batch size."""
    count = draw(st.integers(1, most))
    shares = sorted(draw(st.lists(st.floats(0, 1), min_size=longest, max_size=longest)), reverse=True)
    lengths = []
    for k in range(draw(st.integers(0, longest)) + 1):
        admitted = count if k == 0 else draw(st.integers(1, count) | st.just(count))
        padded = itertools.accumulate(draw(st.lists(TIMES, min_size=admitted, max_size=admitted)), max)
        exact = draw(st.lists(st.sampled_from((0.01, 0.5)) | TIMES, min_size=admitted, max_size=admitted))
        lengths.append(
            DraftLength(
                k=k, tokens=1 + sum(shares[:k]), padded=tuple(padded), exact=tuple(exact), graphs=2 if k < 2 else 3
            )
        )
    weights = draw(st.lists(st.floats(0.01, 100) | st.sampled_from((1, 50)), min_size=count, max_size=count))
    graphs = draw(st.none() | st.integers(3, 3 * count + 1)) if budget else None
    return DraftProblem(tuple(lengths), tuple(weights), graphs)


NO_GRAPH_TO_SPARE = DraftProblem(
    (
        DraftLength(k=0, tokens=1.0, padded=(0.5,) * 5, exact=(0.01,) * 5, graphs=2),
        DraftLength(k=1, tokens=2.0, padded=(0.5,) * 4, exact=(0.01, 1.0, 0.01, 0.01), graphs=2),
        DraftLength(k=2, tokens=2.0, padded=(0.5,), exact=(0.01,), graphs=3),
        DraftLength(k=3, tokens=2.0, padded=(0.5, 1.0), exact=(0.01, 0.01), graphs=3),
    ),
    (1.0,) * 5,
    9,
)
"""A range gains less than noise over the drafts next to it, which would take one graph more."""


def by_brute_force(problem):
    """Return the least time over every way to split the batch sizes, and every K of each part."""
    most, ks = problem.most, [length.k for length in problem.lengths]
    best = math.inf
    for cuts in itertools.product((False, True), repeat=most - 1):
        ends = [*(n for n, cut in enumerate(cuts, 1) if cut), most]
        parts = list(zip([1, *(end + 1 for end in ends)], ends, strict=False))
        choices = [[Span(first, last, k) for k in ks] for first, last in parts]
        for spans in itertools.product(*choices):
            if problem.graphs is None or problem.num_graphs(spans) <= problem.graphs:
                best = min(best, problem.total(spans))
    return best


def covers(problem, spans):
    """Whether the spans are every batch size once, in order, within limits and graphs."""
    return (
        [n for span in spans for n in range(span.first, span.last + 1)] == list(range(1, problem.most + 1))
        and all(math.isfinite(problem.cost(span)) for span in spans)
        and (problem.graphs is None or problem.num_graphs(spans) <= problem.graphs)
    )


@given(problems())
def test_optimum_equals_brute_force(problem):
    """K, ranges and sizes together: no other choice within the graphs allowed takes less time."""
    spans = optimum(problem)
    assert covers(problem, spans)
    assert problem.total(spans) == pytest.approx(by_brute_force(problem), rel=1e-9)


@given(problems(most=8, longest=1))
def test_optimum_over_more_batch_sizes_equals_brute_force(problem):
    """Eight batch sizes, no draft or one."""
    assert problem.total(optimum(problem)) == pytest.approx(by_brute_force(problem), rel=1e-9)


@given(problems(most=12))
@example(NO_GRAPH_TO_SPARE)
def test_schedule_is_never_below_the_best_fixed_length(problem):
    """By the model: the work takes no longer than with any K for all batch sizes, within the same graphs."""
    spans = schedule(problem)
    assert covers(problem, spans)
    for length in problem.lengths:
        if length.most == problem.most and (problem.graphs is None or problem.graphs >= length.graphs):
            alone = attrs.evolve(problem, lengths=(length,))
            assert problem.total(spans) <= problem.total(optimum(alone)) * (1 + 1e-12)


@given(problems(most=12))
def test_schedule_is_within_noise_of_the_optimum(problem):
    """Ranges that gain less are merged; what is left costs at most that much."""
    best = problem.total(optimum(problem))
    assert problem.total(schedule(problem)) <= best * (1 + NOISE + SWITCH) * (1 + 1e-12)


@given(problems(most=12))
def test_each_range_gains_more_than_noise_over_the_lengths_next_to_it(problem):
    """Hysteresis: none changes K for less, against what the optimum takes there, where the graphs allow another K; nor
    for so few requests that all work takes hardly longer without.
    """
    spans, most = schedule(problem), problem.total(optimum(problem)) * (1 + SWITCH)
    least = {span.first: problem.cost(span) for span in optimum(problem)}
    graphs = {length.k: length.graphs for length in problem.lengths}
    spare = math.inf if problem.graphs is None else problem.graphs - problem.num_graphs(spans)
    for one, other in itertools.pairwise(ranges(spans)):
        for run, k in ((one, other.k), (other, one.k)):
            own = [span for span in spans if run.first <= span.first <= run.last]
            if (graphs[k] - graphs[run.k]) * len(own) <= spare:
                instead = problem.total([attrs.evolve(span, k=k) for span in own])
                assert instead > sum(least[span.first] for span in own) * (1 + NOISE) * (1 - 1e-12)
                room = most - problem.total(spans)
                assert run.last - run.first + 1 >= WIDTH or instead - problem.total(own) > room - 1e-12 * most


@given(problems(), st.data())
def test_optimum_is_monotone_in_acceptance_and_graphs(problem, data):
    """The same work takes no longer where drafts are accepted more often, or more graphs are allowed."""
    before = problem.total(optimum(problem))
    gains = sorted(data.draw(st.lists(st.floats(0, 1), min_size=4, max_size=4)))
    lengths = tuple(attrs.evolve(each, tokens=each.tokens + gains[each.k]) for each in problem.lengths)
    better = attrs.evolve(problem, lengths=lengths)
    assert better.total(optimum(better)) <= before * (1 + 1e-12)
    if problem.graphs is not None:
        wider = attrs.evolve(problem, graphs=problem.graphs + data.draw(st.integers(1, 4)))
        assert wider.total(optimum(wider)) <= before * (1 + 1e-12)


@given(problems(most=12), st.floats(0.001, 1000))
def test_schedule_does_not_depend_on_how_long_the_traffic_was_watched(problem, factor):
    """Twice the work is twice the time of the same schedule."""
    more = attrs.evolve(problem, weights=tuple(weight * factor for weight in problem.weights))
    assert more.total(schedule(more)) == pytest.approx(
        factor * problem.total(schedule(problem)), rel=2 * (NOISE + SWITCH)
    )


def staircase(most, longest, width=32):
    """Times as a GPU takes them: a step every ``width`` tokens, and a floor."""
    lengths = []
    for k in range(longest + 1):
        tokens = [(-(-n * (1 + k) // width)) for n in range(1, most + 1)]
        lengths.append(
            DraftLength(
                k=k,
                tokens=1 + sum(0.75**i for i in range(1, k + 1)),
                padded=tuple(1.5 + 0.01 * count + 0.1 * k for count in tokens),
                exact=(0.3,) * most,
                graphs=2 if k < 2 else 3,
            )
        )
    return tuple(lengths)


def test_small_batches_draft_more_than_large_ones():
    """Where a target's pass costs the same for a few tokens, drafts are cheap; where tokens cost, they are not."""
    problem = DraftProblem(staircase(256, 5, width=4), (1.0,) * 256, 60)
    spans = schedule(problem)
    found = ranges(spans)
    assert covers(problem, spans)
    assert found[0].k > found[-1].k
    assert problem.total(spans) < problem.total(problem.fixed()) * 0.999


def test_schedule_has_at_most_the_ranges_that_a_file_may_have():
    """Times that favour another K at each batch size end in a schedule that a spec can list."""
    lengths = [
        DraftLength(
            k=k,
            tokens=1.0 + k,
            padded=(0.001,) * 200,
            exact=tuple(1.0 + k if n % 2 == k else 3.0 + k for n in range(200)),
            graphs=2,
        )
        for k in (0, 1)
    ]
    assert len(ranges(schedule(DraftProblem(tuple(lengths), (1.0,) * 200)))) <= MAX_TIERS


@pytest.mark.thorough
def test_a_server_of_512_requests_is_scheduled():
    """512 batch sizes, K up to 7, 100 graphs: as large as deployments are."""
    problem = DraftProblem(staircase(512, 7), (1.0,) * 512, 100)
    assert covers(problem, schedule(problem))
