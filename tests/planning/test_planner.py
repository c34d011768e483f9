"""Planning: the decisions that single settings lead to."""

from types import SimpleNamespace

import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.analysis.explain import explain
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.errors import PlanningError
from capture_planner.modes import Chain, GraphMode, GraphSupport, Reason, Refresh, Role
from capture_planner.planning import planner
from capture_planner.planning.planner import plan
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import digest, replace
from capture_planner.records.backend import Support
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import DraftModel, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.profile import CostCurve, Profile
from capture_planner.records.spec import Budget, GroupSpec, Limits, Lora, Parallel, Policy, Roles, RoleSpec, Sizes, Spec
from capture_planner.testing import FakeBackend, deployments

GPU = Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=80 << 30, multiprocessors=132)
MACHINE = Environment(name="h100", device=GPU)
MODEL = Model(name="m", num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=4096)
EAGLE = Speculative(method=Method.EAGLE, num_tokens=3)
SPEC = Spec(model=MODEL, limits=Limits(max_num_reqs=16, max_num_tokens=512), backend="alpha")


def made(
    level=GraphSupport.ALWAYS, refresh=Refresh.IN_GRAPH, caps=(None, None), spec=SPEC, measurements=None, **changes
):
    """The plan of a changed spec on a backend of one level."""
    support = Support(level=level, reason="told", max_num_reqs=caps[0], max_graphs=caps[1])
    told = dict.fromkeys(Role, support)
    backend = FakeBackend(name="alpha", supports=told, refreshes=refresh, windowed=GraphSupport.UNIFORM_BATCH)
    registry = Registry([RegisteredBackend(backend=backend, distribution="d", version="1")])
    return plan(replace(spec, **changes), MACHINE, registry, measurements)


def rules(role):
    """The rules of a role's decisions."""
    return [decision.rule for decision in role.decisions]


def test_plan_has_the_digest_of_its_spec():
    """By its digest."""
    assert made().spec_digest == digest(SPEC)


def test_plan_rejects_unknown_backend():
    """At its place in the spec, with the names there are."""
    with pytest.raises(PlanningError, match="backend: no backend named 'alhpa' is installed; did you mean 'alpha'"):
        made(backend="alhpa")


def test_plan_that_no_command_could_read_is_refused_when_it_is_made():
    """Every plan of so many groups is read again, or is an error at the roles."""

    def split(layers):
        groups = tuple(GroupSpec(name=f"g{index}", layers=1) for index in range(layers))
        return made(model=replace(MODEL, num_layers=layers), roles=Roles(target=RoleSpec(groups=groups)))

    few = split(100)
    assert codec.loads(codec.dumps(few), Plan) == few
    with pytest.raises(PlanningError, match="roles: no command could read its plan: more than 16000 values"):
        split(900)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("method", [Method.EAGLE3, Method.DRAFT_MODEL])
def test_plan_of_the_most_drafts_is_read_again(method, parallel):
    """Its first draft pass has up to 511 tokens of each request."""
    speculative = Speculative(method=method, num_tokens=255, parallel_drafting=parallel)
    whole = made(speculative=speculative, limits=Limits(max_num_reqs=2, max_num_tokens=2048))
    longest = max(entry.query_len or 0 for role in whole.roles for entry in role.entries)
    assert longest == 256 + (254 if parallel else 0) + (method is Method.DRAFT_MODEL)
    assert codec.loads(codec.dumps(whole), Plan) == whole


@pytest.mark.parametrize(("refresh", "chain"), [(Refresh.IN_GRAPH, 2), (Refresh.HOST, None)])
def test_draft_chain_is_fused_where_the_backend_refreshes_in_graph(refresh, chain):
    """K - 1 steps fused, or one step replayed."""
    role = made(refresh=refresh, speculative=EAGLE).role(Role.DRAFT_DECODE)
    assert {entry.draft_steps for entry in role.entries} == {chain}
    assert "draft-chain" in rules(role)


@pytest.mark.parametrize("refresh", list(Refresh))
def test_chain_single_plans_single_draft_steps(refresh):
    """Whatever the backend could do, and the decision says who wanted it."""
    role = made(refresh=refresh, speculative=replace(EAGLE, chain=Chain.SINGLE)).role(Role.DRAFT_DECODE)
    assert {entry.draft_steps for entry in role.entries} == {None}
    (decision,) = [decision for decision in role.decisions if decision.rule == "draft-chain"]
    assert (decision.before, decision.after, decision.backend) == ("chain of 2", "single steps", None)
    assert "speculative.chain requests single steps" in decision.message


@pytest.mark.parametrize(
    ("chain", "phrase"),
    [(Chain.FUSED, "which holds all 2 draft steps"), (Chain.SINGLE, "which is replayed for each of 2 draft steps")],
)
def test_explanation_names_the_draft_chain(chain, phrase):
    """One graph that holds them, or one that is replayed; other roles have no word of it."""
    dispatcher = Dispatcher(made(speculative=replace(EAGLE, chain=chain)))
    for role, query_len in ((Role.DRAFT_DECODE, 1), (Role.DRAFT_PREFILL, 4)):
        batch = Batch(role=role, num_reqs=3, num_tokens=3 * query_len, query_len=query_len)
        assert (phrase in explain(dispatcher, batch).message) == (role is Role.DRAFT_DECODE)


@given(deployments(max_reqs=64))
def test_chain_affects_draft_decodes_only(deployment):
    """Single steps leave the other roles as they were, and serve each batch that a chain would.

    Where sizes or the schedule are measured, the chain's time takes part in all decisions.
    """
    speculative = deployment.spec.speculative
    assume(speculative is not None and not speculative.is_measured)
    assume(deployment.spec.sizes.policy is not Policy.MEASURED)
    spec = replace(deployment.spec, budget=Budget())
    try:
        fused, single = (
            plan(
                replace(spec, speculative=replace(speculative, chain=chain)),
                deployment.environment,
                deployment.registry,
                deployment.measurements,
            )
            for chain in Chain
        )
    except PlanningError:
        reject()
    assert all(entry.draft_steps is None for role in single.roles for entry in role.entries)
    for left, right in zip(fused.roles, single.roles, strict=True):
        assert left.mode is right.mode
        if left.role is not Role.DRAFT_DECODE:
            assert left == right


def test_single_draft_decode_is_not_a_chain():
    """K = 2 has one draft decode, K = 1 none."""
    two = made(speculative=replace(EAGLE, num_tokens=2)).role(Role.DRAFT_DECODE)
    one = made(speculative=replace(EAGLE, num_tokens=1)).role(Role.DRAFT_DECODE)
    assert {entry.draft_steps for entry in two.entries} == {None}
    assert one.entries == ()


def test_schedule_gives_chains_of_each_length():
    """K = 3 up to 8 requests, k = 2 above."""
    schedule = replace(EAGLE, schedule=((1, 8, 3), (9, 16, 2)))
    role = made(speculative=schedule).role(Role.DRAFT_DECODE)
    assert {entry.draft_steps for entry in role.entries} == {2, None}


def test_decodes_next_to_each_other_are_waived_together():
    """By their query length, and where the schedule changes it in between apart; draft decodes all have one token."""
    schedule = replace(EAGLE, schedule=((1, 4, 2), (5, 8, 3), (9, 16, 2)))
    found = made(mode=GraphMode.NONE, speculative=schedule)
    ranges = {
        role.role: [(w.query_len, w.first, w.last) for w in role.waivers if w.kind is Kind.DECODE]
        for role in found.roles
    }
    by_length = [(3, 1, 4), (3, 9, 16), (4, 5, 8)]
    assert ranges == {Role.TARGET: by_length, Role.DRAFT_PREFILL: by_length, Role.DRAFT_DECODE: [(1, 1, 16)]}


@given(st.lists(st.sets(st.integers(1, 9)), max_size=3))
def test_what_is_waived_begins_above_all_ladders_of_the_same_decodes(drawn):
    """A chain's own graphs and single steps may both serve it: the one that reaches furthest counts."""
    ladders = [
        SimpleNamespace(query_len=1, draft_steps=steps, sizes=tuple(sorted(sizes)), cut=None, price="")
        for sizes, steps in zip(drawn, (None, 2, None), strict=False)
    ]
    others = [SimpleNamespace(query_len=4, draft_steps=None, sizes=(99,))]
    others.append(SimpleNamespace(query_len=1, draft_steps=3, sizes=(99,)))
    family = SimpleNamespace(query_len=1, draft_steps=2)
    working = SimpleNamespace(ladders=[*others, *ladders], mixed_ladder=None)
    reach, reason, _ = planner._decode_reach(working, family)
    assert reach == max(set().union(*drawn), default=0)
    assert reason is (Reason.SIZES if ladders else Reason.MODE)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"limits": Limits(max_num_reqs=16, max_num_tokens=8)}, "tokens-limit-requests"),
        ({"parallel": Parallel(tensor=2, sequence=True)}, "sequence-parallel-alignment"),
        ({"parallel": Parallel(data=8)}, "data-parallel-largest"),
        ({"speculative": replace(EAGLE, schedule=((1, 4, 9),))}, "schedule-clamped"),
        ({"budget": Budget(max_graphs=5)}, "budget"),
    ],
)
def test_limits_of_the_deployment_are_decisions(changes, rule):
    """Each with its rule."""
    assert rule in rules(made(**changes).role(Role.TARGET))


def test_tiny_budget_waives_everything():
    """And says that the budget did it."""
    role = made(budget=Budget(seconds=0.1)).role(Role.TARGET)
    assert role.entries == ()
    assert {waiver.reason for waiver in role.waivers} == {Reason.BUDGET}


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.FULL_DECODE_ONLY])
def test_backend_cap_is_the_reason_of_its_waivers(mode):
    """Requests above it are waived."""
    role = made(caps=(5, None), mode=mode).role(Role.TARGET)
    assert max(entry.num_reqs for entry in role.entries) <= 5
    capped = {waiver.kind: waiver.first for waiver in role.waivers if waiver.reason is Reason.BACKEND_CAP}
    assert capped == {Kind.DECODE: 6} | ({Kind.MIXED: 6} if mode is GraphMode.FULL else {})


def test_backend_max_graphs_is_kept():
    """Piecewise graphs do not count."""
    role = made(caps=(None, 3)).role(Role.TARGET)
    assert sum(entry.mode is GraphMode.FULL for entry in role.entries) == 3
    assert "backend-max-graphs" in rules(role)


def test_mode_follows_the_weakest_group():
    """A sliding window that supports less lowers its role, and is named."""
    groups = (GroupSpec(name="full", layers=2), GroupSpec(name="sliding", layers=2, window=128))
    role = made(mode=GraphMode.FULL, roles=Roles(target=RoleSpec(groups=groups))).role(Role.TARGET)
    assert role.mode is GraphMode.FULL_AND_PIECEWISE
    assert role.decisions[0].group == "sliding"
    assert [group.layers for group in role.groups] == [2, 2]


def test_role_may_override_sizes():
    """The others keep the spec's."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=(3, 16), num_tokens=(7,))
    found = made(speculative=EAGLE, roles=Roles(draft_prefill=RoleSpec(sizes=sizes)))
    uniform = [e.num_reqs for e in found.role(Role.DRAFT_PREFILL).entries if e.query_len]
    assert sorted(uniform) == [3, 16]
    assert len(found.role(Role.TARGET).entries) > 3


def test_drafter_may_have_its_own_heads():
    """Its layers are those that its group has."""
    found = made(speculative=replace(EAGLE, model=DraftModel(num_layers=2, num_heads=4, num_kv_heads=2)))
    assert found.role(Role.DRAFT_DECODE).groups[0].layers == 2


def test_unreachable_lora_cases_get_no_graph():
    """One request has one adapter, though alignment pads it to four (law 4)."""
    role = made(
        limits=Limits(max_num_reqs=1, max_num_tokens=8),
        parallel=Parallel(tensor=2, sequence=True),
        lora=Lora(max_active=4, specialize=True),
    ).role(Role.TARGET)
    uniform = [entry for entry in role.entries if entry.query_len == 1]
    assert {entry.active_loras for entry in uniform} == {0, 1}


@given(deployments(max_reqs=64))
def test_budget_bounds_the_whole_plan(deployment):
    """All roles together, and every cap of a backend, whatever the policy."""
    try:
        found = deployment.plan()
    except PlanningError:
        reject()
    bound = found.allowed_graphs()
    assert bound is None or found.num_graphs <= bound[0]
    for role in found.roles:
        full = [entry for entry in role.entries if entry.mode is GraphMode.FULL]
        for group in role.groups:
            assert len(full) <= (group.support.max_graphs or len(full))
            widest = max((entry.num_reqs for entry in full), default=0)
            assert widest <= (group.support.max_num_reqs or widest)


def test_default_sizes_go_by_the_times_of_a_profile():
    """No second graph where the device takes the same time, and the decision names the profile."""
    plain = made()
    steps = (1, 64, 65, 256, 257, 4096)
    curves = [
        CostCurve(role=role, mode=mode, tokens=steps, milliseconds=(2.0, 2.0, 3.0, 3.0, 5.0, 5.5))
        for role in plain.planned
        for mode in (GraphMode.FULL, GraphMode.NONE)
    ]
    profile = Profile(
        source="a test",
        date="2026-11-22T13:00:00Z",
        device=plain.environment.device,
        model=plain.model,
        curves=tuple(curves),
    )
    timed = made(measurements=Measurements(profile=profile, source="by a profile of this test"))
    role = timed.role(Role.TARGET)
    sizes = {entry.num_reqs for entry in role.entries if entry.query_len is not None}
    assert timed.num_graphs < plain.num_graphs
    assert max(sizes) == max(entry.num_reqs for entry in plain.role(Role.TARGET).entries if entry.num_reqs)
    assert any("by a profile of this test" in decision.message for decision in role.decisions)
    assert timed.forecast is None
