"""Exports through the emulated engines themselves."""

import pytest

from capture_planner.engines import engines, find_engine
from capture_planner.engines.export import Effect, prove
from capture_planner.modes import Role
from capture_planner.records.batch import Kind
from capture_planner.records.model import Method, Speculative
from capture_planner.records.spec import Policy, Sizes
from support.export_plans import SCHEDULES, made

LOST = (Effect.EAGER, Effect.WEAKER)


def proved(engine, planned):
    """Return the export with its proof, where the engine is emulated."""
    found = find_engine(engine)
    return prove(found.export(planned), planned, found.emulate)


def lost(proof, role, *effects):
    """Return how many decodes of a role have one of these effects."""
    return sum(proof.count(effect, role, Kind.DECODE) for effect in effects)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", [Policy.VLLM, Policy.DEFAULT])
def test_vllm_export_of_a_published_plan_misses_no_batch(schedule, policy):
    """Of 256 batch sizes none loses its graph, of the target nor of the drafter."""
    export = proved("vllm", made(schedule, sizes=Sizes(policy=policy)))
    assert [lost(export.proof, role, *LOST) for role in Role] == [0, 0, 0]
    assert export.proof.batches > 8 * 256


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensorrt_llm_export_of_a_published_plan_keeps_target_decodes(schedule):
    """Every target decode is answered as planned; drafts run inside the target's graphs."""
    proof = proved("tensorrt-llm", made(schedule)).proof
    assert [lost(proof, Role.TARGET, effect) for effect in Effect] == [0] * len(Effect)
    assert proof.unrun == (Role.DRAFT_PREFILL, Role.DRAFT_DECODE)


@pytest.mark.parametrize("method", [None, *(method for method in Method if method is not Method.DRAFT_MODEL)])
def test_sglang_export_of_a_plan_without_schedule_is_exact(method):
    """Without a schedule SGLang has all graphs of the plan, and answers every batch alike.

    The first pass of SGLang's own draft model has 1 + K rows for each request, and a plan's 2 + K, as vLLM's has.
    """
    options = {} if method is None else {"speculative": Speculative(method=method, num_tokens=2)}
    assert proved("sglang", made(**options)).proof.exact


@pytest.mark.parametrize("engine", sorted(engines()))
@pytest.mark.parametrize("method", [None, *Method])
def test_exports_of_a_plan_without_schedule_keep_full_decodes(engine, method):
    """Every decode of the target, and of the drafter where it runs, keeps its full graph."""
    options = {} if method is None else {"speculative": Speculative(method=method, num_tokens=3)}
    proof = proved(engine, made(**options)).proof
    own_rows = engine == "sglang" and method is Method.DRAFT_MODEL  # 1 + K rows where a plan has 2 + K
    roles = [role for role in Role if not (own_rows and role is Role.DRAFT_PREFILL)]
    assert [lost(proof, role, *LOST) for role in roles] == [0] * len(roles)


@pytest.mark.parametrize("engine", sorted(engines()))
def test_emulated_engines_have_an_export(engine):
    """The names are the same on both sides."""
    assert find_engine(engine).name == engine
