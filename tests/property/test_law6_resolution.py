"""Law 6, resolution: the ladder of vLLM 0.33, restated as a table; a drafter never lowers its target."""

import itertools
from pathlib import Path

import attrs
import pytest
from hypothesis import assume, example, given, reject
from hypothesis import strategies as st

from capture_planner.analysis.lint import Severity, lint
from capture_planner.codec import load_environment, load_spec
from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.planning.resolve import (
    GroupSupport,
    ResolvedMode,
    resolve,
    resolve_draft_decode,
    resolve_draft_prefill,
)
from capture_planner.plugins.registry import load_backends
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.spec import Budget, KindGraphs, Piecewise, Policy, Sizes
from capture_planner.testing import deployments, plans

PLANS = Path(__file__).parents[2] / "plans"

N, P, D, S, F = (
    GraphMode.NONE,
    GraphMode.PIECEWISE,
    GraphMode.FULL_DECODE_ONLY,
    GraphMode.FULL_AND_PIECEWISE,
    GraphMode.FULL,
)
# (requested, level): the result by (long queries, split) = (no, yes), (no, no), (yes, yes), (yes, no),
# before pieces that cannot be captured are dropped. "!" is an error for a target.
TABLE = {
    (N, 0): "NNNN",
    (N, 1): "NNNN",
    (N, 2): "NNNN",
    (N, 3): "NNNN",
    (P, 0): "PPPP",
    (P, 1): "PPPP",
    (P, 2): "PPPP",
    (P, 3): "PPPP",
    (D, 0): "PNPN",
    (D, 1): "DDPN",
    (D, 2): "DDDD",
    (D, 3): "DDDD",
    (S, 0): "PNPN",
    (S, 1): "SSPN",
    (S, 2): "SSSS",
    (S, 3): "SSSS",
    (F, 0): "!!!!",
    (F, 1): "SDPN",
    (F, 2): "SDSD",
    (F, 3): "FFFF",
}
LETTERS = {"N": N, "P": P, "D": D, "S": S, "F": F}
DROPPED = {P: N, S: D}
CASES = list(itertools.product(GraphMode, GraphSupport))
BOOLEANS = list(itertools.product((False, True), repeat=4))
"""Long queries, attention that splits a forward, pieces that can be captured, a drafter. One test takes them all."""


def expected(requested, level, long, split, capturable, drafter):
    """Look the result up; None where there is an error."""
    column = 2 * long + (not split)
    letter = TABLE[requested, int(level)][column]
    if letter == "!":
        if not drafter:
            return None
        letter = "P" if split else "N"
    mode = LETTERS[letter]
    return mode if capturable else DROPPED.get(mode, mode)


def group(level, name="all", backend="alpha"):
    """One attention group of a given support."""
    return GroupSupport(group=name, backend=backend, support=Support(level=level, reason="told"))


def result(requested, level, long, split, capturable, drafter=False):
    """Resolve; None where there is an error."""
    try:
        return resolve(
            ResolvedMode(role=Role.DRAFT_PREFILL if drafter else Role.TARGET, mode=requested),
            [group(level)],
            max_query_len=4 if long else 1,
            piecewise=Piecewise(split_attention=split, capturable=capturable),
        )
    except PlanningError:
        return None


@pytest.mark.parametrize(("requested", "level"), CASES)
def test_resolution_agrees_with_the_table(requested, level):
    """Law 6: every mode, level, query length, split and capturability, for targets and drafters."""
    for case in BOOLEANS:
        found = result(requested, level, *case)
        assert (case, found and found.mode) == (case, expected(requested, level, *case))


@pytest.mark.parametrize(("requested", "level"), CASES)
def test_resolution_is_idempotent_and_never_above_the_request(requested, level):
    """Law 6: a resolved mode resolves to itself without a decision, and is at most what was wanted."""
    for case in BOOLEANS:
        found = result(requested, level, *case)
        if found is not None:
            assert found.mode <= requested, case
            again = result(found.mode, level, *case)
            assert (again.mode, again.decisions) == (found.mode, ()), case


@pytest.mark.parametrize(("requested", "level"), CASES)
def test_each_downgrade_is_a_decision(requested, level):
    """Law 6: the decisions lead, without a gap, from the request to the result."""
    for case in BOOLEANS:
        found = result(requested, level, *case)
        if found is not None:
            chain = [requested.value, *(d.after for d in found.decisions)]
            assert [d.before for d in found.decisions] == chain[:-1], case
            assert chain[-1] == found.mode.value, case
            assert len(set(chain)) == len(chain), case


LEVELS = st.lists(st.sampled_from(GraphSupport), min_size=1, max_size=4)


@given(LEVELS, st.sampled_from([m for m in GraphMode if m is not F]), st.booleans())
def test_the_weakest_group_decides_and_is_named(levels, requested, long):
    """Law 6: a role's support is the weakest of its groups; a decision names the group it blames."""
    groups = [group(level, f"g{i}", f"b{i}") for i, level in enumerate(levels)]
    start = ResolvedMode(role=Role.TARGET, mode=requested)
    found = resolve(start, groups, max_query_len=4 if long else 1, piecewise=Piecewise())
    assert found.mode is expected(requested, min(levels), long, True, True, False)
    blamed = levels.index(min(levels))
    assert {(d.group, d.backend) for d in found.decisions} <= {(f"g{blamed}", f"b{blamed}")}


@pytest.mark.parametrize(("target", "level"), CASES)
def test_a_draft_decode_is_full_decode_only_or_none(target, level):
    """Law 6: FULL_DECODE_ONLY where target and backend can and the spec lets it, else NONE."""
    for wanted in (None, *GraphMode):
        found = resolve_draft_decode(target, wanted, [group(level)])
        start = target if wanted is None or wanted > target else wanted
        able = start in (D, S, F) and level > 0
        assert found.mode is (D if able else N), wanted
        assert all(d.role is Role.DRAFT_DECODE for d in found.decisions)
        chain = [target.value, *(d.after for d in found.decisions)]
        assert [d.before for d in found.decisions] == chain[:-1], wanted
        assert chain[-1] == found.mode.value, wanted
        assert all(d.before != d.after for d in found.decisions if d.rule != "role-asks-for-more"), wanted


@pytest.mark.parametrize(("target", "level"), CASES)
def test_a_draft_prefill_starts_from_the_targets_mode(target, level):
    """Law 6: from the target's resolved mode, or less where the spec asks, down its own ladder."""
    for wanted, split in itertools.product((None, *GraphMode), (True, False)):
        pieces = Piecewise(split_attention=split)
        found = resolve_draft_prefill(target, wanted, [group(level)], max_query_len=4, piecewise=pieces)
        start = target if wanted is None or wanted > target else wanted
        assert found.mode is expected(start, level, True, split, True, True), (wanted, split)
        assert found.mode <= target


@given(deployments(max_reqs=64), st.data())
def test_a_drafters_backends_never_change_the_target(deployment, data):
    """Law 6, metamorphic: whatever the backends say of drafters, the target's mode is the same."""

    def told(item):
        backend = item.backend
        supports = dict(backend.supports)
        for role in (Role.DRAFT_PREFILL, Role.DRAFT_DECODE):
            level = data.draw(st.sampled_from(GraphSupport))
            supports[role] = Support(level=level, reason="changed")
        return attrs.evolve(item, backend=attrs.evolve(backend, supports=supports))

    unbounded = attrs.evolve(deployment.spec.budget, max_graphs=None, memory=None, seconds=None, graphs=KindGraphs())
    one = attrs.evolve(deployment, spec=attrs.evolve(deployment.spec, budget=unbounded))
    other = attrs.evolve(one, registry=type(one.registry)(told(item) for item in one.registry.values()))
    assert _target(one) == _target(other)


def _target(deployment):
    """Return the target's plan; the mode alone where a measured choice prices the drafter's passes with the target's.

    A target without any graph runs eager whatever its mode is called: it is NONE where the drafter has no graph either.
    """
    try:
        role = deployment.plan().role(Role.TARGET)
    except PlanningError as error:
        return error.problems
    if not role.entries:
        return None
    spec = deployment.spec
    sizes = spec.roles.target.sizes or spec.sizes
    by_schedule = spec.speculative is not None and spec.speculative.is_measured
    return role.mode if by_schedule or sizes.policy is Policy.MEASURED else role


@given(deployments(max_reqs=64))
def test_a_drafter_that_no_graph_can_hold_has_none_and_says_why(deployment):
    """Law 6: its roles resolve to NONE with its reason; the target's mode is as it was."""
    spec = deployment.spec
    assume(spec.speculative is not None and not spec.speculative.is_measured)
    eager = attrs.evolve(spec.speculative, model=attrs.evolve(spec.speculative.model, eager_because="it samples"))
    other = attrs.evolve(deployment, spec=attrs.evolve(spec, speculative=eager))
    try:
        plan, before = other.plan(), deployment.plan()
    except PlanningError:
        reject()
    for role in plan.roles[1:]:
        assert (role.mode, role.entries) == (N, ())
        reasons = [decision for decision in role.decisions if decision.rule == "drafter-without-graphs"]
        assert [decision.message for decision in reasons] == ["the drafter has no graphs: it samples"] * (
            role.requested is not N
        )
    assert plan.roles[0].mode is before.roles[0].mode or not (plan.num_graphs and before.num_graphs)


def without_graphs(seconds):
    """A plan with one draft token, within so many seconds of capture."""
    spec = load_spec(PLANS / "specs" / "tiny-reference-cpu.yaml")
    speculative = replace(spec.speculative, num_tokens=1, schedule=())
    spec = replace(spec, speculative=speculative, budget=Budget(seconds=seconds))
    return make_plan(spec, load_environment(PLANS / "environments" / "cpu.yaml"), load_backends())


@given(plans(max_reqs=64))
def test_a_role_without_a_size_resolves_to_none_with_a_decision(plan):
    """Law 6: where nothing is captured no mode says otherwise, as of a draft decode that never runs."""
    for role in plan.roles:
        rules = {decision.rule for decision in role.decisions}
        assert ("nothing-to-capture" in rules) <= (role.mode is N)
        if not role.entries and (role.role.is_drafter or not plan.num_graphs):
            assert role.mode is N


@given(plans(max_reqs=64))
@example(without_graphs(0.1))
@example(without_graphs(1e9))
def test_lint_finds_no_error_in_a_plan_that_was_just_made(plan):
    """Law 6: whatever the budget leaves, and however short the drafts are, ``check`` and ``run`` accept it."""
    assert [str(finding) for finding in lint(plan) if finding.severity is Severity.ERROR] == []


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(("mode", "sizes"), [(P, {"num_reqs": (2,)}), (D, {"num_tokens": (8,)})])
def test_a_list_that_leaves_no_size_is_the_mode_none(mode, sizes, drafted):
    """VLLM's ``needs_capture``: sizes of decodes alone leave PIECEWISE nothing to capture, and the decision says so."""
    spec = load_spec(PLANS / "specs" / "tiny-reference-cpu.yaml")
    speculative = spec.speculative if drafted else None
    spec = replace(spec, mode=mode, sizes=Sizes(policy=Policy.EXPLICIT, **sizes), speculative=speculative)
    plan = make_plan(spec, load_environment(PLANS / "environments" / "cpu.yaml"), load_backends())
    assert plan.num_graphs == 0
    for role in plan.roles:
        assert role.mode is N
        assert role.requested is N or role.decisions[-1].rule in ("nothing-to-capture", "draft-decode-never-piecewise")
    assert (plan.roles[0].decisions[-1].rule, plan.roles[0].decisions[-1].after) == ("nothing-to-capture", "NONE")
    assert not [finding for finding in lint(plan) if finding.rule.severity is Severity.ERROR]


@given(deployments(max_reqs=64))
def test_planned_modes_obey_the_rules_of_their_role(deployment):
    """Law 6: in a whole plan, no role is above its request, no drafter above its target."""
    try:
        plan = deployment.plan()
    except PlanningError:
        assert deployment.spec.roles.target.mode is F or deployment.spec.mode is F
        reject()
    target = plan.role(Role.TARGET).mode
    for role in plan.roles:
        assert role.mode <= role.requested
        if role.role.is_drafter:
            assert role.requested is target or not plan.num_graphs
        if role.role is Role.DRAFT_DECODE:
            assert role.mode in (D, N)
            assert role.mode is N or target in (D, S, F)
