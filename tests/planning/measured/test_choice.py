"""Measured sizes: what the plan says of them, and where ladders end."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec, load_backends
from capture_planner.codec.shipped import shipped_profiles
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.measuring.fits import predict
from capture_planner.modes import GraphMode, GraphSupport, Reason, Refresh, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.choice import _about_tail, _gaining, _priced, _teams
from capture_planner.planning.measured.steps import Prices, Steps, passes_of
from capture_planner.planning.planner import plan
from capture_planner.planning.sizing import Ladder
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import Domain
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.profile import CostCurve, Profile
from capture_planner.records.spec import Budget, Limits, Policy, Sizes, Spec
from capture_planner.testing import FakeBackend
from support import tuning
from support.measured import decodes, profile

ONE, TWO = Batch.decode(Role.TARGET, 3, 1), Batch.decode(Role.TARGET, 3, 2)
MIXED = Batch.mixed(Role.TARGET, 2, 9)


def ladder(role: Role = Role.TARGET, **named: object) -> Ladder:
    """Return a ladder of mixed batches up to 64 tokens."""
    known: dict[str, object] = {"kind": Kind.MIXED, "mode": GraphMode.FULL, "domain": Domain.upto(64), "sizes": ()}
    return Ladder(role=role, max_num_reqs=8, **known | named)  # type: ignore[arg-type]


def costs_of(reach: int = 64, *, eager: float = 3.0) -> Costs:
    """Return times of n milliseconds for graphs of n tokens, of as many times ``eager`` eager, if any."""
    curves = [
        CostCurve(role=role, mode=mode, tokens=(1, reach), milliseconds=(factor, factor * reach))
        for role in Role
        for mode, factor in ((GraphMode.FULL, 1.0), *([(GraphMode.NONE, eager)] if eager else []))
    ]
    return Costs(replace(profile(), curves=tuple(curves)))


@pytest.mark.parametrize(
    ("batches", "rests"), [((ONE,), False), ((TWO,), False), ((ONE, TWO), True), ((MIXED,), True), ((ONE, MIXED), True)]
)
def test_a_percentile_rests_on_an_assumption_unless_all_are_decodes_of_one_length(
    batches: tuple[Batch, ...], rests: bool
) -> None:
    """With the time of the chosen sizes where they take longer."""
    steps = Steps(dict.fromkeys(batches, 3))
    assert bool([*_about_tail("p90", steps, 2.0, 2.0)]) == rests
    for sentence in _about_tail("p90", steps, 2.0, 2.0):
        assert sentence == "assumed: the p90 step is the same one as with a graph of every size, and takes 2 ms"
    for sentence in _about_tail("p90", steps, 2.0, 2.5):
        assert sentence.endswith("takes 2 ms; with these sizes the p90 step takes 2.5 ms")


@given(st.integers(1, 80), st.integers(1, 4), st.lists(st.integers(1, 64), max_size=2), st.booleans())
def test_mixed_ladders_end_where_a_graph_gains_nothing(cut: int, step: int, anchors: list[int], shared: bool) -> None:
    """At a multiple of their step, and at no less than their anchors; a team by the times of both."""
    domain = Domain.upto(64, step)
    first = ladder(domain=domain, anchors=tuple(anchors))
    second = ladder(Role.DRAFT_PREFILL, domain=domain, anchors=tuple(anchors))
    decodes = ladder(Role.DRAFT_DECODE, kind=Kind.DECODE, query_len=1, domain=Domain.upto(8))
    ladders = [first, decodes, second]
    teams = _teams(ladders) if shared else [(0,), (1,), (2,)]
    assert teams == ([(0, 2), (1,)] if shared else [(0,), (1,), (2,)])
    # A graph of the target takes n ms, and an eager pass one more up to ``cut`` tokens, then the same.
    known = [
        CostCurve(role=role, mode=mode, tokens=(1, 100), milliseconds=(1.0, 100.0))
        for role in Role
        for mode in (GraphMode.FULL, GraphMode.NONE)
    ]
    eager = CostCurve(
        role=Role.TARGET, mode=GraphMode.NONE, tokens=(1, cut + 1, 101), milliseconds=(cut + 0.5, cut + 0.5, 100.5)
    )
    known = [eager if (c.role, c.mode) == (Role.TARGET, GraphMode.NONE) else c for c in known]
    costs = Costs(replace(profile(), curves=tuple(known)))
    ended = _gaining(ladders, teams, costs)
    gaining = [
        n
        for n in range(step, domain.ceiling + 1, step)
        if costs.graph((Role.TARGET, GraphMode.FULL, None, None))(n) < costs.eager(Role.TARGET, None)(n)
    ]
    top = max([*gaining, *anchors, 0])
    assert ended[1] == decodes
    assert ended[0].domain == domain.clipped(top)
    assert ended[2].domain == domain.clipped(top if shared else max([*anchors, 0]))


def test_what_is_lost_above_the_largest_size_is_said() -> None:
    """Mixed batches above it; a ladder that the budget leaves out, at its largest count; or why it is not known."""
    assert _priced(ladder(sizes=(8, 16)), costs_of()).price == "at 17 that takes 34 ms more than a graph"
    assert _priced(ladder(sizes=(64,)), costs_of()).price == "at 65 that takes at least 130 ms more than a graph"
    assert _priced(ladder(sizes=(64,)), costs_of(eager=1.0)).price == (
        "by the profile a graph of 65 tokens or more takes no less"
    )
    assert _priced(ladder(sizes=(63,)), costs_of()).price == "at 64 that takes 128 ms more than a graph"
    assert _priced(ladder(), costs_of()).price == ""
    decodes = ladder(kind=Kind.DECODE, query_len=4, domain=Domain(((1, 2), (5, 8))), sizes=(8,))
    assert _priced(decodes, costs_of()).price == ""
    cut = attrs.evolve(decodes, sizes=(), cut=Reason.BUDGET)
    assert _priced(cut, costs_of()).price == "at 8 that takes 64 ms more than a graph"
    assert _priced(cut, costs_of(eager=0)).price == "the profile has no eager times of target"


def shipped(name: str, drafts: int, **named: object) -> tuple[Plan, Spec, Profile]:
    """Return the plan of 256 requests and 8,192 tokens by a shipped profile, where few requests run."""
    known = codec.load_profile(shipped_profiles()[f"{name}.h200"])
    spec = Spec(
        model=known.model,
        limits=Limits(max_num_reqs=256, max_num_tokens=8192),
        backend="alpha",
        speculative=Speculative(method=Method.EAGLE3, num_tokens=drafts) if drafts else None,
        sizes=Sizes(policy=Policy.MEASURED),
        **named,  # type: ignore[arg-type]
    )
    support = dict.fromkeys(Role, Support(level=GraphSupport.ALWAYS, reason="any"))
    backend = FakeBackend(name="alpha", supports=support, refreshes=Refresh.IN_GRAPH)
    registry = Registry([RegisteredBackend(backend=backend, distribution="d", version="1")])
    traffic = decodes({n: 2000 // n for n in range(1, 33)}, 1 + drafts)
    environment = Environment(name="h200", device=known.device)
    return plan(spec, environment, registry, Measurements(traffic=traffic, profile=known)), spec, known


@pytest.mark.parametrize(
    ("name", "drafts", "graphs"),
    [
        ("qwen3-0.6b-eagle3", 3, 56),
        ("qwen3-0.6b-eagle3", 3, None),
        ("qwen3-8b-eagle3", 3, 78),
        ("qwen3-8b-eagle3", 3, 12),
        ("qwen3-0.6b-eagle3", 3, 6),
        ("qwen3-30b-a3b", 0, 28),
    ],
)
def test_shipped_profiles_keep_full_decodes_and_a_bound_at_any_load(name: str, drafts: int, graphs: int | None) -> None:
    """Full graphs of all decodes of every role, and no step that takes 15 % longer than on a graph of its own size,
    also at loads that the traffic does not have. Where the budget is too small for that, a decision says so.
    """
    made, spec, known = shipped(name, drafts, budget=Budget(max_graphs=graphs))
    dispatcher, costs = Dispatcher(made), Costs(known)
    for n in range(1, 257):
        served = dispatcher.dispatch(Batch.decode(Role.TARGET, n, 1 + drafts))
        assert served.entry is not None
        assert served.entry.mode is GraphMode.FULL
    said = [
        each.message for each in made.roles[0].decisions if "of the sizes tried the budget holds none" in each.message
    ]
    assert bool(said) == (graphs in (6, 12))
    prices = Prices(costs, spec, {role.role: role.mode for role in made.roles})
    batches = [Batch.decode(Role.TARGET, n, 1 + drafts) for n in range(1, 257)]
    batches += [
        Batch(role=Role.TARGET, num_reqs=1, num_tokens=n, query_len=None, past_prompt=False) for n in range(1, 8193, 7)
    ]
    worst = 0.0
    for batch in batches:
        teams = [0.0, 0.0], [0.0, 0.0]
        for each, repeats in passes_of(batch, spec):
            entry = dispatcher.dispatch(each).entry
            fused = entry is not None and entry.draft_steps is not None
            if entry is not None:  # A batch that a measured graph may hold does not depend on an assumed time.
                reach = costs.graph((each.role, entry.mode, entry.query_len, entry.draft_steps)).reach
                assert entry.num_tokens <= reach or each.num_tokens > reach
            times = prices.of(each, entry, repeats), prices.with_every_size(each, repeats, fused=fused)
            for side, time in enumerate(times):
                teams[each.role is Role.DRAFT_DECODE][side] += time
        apart = known.base_overhead
        ratios = [(own + apart) / (every + apart) for own, every in teams if every]
        worst = max(worst, *ratios)
    assert (worst <= 1.15 * (1 + 1e-9)) != bool(said)


@pytest.mark.parametrize("budget", [Budget(seconds=2.0), Budget(memory=10 << 20)])
def test_without_a_graph_nothing_is_captured(budget: Budget) -> None:
    """What capturing takes once is above the budget, so no graph is within it, and the engine does not begin."""
    spec = Spec(
        model=tuning.MODEL,
        limits=Limits(max_num_reqs=16, max_num_tokens=64),
        mode=GraphMode.FULL_DECODE_ONLY,
        backend="flash_attention",
        sizes=Sizes(policy=Policy.MEASURED),
        budget=budget,
    )
    costs = replace(tuning.profile(), base_mib=20.0, base_seconds=3.0)
    environment = Environment(name="h200", device=tuning.DEVICE)
    made = plan(spec, environment, load_backends(), Measurements(traffic=decodes({8: 6000}, 1), profile=costs))
    assert made.forecast is not None
    assert made.num_graphs == made.forecast.mib == made.forecast.seconds == 0
    expected = predict(costs, made)
    assert (expected.memory_mib, expected.seconds) == (0, 0)


@pytest.mark.parametrize("graphs", [2, 3, 4])
@pytest.mark.parametrize("objective", ["mean", "p50", "p90", "p99"])
def test_bound_on_the_worst_step_costs_the_mean_little_and_a_percentile_nothing(objective: str, graphs: int) -> None:
    made: dict[float, Plan] = {}
    for slowdown in (0.05, 1000.0):
        spec = Spec(
            model=tuning.MODEL,
            limits=Limits(max_num_reqs=256, max_num_tokens=512),
            mode=GraphMode.FULL_DECODE_ONLY,
            backend="flash_attention",
            sizes=Sizes(policy=Policy.MEASURED, objective=objective, max_slowdown=slowdown),
            budget=Budget(max_graphs=graphs),
        )
        traffic = Measurements(traffic=decodes({200: 60000, 256: 30000}, 1), profile=tuning.profile())
        environment = Environment(name="h200", device=tuning.DEVICE)
        made[slowdown] = plan(spec, environment, load_backends(), traffic)
    bound, free = (each.forecast for each in made.values())
    assert bound is not None
    assert free is not None
    assert bound.mean_step_ms <= 1.005 * free.mean_step_ms
    if objective != "mean":
        assert bound.expected == free.expected
