"""tune: both sides judged by one rule, what is proposed, and when it says to keep what is there."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capture_planner import load_backends, plan
from capture_planner.analysis.lint import Severity, lint, shape_rules
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate
from capture_planner.engines.deployments import emulation_of
from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import steps_of
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import batches
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.profile import CostCurve, Profile
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner_tuner.tuning.judgement import (
    LEAST_LINES,
    LEAST_STEPS,
    Evidence,
    Noise,
    Pricing,
    SideFigures,
    TuneVerdict,
    is_slower,
    judged,
    noise_between,
    verdict_on,
)
from capture_planner_tuner.tuning.tune import (
    GRAPH,
    MORE,
    PADDED,
    SHIFTED,
    TableSearch,
    TuneCase,
    Tuning,
    TuningBounds,
    finding_key,
    shifted,
    tune,
)
from support.forecasts import forecast
from support.tuning import MODEL, profile

H200 = find_environment("h200")
BACKENDS = load_backends()
FEW = settings(max_examples=max(settings.default.max_examples // 2, 3))
DRAFTS = Speculative(method=Method.EAGLE3, num_tokens=2)
SPEC = Spec(model=MODEL, limits=Limits(max_num_reqs=12, max_num_tokens=40), backend="flash_attention")


def spec_for(speculative: Speculative | None, sizes: Sizes) -> Spec:
    return replace(SPEC, speculative=speculative, sizes=sizes)


def profile_for(spec: Spec, **settings: float | None) -> Profile:
    return profile(spec.active_roles, speculative=spec.speculative, **settings)


def planned(
    spec: Spec,
    graphs: int | None = None,
    *,
    costs: Profile | None = None,
    load: Traffic | None = None,
    kept: TuningBounds | None = None,
) -> Plan:
    """Return the plan of a spec, with measured sizes where a load is given, within what is kept to."""
    if load is not None:
        assert costs is not None
        spec = replace(spec, sizes=Sizes(policy=Policy.MEASURED))
    budget = replace(spec.budget, max_graphs=graphs)
    if kept is not None:
        memory = None if kept.memory_mib is None else int(kept.memory_mib * (1 << 20))
        budget = replace(budget, memory=memory, seconds=kept.seconds or None)
    spec = replace(spec, budget=budget)
    found = None if load is None or costs is None else Measurements(profile=costs, traffic=load)
    return plan(spec, H200, BACKENDS, found)


@st.composite
def loads(draw: st.DrawFn, width: int) -> Traffic:
    """Steps of decodes and of mixed batches within the limits of ``SPEC``: enough to judge on."""
    most = min(SPEC.limits.max_num_reqs, SPEC.limits.max_num_tokens // width)
    decodes = draw(st.dictionaries(st.integers(1, most), st.integers(100, 5000), min_size=1, max_size=6))
    mixed = draw(st.dictionaries(st.integers(12, SPEC.limits.max_num_tokens), st.integers(1, 500), max_size=4))
    counts = [
        TrafficCount(
            role=Role.TARGET, num_reqs=n, num_tokens=n * width, query_len=width, past_prompt=True, count=count + 1000
        )
        for n, count in decodes.items()
    ]
    counts += [
        TrafficCount(role=Role.TARGET, num_reqs=3, num_tokens=tokens, past_prompt=False, count=count)
        for tokens, count in mixed.items()
    ]
    return Traffic(sources=("drawn",), batches=tuple(counts))


@st.composite
def explicit(draw: st.DrawFn) -> Sizes:
    """Sizes that a person might give."""
    reqs = draw(st.sets(st.integers(1, 12), min_size=1, max_size=6))
    tokens = draw(st.sets(st.integers(1, 40), min_size=1, max_size=6))
    return Sizes(policy=Policy.EXPLICIT, num_reqs=tuple(sorted(reqs)), num_tokens=tuple(sorted(tokens)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Spec, Traffic, Profile]:
    """A deployment as it is today, its load and its costs."""
    spec = spec_for(draw(st.sampled_from((None, DRAFTS))), draw(explicit()))
    load = draw(loads(1 if spec.speculative is None else 3))
    return spec, load, profile_for(spec, spread=draw(st.sampled_from((None, 0.0, 0.01, 0.1))))


def tuned(spec: Spec, load: Traffic, costs: Profile, *, today: Plan | None = None, **options: object) -> Tuning:
    """Tune a spec, judged on the load that sizes are chosen by."""
    steps = steps_of(load, spec).counts
    side = emulation_of(today or planned(spec))
    most, own = options.pop("graphs", None), ("bounds", "room", "progress")
    given = {name: value for name, value in options.items() if name not in own}
    return tune(
        TuneCase(today=side, costs=Costs(costs), chosen=steps, judging=steps, **given),  # type: ignore[arg-type]
        lambda count, kept: planned(
            spec, count if most is None else min(count, int(str(most))), costs=costs, load=load, kept=kept
        ),
        **{name: options[name] for name in own if name in options},  # type: ignore[arg-type]
    )


def priced(side: SideFigures) -> float:
    """Return the mean step in milliseconds, with each graph at its price."""
    return side.mean_step_ms * (1 + GRAPH * side.graphs)


@FEW
@given(cases())
def test_a_proposal_never_costs_more_than_today_within_the_bounds(case: tuple[Spec, Traffic, Profile]) -> None:
    """It is no slower, and takes more than today's graphs only within the room, and if it is faster beyond noise."""
    room = TuningBounds(memory_mib=400.0, seconds=5.0)
    found = tuned(*case, room=room)
    assert found.today is not None
    assert found.proposed is not None
    assert found.verdict is not TuneVerdict.TOO_LITTLE_DATA
    assert found.proposed.mean_step_ms <= found.today.mean_step_ms * (1 + 1e-9)
    own = TuningBounds(memory_mib=found.today.memory_mib, seconds=found.today.seconds).rounded()
    if not own.hold(found.proposed):
        assert found.proposed.memory_mib <= max(400.0, found.today.memory_mib)
        assert found.proposed.seconds <= max(5.0, found.today.seconds)
        assert found.proposed.objective < found.today.objective
        assert found.verdict is TuneVerdict.CHANGE, found.reason


@FEW
@given(cases(), st.sampled_from((None, 2, 5)), st.booleans(), st.booleans())
def test_a_proposal_holds_against_every_guard(
    case: tuple[Spec, Traffic, Profile], graphs: int | None, guess: bool, heavy: bool
) -> None:
    """No decode loses a full graph, check does not warn, and it is no slower, also under twice the load.

    By the costs of another deployment, no batch at all loses its graph. Where today exceeds the bounds, only that and
    check count, whose warnings of padding are then stated; ``heavy``: it warns of all padding.
    """
    spec, load, costs = case
    bounds = None if graphs is None else TuningBounds(graphs=graphs)
    today = planned(spec)
    usual = {finding_key(each) for each in lint(planned(replace(spec, sizes=Sizes())))}
    evidence = Evidence(is_estimate=guess, foreign=0.1 * guess)
    with mock.patch.multiple(shape_rules, HEAVY_RATIO=1 if heavy else 2, HEAVY_TOKENS=0 if heavy else 1024):
        found = tuned(spec, load, costs, today=today, bounds=bounds, graphs=graphs, usual=usual, evidence=evidence)
        said = [] if found.plan is None else lint(found.plan)
    within = graphs is None or today.num_graphs <= graphs
    kept = TuneVerdict.KEEP if within else TuneVerdict.OVER_BUDGET
    assert found.plan is not None or (found.verdict is kept and found.proposed == found.today)
    assert ("today's graphs exceed the budget" in found.reason) is not within
    assume(found.plan is not None)
    assert found.plan is not None
    before, after = emulation_of(today), emulation_of(found.plan)
    for role in before.modes:
        for batch, _ in batches(role, before):
            had, has = before.dispatch(batch).mode, after.dispatch(batch).mode
            if within and had is GraphMode.FULL and batch.kind is Kind.DECODE:
                assert has is GraphMode.FULL
            if guess and had is not GraphMode.NONE:
                assert has is not GraphMode.NONE
    warned = {finding_key(each) for each in said if each.severity is not Severity.NOTE} - usual
    assert not warned or (not within and {code for code, _ in warned} == {PADDED})
    if found.verdict is TuneVerdict.CHANGE and within:
        assert found.today is not None
        assert found.proposed is not None
        assert found.proposed.mean_step_ms <= found.today.mean_step_ms * (1 + 1e-9)
        doubled = shifted(steps_of(load, spec).counts, before)
        old, new = (judged(Pricing(side, Costs(costs)), doubled) for side in (before, after))
        assert new.mean_step_ms <= old.mean_step_ms * (1 + SHIFTED + 1e-9)


@given(cases())
def test_each_doubling_of_requests_counts_the_same(case: tuple[Spec, Traffic, Profile]) -> None:
    """Doublings with at least 1 % of the steps have equal weight, regardless of their steps and tokens."""
    spec, load, costs = case
    own, steps = Pricing(emulation_of(planned(spec)), Costs(costs)), steps_of(load, spec).counts
    ratios = []
    for last in (1, 2, 4, 8, 16):
        inside = {batch: count for batch, count in steps.items() if last // 2 < batch.num_reqs <= last}
        if sum(inside.values()) >= 0.01 * sum(steps.values()):
            spent, every = (
                sum(getattr(own.step(batch), name) * count for batch, count in inside.items())
                for name in ("milliseconds", "every_size")
            )
            ratios.append(spent / every)
    assert judged(own, steps).evenly == pytest.approx(sum(ratios) / len(ratios))


@FEW
@given(cases(), st.sampled_from(("mean", "token", "p90")))
def test_no_table_that_was_tried_costs_less_than_the_selected_one(
    case: tuple[Spec, Traffic, Profile], objective: str
) -> None:
    """Each graph at its price, on top of what a table takes longer than the best of those that may be proposed."""
    spec, load, costs = case
    steps = steps_of(load, spec).counts
    side = TuneCase(
        today=emulation_of(planned(spec)), costs=Costs(costs), chosen=steps, judging=steps, objective=objective
    )
    search = TableSearch(side, lambda count, kept: planned(spec, count, costs=costs, load=load, kept=kept), len)
    tier = TuningBounds()
    selected = search.selected(tier)
    tried = [each for each in search._made.values() if search._is_admissible(each, tier)]
    assert (selected is None) is (not tried)
    steady = [each for each in tried if each.plan.is_steady] or tried
    figures = {each.plan.num_graphs: each.chosen for each in steady}

    def price(own: SideFigures) -> float:
        objective, mean, evenly = (
            getattr(own, name) / min(getattr(other, name) for other in figures.values())
            for name in ("objective", "mean_step_ms", "evenly")
        )
        return max(objective, mean, (objective + mean + evenly) / 3) * (1 + GRAPH * own.graphs)

    if selected is not None and len(figures) == len(steady):
        least = min(map(price, figures.values()))
        near = [own.graphs for own in figures.values() if price(own) <= least * (1 + GRAPH / 10) * (1 + 1e-12)]
        assert selected.plan.num_graphs in near


def test_a_load_of_few_requests_has_its_size() -> None:
    """One step in a hundred has one request: next to none of the tokens, and 8 % longer on a graph of twelve."""
    spec = spec_for(None, Sizes(policy=Policy.EXPLICIT, num_reqs=(6,), num_tokens=(6,)))
    costs = profile_for(spec)
    curves = [each for each in costs.curves if each.mode is not GraphMode.FULL]
    full = CostCurve(role=Role.TARGET, mode=GraphMode.FULL, query_len=1, tokens=(1, 12), milliseconds=(1.0, 1.08))
    counts = {1: 1_000, 12: 99_000}
    load = Traffic(
        sources=("two loads",),
        batches=tuple(
            TrafficCount(
                role=Role.TARGET, num_reqs=number, num_tokens=number, query_len=1, past_prompt=True, count=count
            )
            for number, count in counts.items()
        ),
    )
    found = tuned(spec, load, replace(costs, curves=(full, *curves)))
    assert found.plan is not None
    sizes = {entry.num_reqs for role in found.plan.roles for entry in role.entries if entry.query_len}
    assert sizes == {4, 12}


@FEW
@given(cases())
def test_what_was_proposed_is_kept_when_it_runs(case: tuple[Spec, Traffic, Profile]) -> None:
    """Tuning again, with the same load and the proposed table as today's, changes nothing."""
    found = tuned(*case)
    today = found.plan or planned(case[0])
    again = tuned(*case, today=today)
    assert again.verdict is TuneVerdict.KEEP, again.reason


@given(cases())
def test_both_sides_are_judged_as_plans_are_forecast(case: tuple[Spec, Traffic, Profile]) -> None:
    """The judgement of a plan is what the dispatcher gives over the load."""
    spec, load, costs = case
    own = planned(spec)
    side = judged(Pricing(emulation_of(own), Costs(costs)), steps_of(load, spec).counts)
    expected = forecast(own, load, Costs(costs))
    assert side.mean_step_ms == pytest.approx(expected.mean_step_ms)
    assert side.regret == pytest.approx(expected.regret)
    assert max(side.eager_share.values()) <= expected.eager_share + 1e-9


@given(cases())
def test_a_side_does_not_differ_from_itself(case: tuple[Spec, Traffic, Profile]) -> None:
    """An error of the profile is in both, and cancels out."""
    spec, load, costs = case
    pricing = Pricing(emulation_of(planned(spec)), Costs(costs))
    noise = noise_between(pricing, pricing, steps_of(load, spec).counts, spread=0.5)
    assert noise.total == 0


@given(loads(1), explicit())
def test_faster_tables_of_the_pareto_table_have_more_graphs(load: Traffic, sizes: Sizes) -> None:
    """Graphs and seconds ascend and the mean step descends, among the tables within the bounds and those beyond."""
    spec = spec_for(None, sizes)
    found = tuned(spec, load, profile_for(spec))
    assert found.pareto
    for within in (True, False):
        rows = [
            (each.side.graphs, each.side.seconds, -each.side.mean_step_ms)
            for each in found.pareto
            if each.within is within
        ]
        assert all(a < b for one, two in pairwise(rows) for a, b in zip(one, two, strict=True))


DECODES = Traffic(
    sources=("by hand",),
    batches=tuple(
        TrafficCount(role=Role.TARGET, num_reqs=n, num_tokens=n, query_len=1, past_prompt=True, count=1000)
        for n in (3, 5, 9, 12)
    ),
)


def test_too_few_steps_promise_nothing() -> None:
    """One step below the least is too little; no side is judged, and nothing is planned."""
    few = replace(DECODES, batches=(attrs.evolve(DECODES.batches[0], count=LEAST_STEPS - 1),))
    found = tuned(SPEC, few, profile_for(SPEC))
    assert found.verdict is TuneVerdict.TOO_LITTLE_DATA
    assert found.today is found.proposed is found.plan is None
    assert f"{LEAST_STEPS:,}" in found.reason
    enough = replace(DECODES, batches=(attrs.evolve(DECODES.batches[0], count=LEAST_STEPS),))
    assert tuned(SPEC, enough, profile_for(SPEC)).verdict is not TuneVerdict.TOO_LITTLE_DATA


def test_steps_to_judge_on_alone_promise_nothing() -> None:
    """All steps before them are beyond the limits: no sizes can be chosen."""
    today = emulation_of(planned(SPEC))
    case = TuneCase(today=today, costs=Costs(profile()), chosen={}, judging=steps_of(DECODES, SPEC).counts)
    found = tune(case, lambda count, _: planned(SPEC, count))
    assert found.verdict is TuneVerdict.TOO_LITTLE_DATA
    assert "no step to choose sizes by is within the limits" in found.reason


def test_graphs_beyond_a_budget_are_replaced_by_graphs_within() -> None:
    """Today's 52 graphs exceed 4, whatever they gain."""
    every = Sizes(policy=Policy.EXPLICIT, num_reqs=tuple(range(1, 13)), num_tokens=tuple(range(1, 41)))
    spec = spec_for(None, every)
    found = tuned(spec, DECODES, profile_for(spec), bounds=TuningBounds(graphs=4), graphs=4)
    assert found.verdict is TuneVerdict.CHANGE
    assert "exceed the budget" in found.reason
    assert found.plan is not None
    assert found.plan.num_graphs <= 4


@FEW
@given(cases(), st.integers(1, 4))
def test_a_budget_below_todays_graphs_is_no_reason_to_keep_them(
    case: tuple[Spec, Traffic, Profile], graphs: int
) -> None:
    """What a table within it does worse than today is said, padding included. Check alone refuses it."""
    assume(planned(case[0]).num_graphs > graphs)
    found = tuned(*case, bounds=TuningBounds(graphs=graphs), graphs=graphs)
    assert found.reason.startswith("today's graphs exceed the budget")
    assert found.verdict is (TuneVerdict.OVER_BUDGET if found.plan is None else TuneVerdict.CHANGE)
    warned = {each.rule.code for each in lint(found.plan) if each.severity is not Severity.NOTE} if found.plan else {""}
    assert ("check warns of" in found.reason) is bool(warned)
    assert found.plan is None or warned <= {PADDED}
    costs_more = found.shift is not None and found.shift.gain < -SHIFTED
    assert ("with twice the load" in found.reason) is costs_more


@FEW
@given(cases(), st.integers(1, 4), st.booleans())
def test_padding_that_check_warns_of_gives_way_to_no_slower_table(
    case: tuple[Spec, Traffic, Profile], graphs: int, guess: bool
) -> None:
    """Where today exceeds a budget and all padding is heavy, the table is as fast as without that rule, or as today."""
    assume(planned(case[0]).num_graphs > graphs)
    evidence = Evidence(is_estimate=guess, foreign=0.1 * guess)
    options = {"bounds": TuningBounds(graphs=graphs), "graphs": graphs, "evidence": evidence}
    free = tuned(*case, **options)
    with mock.patch.multiple(shape_rules, HEAVY_RATIO=1, HEAVY_TOKENS=0):
        found = tuned(*case, **options)
    assert (found.plan is None) is (free.plan is None)
    assert found.today is not None
    assert found.proposed is not None
    assert free.proposed is not None
    assert not is_slower(found.today, found.proposed) or found.proposed.rank <= free.proposed.rank


def test_deployments_without_graphs_are_left_alone() -> None:
    """With graphs turned off there are no sizes to choose."""
    today = emulate("vllm", ["Qwen/Qwen3-8B", "--enforce-eager", "--max-num-seqs", "12"], H200)
    steps = steps_of(DECODES, today).counts

    def refuse(_: int, __: TuningBounds | None) -> Plan:
        raise AssertionError("planned")

    found = tune(TuneCase(today=today, costs=Costs(profile()), chosen=steps, judging=steps), refuse)
    assert found.verdict is TuneVerdict.KEEP
    assert "turned off" in found.reason


def test_profiles_without_a_role_are_refused() -> None:
    """A drafter's steps cannot be judged by the target's times."""
    spec = spec_for(DRAFTS, SPEC.sizes)
    with pytest.raises(PlanningError, match="draft_prefill"):
        tuned(spec, replace(DECODES, sources=("x",)), profile())


def test_what_the_engine_never_runs_eager_keeps_its_graph() -> None:
    """An engine whose graphs serve every draft decode has no eager times of them: the last graph is theirs."""
    spec = spec_for(DRAFTS, Sizes())
    costs = profile_for(spec)
    served = tuple(c for c in costs.curves if (c.role, c.mode) != (Role.DRAFT_DECODE, GraphMode.NONE))
    without = tuned(spec, DECODES, replace(costs, curves=served))
    assert without.proposed == tuned(spec, DECODES, costs).proposed
    assert without.notes == ()


def test_a_table_up_to_the_largest_batch_may_take_more_memory_where_none_takes_less() -> None:
    """Today's graphs end at 2 requests, and each measured table ends at 12."""
    few = spec_for(None, Sizes(policy=Policy.EXPLICIT, num_reqs=(1, 2), num_tokens=(1, 2)))
    costs = profile_for(few)
    costs = replace(costs, graphs=tuple(attrs.evolve(each, mib_per_token=50.0) for each in costs.graphs))
    found = tuned(few, DECODES, costs)
    assert found.proposed is not None
    assert priced(found.proposed) == pytest.approx(min(priced(each.side) for each in found.pareto if each.within))
    assert found.verdict is TuneVerdict.CHANGE
    assert found.today is not None
    assert found.proposed.memory_mib > found.today.memory_mib


def test_what_more_memory_buys_is_known_where_a_budget_hides_it() -> None:
    """A budget of today's memory leaves most steps without a graph: the tuning says what a table beyond it gains."""
    few = spec_for(None, Sizes(policy=Policy.EXPLICIT, num_reqs=(1, 2), num_tokens=(1, 2)))
    costs = profile_for(few)
    costs = replace(costs, graphs=tuple(attrs.evolve(each, mib_per_token=50.0) for each in costs.graphs))
    free = tuned(few, DECODES, costs)
    assert free.today is not None
    assert free.proposed is not None
    found = tuned(few, DECODES, costs, bounds=TuningBounds(memory_mib=free.today.memory_mib))
    assert found.beyond is not None
    assert found.today is not None
    assert found.beyond.gain == pytest.approx(1 - free.proposed.objective / found.today.objective, abs=MORE)
    assert found.beyond.bounds.memory_mib is not None
    assert found.beyond.bounds.memory_mib > found.today.memory_mib


@settings(max_examples=max(FEW.max_examples // 3, 3))
@given(cases(), st.sampled_from((None, TuningBounds(graphs=3), TuningBounds(memory_mib=75.0, graphs=9))))
def test_what_more_buys_is_what_its_flags_give(
    case: tuple[Spec, Traffic, Profile], bounds: TuningBounds | None
) -> None:
    """Tuned again with just those flags, it is a change with the very gain and price that were stated."""
    found = tuned(*case, bounds=bounds)
    assume(found.beyond is not None)
    assert found.beyond is not None
    given = {name: value for name, value in attrs.asdict(found.beyond.bounds).items() if value is not None}
    again = tuned(*case, bounds=attrs.evolve(bounds or TuningBounds(), **given))
    assert again.verdict is TuneVerdict.CHANGE
    assert again.proposed is not None
    against = found.proposed if found.verdict is TuneVerdict.CHANGE else found.today
    assert against is not None
    assert found.beyond.gain == pytest.approx(1 - again.proposed.objective / against.objective)
    assert found.beyond.gain > MORE
    for name in ("graphs", "memory_mib", "seconds"):
        assert getattr(found.beyond, name) == pytest.approx(getattr(again.proposed, name) - getattr(against, name))


@pytest.mark.parametrize("lines", [0, 1, LEAST_LINES - 1])
def test_few_lines_promise_nothing_however_many_steps_they_stand_for(lines: int) -> None:
    """SGLang logs one decode in 40: what counts is how many were seen; part of a line may be rounded to none."""
    found = tuned(SPEC, DECODES, profile_for(SPEC), evidence=Evidence(lines=lines))
    assert found.verdict is TuneVerdict.TOO_LITTLE_DATA
    assert f"{counted(lines, 'line')} to judge on" in found.reason
    assert tuned(SPEC, DECODES, profile_for(SPEC), evidence=Evidence(lines=LEAST_LINES)).today is not None


def test_steps_that_are_alike_for_long_say_less_than_independent_ones() -> None:
    """The same steps in blocks that are each of one size: the gain is known far less."""
    spec = spec_for(None, Sizes(policy=Policy.EXPLICIT, num_reqs=(1, 2), num_tokens=(1, 2)))
    costs, steps = Costs(profile_for(spec)), steps_of(DECODES, spec).counts
    today, other = (Pricing(emulation_of(planned(each)), costs) for each in (spec, spec_for(None, Sizes())))
    blocks = tuple({batch: 500} for batch in steps for _ in range(2))
    alike, apart = (
        noise_between(today, other, steps, 0.0, "token", evidence) for evidence in (Evidence(blocks=blocks), Evidence())
    )
    assert alike.sampling > 5 * apart.sampling
    assert alike.blocks == 8
    assert alike.low is not None
    assert alike.high is not None
    assert alike.low <= alike.high


@given(loads(1), explicit())
def test_noise_is_the_same_each_time(load: Traffic, sizes: Sizes) -> None:
    """Drawing the traffic anew has a fixed seed, and the gain lies within what it gives."""
    spec, other = spec_for(None, sizes), spec_for(None, Sizes())
    costs, steps = Costs(profile_for(spec)), steps_of(load, spec).counts
    today, new = (Pricing(emulation_of(planned(each)), costs) for each in (spec, other))
    first, second = (noise_between(today, new, steps, 0.01) for _ in range(2))
    assert first == second
    gain = 1 - judged(new, steps).mean_step_ms / judged(today, steps).mean_step_ms
    assert first.low is not None
    assert first.high is not None
    assert first.low - 1e-9 <= gain <= first.high + 1e-9


@given(
    st.sampled_from((None, ((1, 4, 3), (5, 64, 1)), ((1, 64, 3),))), st.integers(8, 256), st.integers(1, 64), st.data()
)
def test_twice_the_load_is_of_decodes_that_can_run(
    schedule: tuple[tuple[int, int, int], ...] | None, tokens: int, requests: int, data: st.DataObject
) -> None:
    """A decode becomes the largest one of up to twice the requests, whatever bounds them, and none with fewer."""
    speculative = None if schedule is None else Speculative(method=Method.EAGLE3, num_tokens=3, schedule=schedule)
    limits = Limits(max_num_reqs=requests, max_num_tokens=tokens)
    side = emulation_of(planned(replace(SPEC, limits=limits, speculative=speculative)))
    runs = {n: family.query_len for family in side.families(Role.TARGET) for n in range(1, 65) if n in family.requests}
    n = data.draw(st.sampled_from(sorted(runs)))
    (found,) = shifted({Batch.decode(Role.TARGET, n, runs[n]): 7}, side).items()
    most = max(each for each in runs if each <= 2 * n)
    assert found == (Batch.decode(Role.TARGET, most, runs[most]), 7)


QUIET = Noise(measuring=0.0, sampling=0.0)


@given(st.floats(0.001, 0.3), st.floats(0, 0.3))
def test_gains_within_noise_change_nothing(gain: float, error: float) -> None:
    """A gain alone is a change where it is more than noise, and only there."""
    spec = spec_for(None, SPEC.sizes)
    side = judged(Pricing(emulation_of(planned(spec)), Costs(profile())), steps_of(DECODES, spec).counts)
    faster = attrs.evolve(side, mean_step_ms=side.mean_step_ms * (1 - gain), objective=side.objective * (1 - gain))
    noise = Noise(measuring=error * side.mean_step_ms, sampling=0.0)
    verdict, reason = verdict_on(side, faster, noise)
    assert verdict is (TuneVerdict.CHANGE if side.objective - faster.objective > noise.total else TuneVerdict.KEEP)
    assert "noise" in reason


def test_memory_is_saved_only_at_the_same_speed() -> None:
    """Half of the memory is a reason to change, unless steps take any longer for it."""
    side = judged(Pricing(emulation_of(planned(SPEC)), Costs(profile())), steps_of(DECODES, SPEC).counts)
    half = attrs.evolve(side, graphs=side.graphs // 2, memory_mib=side.memory_mib / 2)
    assert verdict_on(side, half, QUIET)[0] is TuneVerdict.CHANGE
    slow = attrs.evolve(half, objective=side.objective * 1.0001)
    assert verdict_on(side, slow, QUIET)[0] is TuneVerdict.KEEP
    little = attrs.evolve(side, memory_mib=side.memory_mib * 0.95)
    assert verdict_on(side, little, QUIET)[0] is TuneVerdict.KEEP


@pytest.mark.parametrize(
    ("worse", "says"),
    [
        ({"memory_mib": 1.5}, "MiB more"),
        ({"gap_p99_ms": 1.058}, "5.8% more time between two outputs at p99"),
        ({"gap_ms": 1.03}, "3.0% more time between two outputs"),
        ({"prompt_step_ms": 1.5}, "50.0% more time for a step with prompts"),
    ],
)
def test_start_up_is_saved_only_where_nothing_else_gets_worse(worse: dict[str, float], says: str) -> None:
    """Neither memory nor any time of a step is given for it."""
    side = judged(Pricing(emulation_of(planned(SPEC)), Costs(profile())), steps_of(DECODES, SPEC).counts)
    side = attrs.evolve(side, prompt_step_ms=20.0)
    fast = attrs.evolve(side, graphs=side.graphs // 2, seconds=side.seconds / 2)
    assert verdict_on(side, fast, QUIET)[0] is TuneVerdict.CHANGE
    spoiled = attrs.evolve(fast, **{name: getattr(side, name) * factor for name, factor in worse.items()})
    verdict, reason = verdict_on(side, spoiled, QUIET)
    assert (verdict, says in reason) == (TuneVerdict.KEEP, True), reason


def test_tables_that_leave_passes_without_times_are_not_judged() -> None:
    """A profile of an engine that never runs eager: with too few graphs nothing is known, and that is said."""
    spec = replace(spec_for(DRAFTS, Sizes(policy=Policy.DEFAULT)), mode=GraphMode.FULL_DECODE_ONLY)
    known = profile_for(spec)
    costs = replace(known, curves=tuple(each for each in known.curves if each.mode.allowed))
    batch = TrafficCount(role=Role.TARGET, num_reqs=3, num_tokens=9, query_len=3, past_prompt=True, count=2000)
    load = Traffic(sources=("drawn",), batches=(batch,))
    found = tuned(spec, load, costs)
    assert min(point.side.graphs for point in found.pareto) == 3
    (note,) = found.notes
    assert note.startswith("tables of at most 1 graph are not judged: max_graphs 1 leaves target")
    assert "the profile has no eager times" in note
    with pytest.raises(PlanningError, match=r"max_graphs 2 leaves .* the smallest budget is 3; raise it"):
        tuned(spec, load, costs, graphs=2)
