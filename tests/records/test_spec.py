"""Specs: what is refused where, and what a schedule means."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.errors import InvalidValue
from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.model import DraftModel, Method, Model, ScheduleSource, Speculative
from capture_planner.records.spec import (
    Budget,
    CapturePolicy,
    CaptureTiming,
    GroupSpec,
    Limits,
    Lora,
    Parallel,
    Policy,
    Roles,
    RoleSpec,
    Sizes,
    Spec,
)
from capture_planner.testing import specs

MODEL = Model(name="m", num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=1024)
SPEC = Spec(model=MODEL, limits=Limits(max_num_reqs=8, max_num_tokens=64), backend="alpha")


def eagle(num_tokens=3, schedule=()):
    """An EAGLE drafter."""
    return Speculative(method=Method.EAGLE, num_tokens=num_tokens, schedule=schedule)


def groups(*layers):
    """A target of groups with so many layers."""
    found = tuple(GroupSpec(name=f"g{i}", layers=n) for i, n in enumerate(layers))
    return Roles(target=RoleSpec(groups=found))


@pytest.mark.parametrize(
    ("make", "path", "message"),
    [
        (lambda: replace(MODEL, num_heads=3), "num_heads", "3 query heads do not divide into 2 KV heads"),
        (lambda: eagle(3, ((4, 2, 1),)), "schedule[0]", "the range 4 to 2 is empty"),
        (lambda: eagle(3, ((2, 4, 1),)), "schedule[0]", "the first range must start at 1, got 2"),
        (lambda: eagle(3, ((1, 4, 1), (4, 6, 1))), "schedule[1]", "starts at 4, but the range before it ends at 4"),
        (lambda: Sizes(graphs=3), "graphs", "the policy default takes no graphs"),
        (lambda: Sizes(policy=Policy.MINIMAX), "graphs", "the policy minimax needs a number of graphs"),
        (lambda: Sizes(policy=Policy.EXPLICIT), "", "the policy explicit needs sizes"),
        (lambda: Sizes(policy=Policy.VLLM, num_reqs=(1,)), "num_reqs", "the policy vllm takes no num_reqs"),
        (lambda: Sizes(padding=True), "padding", "the policy default takes no padding"),
        (
            lambda: RoleSpec(groups=(GroupSpec(name="g", layers=1),) * 2),
            "groups[1].name",
            "a second group is named 'g'",
        ),
        (
            lambda: replace(SPEC, parallel=Parallel(tensor=3)),
            "parallel.tensor",
            "8 query heads do not divide over 3 ranks",
        ),
        (
            lambda: replace(SPEC, roles=Roles(draft_decode=RoleSpec(backend="beta"))),
            "roles.draft_decode",
            "the spec has no speculative decoding, so this role never runs",
        ),
        (lambda: CaptureTiming(policy=CapturePolicy.LAZY), "memory", "lazy capture needs a budget"),
        (lambda: CaptureTiming(memory=1), "memory", "the policy start takes no memory"),
        (lambda: replace(SPEC, roles=groups(1, 2)), "roles.target.groups", "the groups have 3 layers, the model 4"),
    ],
)
def test_spec_rejects_contradictions_with_path(make, path, message):
    """Each rule that spans fields names the field to look at."""
    with pytest.raises(InvalidValue) as caught:
        make()
    problem = caught.value.problems[0]
    assert str(problem).startswith(f"{path}: {message}" if path else message)


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (lambda: eagle(3, ((1, 8, 1), (16, 9, 1), (9, 32, 1))), ["the range 16 to 9 is empty"]),
        (
            lambda: eagle(3, ((1, 16, 1), (20, 4, 1), (5, 9, 1))),
            ["the range 20 to 4 is empty", "starts at 5, but the range before it ends at 16"],
        ),
        (lambda: eagle(3, ((1, 1, 1),) * 65), ["65 ranges, at most 64 are allowed"]),
        (
            lambda: Speculative(method=Method.EAGLE, num_tokens=2, varying_decodes=(Role.DRAFT_DECODE,)),
            ["draft decodes have one token of each request"],
        ),
    ],
)
def test_mistake_is_one_problem_and_hides_no_other(make, messages):
    """Fixing what is reported leaves a valid record, or the next mistake that was reported too."""
    with pytest.raises(InvalidValue) as caught:
        make()
    assert [problem.message for problem in caught.value.problems] == messages


@given(*[st.none() | st.sampled_from((1, 2, 3, 4, 5, 8, 9))] * 2, st.sampled_from((1, 2, 4, 8)))
def test_drafter_heads_are_validated_as_the_targets_are(heads, kv_heads, tensor):
    """A drafter is refused exactly where a target with its heads is, at its own fields; also in a plan."""
    target = Model(name="m", num_layers=4, num_heads=8, num_kv_heads=8, head_dim=64, max_model_len=1024)
    drafter = Speculative(method=Method.EAGLE, num_tokens=1, model=DraftModel(num_heads=heads, num_kv_heads=kv_heads))

    def problems(make):
        try:
            make()
        except InvalidValue as error:
            return error.problems
        return ()

    own = {"num_heads": heads or 8, "num_kv_heads": kv_heads or 8}
    parallel = Parallel(tensor=tensor)
    alone = problems(lambda: replace(SPEC, model=replace(target, **own), parallel=parallel))
    found = problems(lambda: replace(SPEC, model=target, speculative=drafter, parallel=parallel))
    assert bool(found) == bool(alone)
    field = "num_kv_heads" if heads is None else "num_heads"
    assert {problem.path for problem in found} <= {("speculative", "model", field)}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((Role.DRAFT_PREFILL,), "the draft prefill follows the target's batch, whose decodes do not vary; add target"),
        ((Role.TARGET, Role.DRAFT_DECODE), "draft decodes have one token of each request; leave draft_decode out"),
        ((Role.TARGET, Role.TARGET), "a role is listed twice; list it once"),
    ],
)
def test_roles_of_varying_decodes_are_the_target_and_its_draft_prefill(roles, message):
    """In any order; drafts, schedules and sizes that are measured have no times of them."""
    with pytest.raises(InvalidValue, match=re.escape(f"varying_decodes: {message}")):
        Speculative(method=Method.EAGLE, num_tokens=2, varying_decodes=roles)
    given = Speculative(method=Method.EAGLE, num_tokens=2, varying_decodes=(Role.DRAFT_PREFILL, Role.TARGET))
    assert given.varying_decodes == (Role.TARGET, Role.DRAFT_PREFILL)
    with pytest.raises(InvalidValue, match="has no times of varying decodes to choose a schedule by"):
        replace(given, schedule=ScheduleSource.MEASURED)


def test_spec_reports_all_problems_at_once():
    """Heads, KV heads and groups are wrong; three problems."""
    with pytest.raises(InvalidValue) as caught:
        replace(SPEC, parallel=Parallel(tensor=3), roles=groups(1))
    assert len(caught.value.problems) == 3


def test_groups_may_split_all_layers():
    """Layers add up."""
    assert replace(SPEC, roles=groups(1, 3)).roles.of(Role.TARGET).groups[1].layers == 3


SCHEDULED = specs().filter(lambda spec: spec.speculative is not None)


@given(SCHEDULED)
def test_schedule_tiers_are_dense_clamped_and_merged(spec):
    """Each batch size is in one tier, with the k of the last range that starts at or before it."""
    most, speculative = spec.limits.max_num_reqs, spec.speculative
    tiers = speculative.tiers(most)
    for num_reqs in range(1, most + 1):
        inside = [k for first, last, k in tiers if first <= num_reqs <= last]
        started = [k for first, _, k in speculative.schedule if first <= num_reqs]
        k = min((started or [speculative.num_tokens])[-1], speculative.num_tokens)
        assert inside == [k] == [speculative.draft_tokens(num_reqs)]
    assert all(one[2] != other[2] for one, other in itertools.pairwise(tiers))


@given(st.integers(1, 300), st.booleans())
def test_lora_cases_match_vllm(most, specialize):
    """0, the powers of two up to max_active where specialised, and one more than max_active."""
    powers = {2**i for i in range(20) if 2**i <= most} if specialize else set()
    assert Lora(max_active=most, specialize=specialize).cases() == tuple(sorted({0, most + 1} | powers))


@pytest.mark.parametrize(
    ("budget", "graphs", "rule"),
    [
        (Budget(max_graphs=9), 9, "max_graphs 9"),
        (Budget(memory=100 << 20), 4, "memory"),
        (Budget(memory=5, memory_per_graph=0), 5, "memory"),
        (Budget(seconds=1.0, seconds_per_graph=0.1), 10, "seconds 1"),
        (Budget(seconds=0.1), 0, "seconds 0.1"),
        (Budget(max_graphs=9, memory=100 << 20, seconds=100), 4, "memory"),
    ],
)
def test_budget_uses_its_tightest_bound(budget, graphs, rule):
    """And it is named."""
    allowed = budget.allowed_graphs()
    assert allowed[0] == graphs
    assert allowed[1].startswith(rule)


def test_empty_budget_has_no_bound():
    """None, not a large number."""
    assert Budget().allowed_graphs() is None


@given(st.floats(1e-300, 1e12), st.floats(1e-300, 1e12))
def test_budget_in_seconds_is_a_number_of_graphs(seconds, each):
    """No two legal numbers overflow: the quotient, rounded down, and at most a billion."""
    graphs, _ = Budget(seconds=seconds, seconds_per_graph=each).allowed_graphs()
    assert min(seconds / each, 1e9) - 1 < graphs <= min(seconds / each, 1e9) + 1e-6


def test_spec_without_speculation_runs_the_target_only():
    """With it, all three roles run."""
    assert SPEC.active_roles == (Role.TARGET,)
    assert replace(SPEC, speculative=eagle()).active_roles == tuple(Role)
