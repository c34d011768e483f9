"""Measured schedules: acceptance, work and times as the planner takes them, and plans that have the result."""

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.analysis.coverage import coverage
from capture_planner.codec.shipped import shipped_profiles
from capture_planner.errors import InvalidDocument, InvalidValue, PlanningError
from capture_planner.modes import Chain, GraphMode, GraphSupport, Refresh, Role
from capture_planner.planning.measured import choose_schedule
from capture_planner.planning.measured.schedule import acceptance_of, ranges, rescheduled, work_of
from capture_planner.planning.planner import plan
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import digest, replace
from capture_planner.records.backend import Support
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, ScheduleSource, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Budget, Limits, Policy, Sizes, Spec
from capture_planner.records.traffic import TrafficCount
from capture_planner.testing import FakeBackend, deployments
from support import reference
from support.measured import GPU, MODEL, curves, decodes, profile

MACHINE = Environment(name="h100", device=GPU)
ACCEPTANCE = (0.8, 0.6, 0.4, 0.3, 0.2)
MEASURED = Speculative(method=Method.EAGLE3, num_tokens=5, schedule=ScheduleSource.MEASURED, acceptance=ACCEPTANCE)
SPEC = Spec(
    model=MODEL,
    limits=Limits(max_num_reqs=64, max_num_tokens=1024),
    mode=GraphMode.FULL_DECODE_ONLY,
    backend="alpha",
    speculative=MEASURED,
)


LOAD = decodes(dict.fromkeys(range(1, 65), 100))


def registry(refresh=Refresh.IN_GRAPH, level=GraphSupport.ALWAYS):
    """One backend of any level for all roles."""
    support = dict.fromkeys(Role, Support(level=level, reason="told"))
    backend = FakeBackend(name="alpha", supports=support, refreshes=refresh)
    return Registry([RegisteredBackend(backend=backend, distribution="d", version="1")])


def made(spec=SPEC, traffic=LOAD, shape=None, **changes):
    """The plan of a changed spec with a traffic and a profile."""
    measurements = Measurements(profile=profile(**(shape or {})), traffic=traffic)
    return plan(replace(spec, **changes), MACHINE, registry(), measurements)


def refusal(**arguments):
    """The problems of a spec that cannot be planned."""
    with pytest.raises(PlanningError) as caught:
        made(**arguments)
    return str(caught.value)


def test_plan_has_the_ranges_with_their_rates_and_the_best_fixed_length():
    """Small batches draft more: their target pass is as long for six tokens as for one."""
    found = made()
    tiers = found.speculative.tiers(64)
    assert tiers[0][2] > tiers[-1][2]
    assert found.speculative.num_tokens == max(k for *_, k in tiers)
    decision, assumed = found.role(Role.TARGET).decisions[:2]
    assert (decision.rule, assumed.rule) == ("schedule-measured", "schedule-assumptions")
    for first, last, k in tiers:
        assert f"{first} to {last} requests draft {k} (" in decision.message
    assert "% more than the best fixed number" in decision.message
    assert "as the spec gives it" in decision.message
    assert "fewer requests run at once" in assumed.message
    assert "are taken from" in assumed.message


def test_plan_has_the_digest_of_its_spec_and_is_written_and_read():
    """Law 7: the spec says measured, the plan has the ranges, and both are the same after a file."""
    found = made()
    assert found.spec_digest == digest(SPEC)
    assert codec.loads(codec.dumps(found), Plan) == found
    assert codec.loads(codec.dumps(SPEC), Spec) == SPEC
    assert "schedule: measured" in codec.dumps(SPEC)


def test_one_length_for_all_is_no_schedule():
    """Where passes cost nothing by the token, all drafts are worth it at any size."""
    found = made(shape={"per_token": 0.0, "draft": 0.001})
    assert found.speculative.schedule == ()
    assert found.speculative.num_tokens == 5
    assert "it is the best fixed number, 5" in found.role(Role.TARGET).decisions[0].message


def test_no_drafts_where_none_is_worth_its_time():
    """No draft is ever accepted: the schedule has 0 for all, and the decision names what would save the drafter too."""
    found = made(speculative=replace(MEASURED, acceptance=(0.0,) * 5))
    assert found.speculative.schedule == ((1, 64, 0),)
    assert found.speculative.num_tokens == 1
    assert "without speculative" in found.role(Role.TARGET).decisions[0].message


@given(st.lists(st.floats(0, 1), min_size=5, max_size=5), st.integers(2, 60) | st.none(), st.sampled_from(Chain))
def test_plans_with_measured_schedules_cover_every_batch(shares, graphs, chain):
    """Laws 1 to 3: by enumeration, each admissible batch has the entry of the dispatcher, or a waiver."""
    shares = tuple(sorted(shares, reverse=True))
    speculative = replace(MEASURED, acceptance=shares, chain=chain)
    limits = Limits(max_num_reqs=17, max_num_tokens=96)
    found = made(speculative=speculative, budget=Budget(max_graphs=graphs), limits=limits)
    assert not coverage(found).uncovered
    for role in found.roles:
        for batch in reference.admissible(found, role):
            assert reference.dispatch(found, batch) is not None or reference.is_waived(role, batch), batch


@given(deployments(max_reqs=64), st.lists(st.floats(0, 1), min_size=15, max_size=15))
def test_any_deployment_can_have_a_measured_schedule(deployment, shares):
    """Laws 1 and 7: whatever the modes, limits, backends and budgets; a plan without holes, the same twice."""
    assume(deployment.spec.speculative is not None)
    acceptance = tuple(sorted(shares, reverse=True))
    uniform = replace(deployment.spec.speculative, varying_decodes=())
    speculative = replace(uniform, schedule=ScheduleSource.MEASURED, acceptance=acceptance)
    spec = replace(deployment.spec, speculative=speculative)
    eager = [replace(curve, mode=GraphMode.PIECEWISE) for curve in curves() if curve.mode is GraphMode.FULL]
    whole = replace(profile(), curves=(*curves(), *eager))
    measurements = Measurements(profile=whole, traffic=LOAD)
    try:
        found, again = (plan(spec, deployment.environment, deployment.registry, measurements) for _ in range(2))
    except PlanningError:
        reject()
    assert found == again
    assert not coverage(found).uncovered
    assert codec.loads(codec.dumps(found), Plan) == found


def test_acceptance_is_taken_from_the_traffic_where_the_spec_has_none():
    """Accepted over drafted, by position; never above the position before it."""
    traffic = replace(LOAD, drafted=(100, 50, 50, 10, 10, 0), accepted=(80, 45, 20, 1, 1, 0))
    speculative = replace(MEASURED, acceptance=())
    assert acceptance_of(speculative, traffic) == ((0.8, 0.8, 0.4, 0.1, 0.1), "as the traffic has it")
    assert made(traffic=traffic, speculative=speculative).speculative.acceptance == (0.8, 0.8, 0.4, 0.1, 0.1)


def test_missing_acceptance_is_refused_with_what_to_do():
    """Nothing known, and fewer positions than K."""
    speculative = replace(MEASURED, acceptance=())
    assert "speculative.acceptance: acceptance is known for no position, and num_tokens is 5" in refusal(
        speculative=speculative
    )
    few = replace(LOAD, drafted=(9, 9, 0), accepted=(5, 3, 0))
    assert "acceptance is known for 2 positions, and num_tokens is 5; give speculative.acceptance" in refusal(
        speculative=speculative, traffic=few
    )


def test_missing_measurements_are_refused():
    """With where to name them."""
    with pytest.raises(PlanningError, match="a measured schedule needs a traffic and a profile; name their files"):
        plan(SPEC, MACHINE, registry())


def test_traffic_without_decodes_is_refused():
    """Prompts, and batches of unknown requests."""
    prompt = TrafficCount(role=Role.TARGET, num_reqs=2, num_tokens=90, past_prompt=False, count=7)
    unknown = TrafficCount(role=Role.TARGET, num_tokens=90, count=7)
    assert "no decode of the target" in refusal(traffic=replace(LOAD, batches=(prompt, unknown)))


def test_profile_without_a_role_is_refused():
    """The draft decodes have no times."""
    assert "no times of graphs of draft_decode" in refusal(shape={"roles": (Role.TARGET, Role.DRAFT_PREFILL)})


@pytest.mark.parametrize(
    ("acceptance", "message"),
    [
        ((0.5, 0.6), "a draft counts only if those before it were accepted"),
        ((1.5,), "must be at most 1"),
        ((0.5, 0.4), "has 2 positions, and num_tokens is 5"),
    ],
)
def test_impossible_acceptance_is_refused(acceptance, message):
    """At its place in the record."""
    with pytest.raises(InvalidValue, match=message):
        replace(MEASURED, acceptance=acceptance)


def test_plan_file_with_the_word_measured_is_refused():
    """A plan is what was decided."""
    text = codec.dumps(made())
    start, end = text.index("schedule: ["), text.index("]]", text.index("schedule: [")) + 2
    with pytest.raises(InvalidDocument, match=r"a plan has the ranges of its schedule, got measured"):
        codec.loads(text[:start] + "schedule: measured" + text[end:], Plan)


def test_work_counts_tokens_and_not_steps():
    """A step of query length 4 gives 1 + 0.8 + 0.6 + 0.4 tokens a request, one of 1 a single token."""
    tokens = (1.0, 1.8, 2.4, 2.8)
    long, short = (work_of(decodes({2: 10**6}, query_len), tokens, 4) for query_len in (4, 1))
    assert long == pytest.approx([2.8 * work for work in short])
    both = replace(LOAD, batches=(*decodes({2: 10**6}).batches, *decodes({3: 10**6}, query_len=1).batches))
    work = work_of(both, tokens, 4)
    assert work[1] > work[2] > max(work[0], work[3]) > 0
    assert work_of(None, tokens, 4) == (1.0,) * 4


@given(
    st.dictionaries(st.integers(1, 64), st.integers(50, 1000), min_size=1),
    st.dictionaries(st.integers(1, 64), st.integers(50, 1000)),
    st.tuples(st.integers(1, 3), st.integers(4, 6)),
)
def test_rescheduled_traffic_has_the_same_work_in_the_lengths_of_the_schedule(counts, others, query_lens):
    """Each number of requests has decodes of one query length, and as many tokens as before; prompts stay."""
    prompt = TrafficCount(role=Role.TARGET, num_reqs=2, num_tokens=90, past_prompt=False, count=7)
    draft = TrafficCount(role=Role.DRAFT_DECODE, num_reqs=2, num_tokens=2, query_len=1, past_prompt=True, count=7)
    listed = [*decodes(counts, query_lens[0]).batches, *decodes(others, query_lens[1]).batches]
    traffic, speculative = replace(LOAD, batches=(*listed, prompt, draft)), made().speculative
    tokens = [1 + sum(ACCEPTANCE[:k]) for k in range(6)]
    after = rescheduled(traffic, speculative)
    assert prompt in after.batches
    found = {batch.num_reqs: batch for batch in after.batches if batch.past_prompt}
    assert len(found) == len(after.batches) - 1
    assert set(found) == {*counts, *others}
    for num_reqs, batch in found.items():
        assert batch.query_len == 1 + speculative.draft_tokens(num_reqs)
        wanted = sum(each.count * tokens[each.query_len - 1] for each in listed if each.num_reqs == num_reqs)
        assert batch.count * tokens[batch.query_len - 1] == pytest.approx(wanted, rel=0.06)


def test_measured_sizes_are_chosen_for_the_chosen_ranges():
    """The sizes follow on the traffic as the schedule makes it: each ladder has the passes of its range."""
    sizes = Sizes(policy=Policy.MEASURED, traffic="t.yaml", profile="p.yaml")
    found = made(sizes=sizes, budget=Budget(max_graphs=24))
    assert found.num_graphs <= 24
    assert found.forecast.eager_share == 0
    assert found.forecast.traffic == digest(LOAD)
    for role in found.roles:
        sentences = [each.message for each in role.decisions if each.rule == "sizes-measured"]
        assert not [each for each in sentences if "for 0 passes" in each]
    for first, last, k in found.speculative.tiers(64):
        own = [entry.num_reqs for entry in found.role(Role.TARGET).entries if entry.query_len == 1 + k]
        assert own
        assert max(own) == last
        assert min(own) >= first


def test_small_budget_chooses_fewer_ranges_and_sizes():
    """With six graphs there are two sizes of three roles each; the spans are those of the sizes."""
    measurements = Measurements(profile=profile(), traffic=LOAD)
    modes = dict.fromkeys(Role, GraphMode.FULL_DECODE_ONLY)
    spec = replace(SPEC, budget=Budget(max_graphs=6))
    chosen = choose_schedule(spec, modes, measurements)
    assert chosen.problem.num_graphs(chosen.spans) <= 6
    assert len(chosen.spans) <= 3
    assert "max_graphs 6 leaves 6 graphs for decodes" in chosen.decisions[1].message


def test_step_that_hardly_ran_is_not_forgotten():
    """A decode of one token that a schedule of five drafts makes a third of a step is still one."""
    speculative = replace(MEASURED, schedule=((1, 64, 5),))
    traffic = replace(LOAD, batches=decodes({3: 1}, query_len=1).batches)
    (batch,) = rescheduled(traffic, speculative).batches
    assert (batch.count, batch.num_reqs, batch.query_len, batch.num_tokens) == (1, 3, 6, 18)


ALL = [(budget, mean) for mean in (40, 130, 230) for budget in (60, None)]
CASES = ALL if settings.default.max_examples >= 100 else ALL[1:5:3]
"""With and without a budget, in CI with one mean for each."""


@pytest.mark.parametrize(("budget", "mean"), CASES)
def test_a_schedule_rests_on_no_flat_step_beyond_the_profile(budget: int | None, mean: int) -> None:
    """The shipped profile of an 8B model ends at 1,024 tokens on a flat step; 256 requests with K=5 have 1,536."""
    known = codec.load_profile(shipped_profiles()["qwen3-8b-eagle3.h200"])
    speculative = Speculative(
        method=Method.EAGLE3, num_tokens=5, schedule=ScheduleSource.MEASURED, acceptance=(0.85, 0.72, 0.61, 0.52, 0.44)
    )
    spec = Spec(
        model=known.model,
        limits=Limits(max_num_reqs=256, max_num_tokens=8192),
        backend="flash_attention",
        speculative=speculative,
        budget=Budget(max_graphs=budget),
    )
    counts = dict.fromkeys(range(max(mean - 30, 1), min(mean + 30, 256) + 1), 100)
    measurements = Measurements(profile=known, traffic=decodes(counts, 6))
    modes = dict.fromkeys(Role, GraphMode.FULL_DECODE_ONLY)
    chosen = choose_schedule(spec, modes, measurements)
    found = {n: span.k for span in ranges(chosen.spans) for n in range(span.first, span.last + 1)}
    # From 1,024 to 1,536 tokens eager passes grow as the tokens do, so that K=5 gains nothing there.
    assert found[256] < 5
    assert found[230] < 5
    assert found[1] >= 2
