"""From a plan to what one of vLLM's graph managers captures and tries, by what vLLM has decided about it."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry
from capture_planner.records.spec import Lora
from capture_planner.testing import deployments
from capture_planner_vllm.inside.agreement import roles_without_graphs
from capture_planner_vllm.inside.apply import ManagerFacts, role_table

PLAN = codec.load_plan(Path(__file__).parents[2] / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml")


def facts(**changes):
    """A target of the plan's own limits."""
    limits = PLAN.limits
    common = {"role": Role.TARGET, "mode": PLAN.role(Role.TARGET).mode, "num_speculative_tokens": 3}
    return ManagerFacts(
        **{"max_num_reqs": limits.max_num_reqs, "max_num_tokens": limits.max_num_tokens, **common, **changes}
    )


def test_adaptive_verification_has_decodes_of_any_length():
    """VLLM's varlen graphs: the requests are the most that so many tokens can be of."""
    table = role_table(PLAN, facts(varlen_query_len=4))
    decodes = [entry for entry in table.entries if entry.query_len is not None]
    assert {entry.query_len for entry in decodes} == {4}
    assert all(entry.num_reqs == min(entry.num_tokens, PLAN.limits.max_num_reqs) for entry in decodes)
    assert {entry.num_tokens for entry in decodes} == {
        entry.num_tokens for entry in PLAN.role(Role.TARGET).entries if entry.query_len is not None
    }


def test_bounded_mixed_batches_leave_larger_graphs_out():
    """Models with recoverSSM have a workspace for decodes only."""
    table = role_table(PLAN, facts(widest_mixed=64))
    mixed = [entry.num_tokens for entry in table.entries if entry.query_len is None]
    assert max(mixed) <= 64
    assert [decision.rule for decision in table.decisions] == ["engine-recurrent-state"]


@pytest.mark.parametrize("role", [Role.DRAFT_PREFILL, Role.DRAFT_DECODE])
def test_drafters_capture_nothing_where_the_target_does_not(role):
    """VLLM's model runner asks the target alone whether there is something to capture."""
    bare = replace(PLAN.role(Role.TARGET), mode=GraphMode.NONE, entries=(), waivers=())
    plan = replace(PLAN, roles=(bare, *(each for each in PLAN.roles if each.role is not Role.TARGET)))
    planned = plan.role(role)
    table = role_table(plan, facts(role=role, mode=planned.mode))
    assert planned.entries
    assert not table.entries
    assert not table.candidates
    assert [decision.rule for decision in table.decisions] == ["engine-bare-target"]
    assert role_table(PLAN, facts(role=role, mode=planned.mode)).entries


def test_full_draft_prefills_need_the_shape_of_the_target():
    """They run on its attention metadata; piecewise ones only need room, as attention is outside."""
    full = Entry(mode=GraphMode.FULL, num_tokens=16, num_reqs=4, query_len=4)
    piecewise = Entry(mode=GraphMode.PIECEWISE, num_tokens=32)
    other = attrs.evolve(full, num_tokens=24, num_reqs=6)
    roles = (
        replace(PLAN.role(Role.TARGET), entries=(full,)),
        replace(PLAN.role(Role.DRAFT_PREFILL), entries=(full, other, piecewise)),
    )
    table = role_table(replace(PLAN, roles=roles), facts(role=Role.DRAFT_PREFILL))
    assert table.entries == (piecewise, full)
    assert table.candidates[16, 0] == (full, piecewise)
    assert {table.candidates[tokens, 0] for tokens in (*range(1, 16), *range(17, 33))} == {(piecewise,)}
    (decision,) = table.decisions
    assert (decision.rule, decision.before) == ("engine-target-shape", "24")
    assert decision.message.startswith("1 of 3 graphs is not captured: it runs on the target's attention metadata")


def test_full_draft_prefills_need_the_target_s_graph_for_every_adapter_case():
    """Where the target runs piecewise with adapters, its metadata has no padded requests."""
    full = Entry(mode=GraphMode.FULL, num_tokens=16, num_reqs=4, query_len=4)
    cases = (attrs.evolve(full, active_loras=2), Entry(mode=GraphMode.PIECEWISE, num_tokens=16, active_loras=3))
    drafter = replace(PLAN.role(Role.DRAFT_PREFILL), entries=(full,))
    for extra, captured in ((cases[:1], 1), (cases, 0)):
        target = replace(PLAN.role(Role.TARGET), entries=(full, *extra))
        table = role_table(replace(PLAN, roles=(target, drafter)), facts(role=Role.DRAFT_PREFILL))
        assert len(table.entries) == captured


def test_chains_of_another_length_are_left_out_without_a_schedule():
    """VLLM drops a schedule with data parallelism, and runs chains of K - 1 alone."""
    chain = Entry(mode=GraphMode.FULL, num_tokens=4, num_reqs=4, query_len=1)
    entries = tuple(attrs.evolve(chain, draft_steps=steps) for steps in (2, 1, None))
    role = replace(PLAN.role(Role.DRAFT_DECODE), entries=entries)
    plan = replace(PLAN, roles=(*PLAN.roles[:2], role))
    table = role_table(plan, facts(role=Role.DRAFT_DECODE, mode=GraphMode.FULL_DECODE_ONLY))
    assert sorted(entry.draft_steps or 0 for entry in table.entries) == [0, 2]
    assert [decision.rule for decision in table.decisions] == ["engine-draft-length"]


def test_graph_of_more_adapters_is_reported_where_the_plan_uses_it():
    """VLLM takes graphs of the batch's own case only."""
    graph = Entry(mode=GraphMode.PIECEWISE, num_tokens=8, active_loras=2)
    entries = (graph, attrs.evolve(graph, num_tokens=16, active_loras=1))
    plan = replace(PLAN, roles=(replace(PLAN.role(Role.TARGET), entries=entries),))
    table = role_table(plan, facts(lora_cases=(0, 1, 2)))
    assert table.lora_dispatch == {1: 1, 2: 2}
    (decision,) = table.decisions
    assert decision.rule == "engine-adapter-case"
    assert decision.message.startswith("at 8 numbers of tokens")


@pytest.mark.parametrize(
    ("method", "several", "roles"),
    [
        ("draft_model", False, [Role.DRAFT_PREFILL, Role.DRAFT_DECODE]),
        ("mtp", True, [Role.DRAFT_DECODE]),
        ("mtp", False, []),
        ("eagle3", False, []),
    ],
)
def test_planned_role_without_a_manager_is_a_decision(method, several, roles):
    """An independent draft model has no graphs, MTP of several modules those of the draft prefill only."""
    config = SimpleNamespace(method=method, use_multi_module_mtp=lambda: several)
    found = [*roles_without_graphs(PLAN, SimpleNamespace(speculative_config=config))]
    assert [decision.role for decision in found] == roles
    assert not [*roles_without_graphs(PLAN, SimpleNamespace(speculative_config=None))]


def answer(table, tokens, num_reqs, loras, query_len):
    """The graph that vLLM's dispatch takes, by a scan of the candidates."""
    case = table.lora_dispatch.get(loras, loras)
    for entry in table.candidates.get((tokens, case), ()):
        if entry.query_len in (None, query_len) and (entry.num_reqs is None or entry.num_reqs >= num_reqs):
            return entry
    return None


@st.composite
def plans_with_adapters(draw):
    """Plans with graphs for several numbers of adapters."""
    inputs = draw(deployments(max_reqs=12, max_tokens=48, varying=False))
    lora = Lora(max_active=draw(st.integers(1, 4)), specialize=True)
    try:
        return attrs.evolve(inputs, spec=replace(inputs.spec, lora=lora)).plan()
    except PlanningError:
        reject()


@given(plans_with_adapters())
def test_ranks_pad_alike_whatever_they_run(plan):
    """They agree on tokens and query length; requests and adapters are a rank's own, and an idle one has the most."""
    role, loras = plan.role(Role.TARGET), plan.lora.max_active + 1
    decided = ManagerFacts(
        role=role.role,
        mode=role.mode,
        max_num_reqs=plan.limits.max_num_reqs,
        max_num_tokens=plan.limits.max_num_tokens,
        lora_cases=tuple(sorted({0, loras, *(entry.active_loras for entry in role.entries)})),
        num_speculative_tokens=0 if plan.speculative is None else plan.speculative.num_tokens,
        ranks=2,
    )
    table = role_table(plan, decided)
    cases = {case for _, case in table.candidates}
    query_lens = {None, *(entry.query_len for entry in table.entries)}
    for tokens, query_len in itertools.product(range(1, plan.limits.max_num_tokens + 1), query_lens):
        found = {
            graph and (graph.mode, graph.num_tokens)
            for num_reqs in range(1, min(tokens // (query_len or 1), plan.limits.max_num_reqs) + 1)
            for count in range(loras + 1)
            if table.lora_dispatch.get(count, count) in cases
            for graph in [answer(table, tokens, num_reqs, count, query_len)]
        }
        assert len(found) <= 1


def test_adapters_beyond_the_cases_run_eager():
    """Clamping them to the largest case, as vLLM does with its own cases, would replay a graph for fewer."""
    entries = (
        Entry(mode=GraphMode.PIECEWISE, num_tokens=8),
        Entry(mode=GraphMode.PIECEWISE, num_tokens=8, active_loras=2),
    )
    plan = replace(PLAN, roles=(replace(PLAN.role(Role.TARGET), entries=entries),))
    table = role_table(plan, facts(lora_cases=(0, 2, 5)))
    assert table.lora_dispatch == {1: 2, 2: 2, 3: 3, 4: 4, 5: 5}
    assert {case for _, case in table.candidates} == {0, 2}
