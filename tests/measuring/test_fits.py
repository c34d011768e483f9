"""Fits: lines through measured captures, and what they predict of plans that were never captured."""

import json
import math
import random
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.measuring.fits import GraphSample, Line, entry_family, fit_graphs, predict, predict_graphs
from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.records._base import replace
from capture_planner.records.profile import CostCurve, Profile
from support.commands import PLAN

POINTS = st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 1000)), min_size=1, max_size=8)
FULL = (Role.TARGET, GraphMode.FULL, 1, None)
PIECES = (Role.TARGET, GraphMode.PIECEWISE, None, None)
DRAFTS = (Role.DRAFT_PREFILL, GraphMode.FULL, 1, None)
FAMILIES = {PIECES: (0.1, 0.026), FULL: (0.2, 0.29), DRAFTS: (0.1, 0.03)}
"""MiB that each graph adds to a pool, and MiB per token of its intermediates."""
DRIVER = 1.5
"""MiB that a driver takes for a graph."""


@given(st.floats(0, 100), st.floats(0, 10), st.sets(st.integers(1, 512), min_size=3, max_size=8))
def test_a_line_is_recovered_exactly_where_there_is_no_noise(intercept, slope, xs):
    """Three points of a line or more give it back, without an error."""
    line = Line.of([(float(x), intercept + slope * x) for x in xs])
    assert line.intercept == pytest.approx(intercept, abs=1e-6)
    assert line.slope == pytest.approx(slope, abs=1e-6)
    assert line.error == pytest.approx(0, abs=1e-6)


@given(POINTS)
def test_a_line_never_costs_less_for_more(points):
    """Neither part is negative, whatever was measured; the error is a number."""
    line = Line.of(points)
    assert line.intercept >= 0
    assert line.slope >= 0
    assert math.isfinite(line.error)


@given(st.tuples(st.floats(1, 1000), st.floats(0, 1000)))
def test_a_single_point_says_nothing_about_its_error(point):
    """One graph alone has the error of all that it costs."""
    assert Line.of([point]).error == pytest.approx(point[1])


def capture(draw, sizes, noise, kept=0.0):
    """What a capture into a shared pool reads: pieces first, then full graphs, each kind largest first.

    :param kept: MiB that the driver has from released graphs; it takes more only when these are used up.
    """
    samples, largest, taken = [], dict.fromkeys(GraphMode, -20.0), 0.0
    work = [(family, tokens) for family in FAMILIES for tokens in sizes.get(family, ())]
    for family, tokens in sorted(work, key=lambda graph: (graph[0][1] is GraphMode.FULL, -graph[1])):
        mode, (each, slope) = family[1], FAMILIES[family]
        alone = slope * tokens * draw.uniform(1 - noise, 1 + noise)
        growth, largest[mode] = max(0.0, alone - largest[mode]), max(alone, largest[mode])
        taken += DRIVER
        samples.append(
            GraphSample(
                family=family,
                tokens=tokens,
                seconds=(0.06 + 1e-5 * tokens) * draw.uniform(1 - noise, 1 + noise),
                mib=growth or each,
                alone_mib=alone,
                driver_mib=min(DRIVER, max(0.0, taken - kept)),
            )
        )
    return samples


def captures_of(draw, sizes):
    """What captures one after the other read, each released before the next."""
    kept, groups = 0.0, []
    for each in sizes:
        groups.append(capture(draw, each, 0.02, kept))
        kept = max(kept, DRIVER * len(groups[-1]))
    return groups


def profile_of(captures):
    """A profile with the costs that were fitted on captures."""
    fit = fit_graphs(captures)
    curve = CostCurve(role=Role.TARGET, mode=GraphMode.FULL, query_len=1, tokens=(1,), milliseconds=(1.0,))
    plan = codec.load_plan(PLAN)
    return Profile(
        source="test",
        date="2026-11-22T16:00:00Z",
        device=plan.environment.device,
        model=plan.model,
        curves=(curve,),
        graphs=fit.graphs,
        base_mib=fit.base_mib,
        base_seconds=fit.base_seconds,
    )


def plan_of(sizes, pool=Pool.SHARED):
    """A plan of the target with graphs of these sizes, on the plan that ships."""
    shipped = codec.load_plan(PLAN)
    target = shipped.role(Role.TARGET)
    full, piece = target.entries[-1], target.entries[0]
    entries = [replace_entry(piece, tokens, None) for tokens in sizes[PIECES]]
    entries += [replace_entry(full, tokens, tokens) for tokens in sizes[FULL]]
    return replace(shipped, speculative=None, pool=pool, roles=(replace(target, entries=tuple(entries), waivers=()),))


def work_of(sizes):
    """Graphs of these sizes, on the entries of the plan that ships."""
    full, piece = (
        codec.load_plan(PLAN).role(Role.TARGET).entries[-1],
        codec.load_plan(PLAN).role(Role.TARGET).entries[0],
    )
    return [
        (role, replace_entry(full if query_len else piece, tokens, tokens if query_len else None))
        for (role, _, query_len, _), several in sizes.items()
        for tokens in several
    ]


def replace_entry(entry, tokens, reqs):
    return attrs.evolve(entry, num_tokens=tokens, num_reqs=reqs, query_len=1 if reqs else None)


@given(st.integers(0, 10_000), st.sets(st.integers(1, 1024), min_size=1, max_size=20))
def test_a_plan_that_was_never_captured_is_predicted_within_bounds(seed, others):
    """From a few groups of other sizes: memory within 10 % of what its capture reads, and time within 15 %."""
    draw = random.Random(seed)
    groups = captures_of(
        draw,
        [
            {
                PIECES: draw.sample(range(1, 513), 4),
                FULL: draw.sample(range(1, 257), 4),
                DRAFTS: draw.sample(range(1, 513), 4),
            }
            for _ in range(6)
        ],
    )
    sizes = {PIECES: sorted(others), FULL: sorted({max(1, size // 2) for size in others}), DRAFTS: sorted(others)}
    held_out = capture(draw, sizes, 0.02)
    prediction = predict_graphs(profile_of(groups), work_of(sizes))
    memory = sum(sample.mib + sample.driver_mib for sample in held_out)
    assert prediction.memory_mib == pytest.approx(memory, rel=0.10)
    assert prediction.seconds == pytest.approx(sum(sample.seconds for sample in held_out), rel=0.15)
    assert prediction.memory_error_mib < 0.1 * memory
    assert not prediction.assumptions


def test_what_the_first_graphs_took_longer_is_apart():
    """The first graph of a family loads kernels: that is no cost of each."""
    draw = random.Random(0)
    groups = [capture(draw, {PIECES: [512, 8, 1], FULL: [256, 16, 2]}, 0.0) for _ in range(2)]
    slow = [attrs.evolve(groups[0][0], seconds=5.0), *groups[0][1:]]
    assert profile_of([slow, groups[1]]).base_seconds == pytest.approx(5 - 0.06 - 1e-5 * 512, rel=0.01)


@given(st.integers(8, 1024), st.lists(st.floats(0.01, 1), min_size=1, max_size=3), st.floats(0, 5))
def test_sizes_near_to_each_other_say_nothing_of_larger_ones(largest, others, first):
    """As where the time was over after one capture: noise between 1 and 2 tokens is no slope up to 512."""
    (sample, *_), sizes = capture(random.Random(0), {FULL: [largest]}, 0.0), (largest, 3, 2, 1)
    group = [
        attrs.evolve(sample, tokens=tokens, seconds=seconds)
        for tokens, seconds in zip(sizes, (first, *others), strict=False)
    ]
    (cost,) = fit_graphs([group]).graphs
    assert cost.seconds_per_token == 0
    assert min(others) - 1e-6 <= cost.seconds <= max(others) + 1e-6


def test_without_figures_of_their_own_graphs_are_fitted_by_the_growth_of_pools():
    """An engine tells only by how much each capture shrank the device's memory: the largest carries the pool."""
    samples = [
        GraphSample(family=FULL, tokens=tokens, seconds=0.1, mib=130.0 if tokens == 256 else 2.0)
        for tokens in (256, 128, 64)
    ]
    (cost,) = fit_graphs([samples]).graphs
    assert (cost.mib, cost.largest_mib, cost.mib_per_token) == (2.0, 0.0, pytest.approx(0.5))
    assert predict(profile_of([samples]), plan_of({PIECES: [], FULL: [256, 128, 64]})).memory_mib == pytest.approx(134)


def test_a_family_that_was_not_measured_borrows_and_says_so():
    """The nearest family of the role stands in, with a sentence for the reader."""
    samples = [s for s in capture(random.Random(0), {PIECES: [8], FULL: [256, 16]}, 0.0) if s.family == FULL]
    prediction = predict(profile_of([samples]), plan_of({PIECES: [512], FULL: [4]}))
    assert "costs of target PIECEWISE (mixed batches) are taken from target FULL" in prediction.assumptions[0]
    # The two modes share no intermediates, whatever the costs are of.
    apart = sum(
        predict(profile_of([samples]), plan_of(each)).memory_mib
        for each in ({PIECES: [512], FULL: []}, {PIECES: [], FULL: [4]})
    )
    assert prediction.memory_mib == pytest.approx(apart - profile_of([samples]).base_mib)


def test_a_plan_without_graphs_costs_nothing():
    """Nothing is captured, whatever the profile says."""
    prediction = predict(profile_of([]), plan_of({PIECES: [], FULL: []}))
    assert (prediction.memory_mib, prediction.seconds) == (0.0, 0.0)


def test_a_family_is_what_an_entry_says():
    """The family of a graph leaves out its size alone."""
    for role in codec.load_plan(PLAN).roles:
        for entry in role.entries:
            assert entry_family(role.role, entry) == (role.role, entry.mode, entry.query_len, entry.draft_steps)


RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "gpu_bench-2026-11-21.json"


@pytest.mark.parametrize("run", ["flash_attention, K=0", "triton, K=0", "flashinfer, K=0"])
def test_real_graphs_are_predicted_from_a_seventh_of_them(run):
    """86 graphs of Qwen3-0.6B's shape on an H200: time of all within 15 %, memory of each within 10 % or 1 MiB."""
    captured = json.loads(RESULTS.read_text("utf-8"))["results"][run]["capture"]["captured"]
    samples = [
        GraphSample(
            family=(Role(graph["role"]), GraphMode(graph["entry"]["mode"]), graph["entry"]["query_len"], None),
            tokens=graph["entry"]["num_tokens"],
            seconds=graph["seconds"],
            mib=graph["memory"] / (1 << 20),
            alone_mib=graph["alone"] / (1 << 20),
        )
        for graph in captured
    ]
    fit = fit_graphs([samples[::7]])
    costs = {cost.key: cost for cost in fit.graphs}
    seconds = sum(costs[each.family].seconds + costs[each.family].seconds_per_token * each.tokens for each in samples)
    assert len(samples) == 86
    assert fit.base_seconds + seconds == pytest.approx(sum(each.seconds for each in samples), rel=0.15)
    for each in samples:
        cost = costs[each.family]
        assert cost.largest_mib + cost.mib_per_token * each.tokens == pytest.approx(each.alone_mib, rel=0.1, abs=1)
