"""Law 12, applied is planned: an engine under a plan captures its entries and answers as our dispatcher.

Against a stand-in for vLLM's managers; ``tox -e oracle`` asks the wheel's own.
"""

from unittest import mock

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import decode_families, is_admissible
from capture_planner.testing import batches
from capture_planner_vllm.inside import hooks
from engines.generators.vllm_plans import next_fit, rank_answers, runnable, runnable_by_ranks, vllm_plans
from support import reference
from support.vllm_module import MANAGERS, CUDAGraphMode, capture, config_for, manager_for, vllm_modules


def entry_row(entry, chained):
    """What stands for an entry in vLLM, with K of a chain where the schedule has several."""
    drafts = entry.draft_steps + 1 if chained and entry.draft_steps is not None else None
    return entry.mode.name, entry.num_tokens, entry.num_reqs, entry.query_len, entry.active_loras, drafts


def descriptor_row(desc):
    """The same of vLLM's descriptor; None where the batch runs eager."""
    if desc.cg_mode is CUDAGraphMode.NONE:
        return None
    drafts = getattr(desc, "num_speculative_tokens", None)
    return desc.cg_mode.name, desc.num_tokens, desc.num_reqs, desc.uniform_token_count, desc.num_active_loras, drafts


def admissible(plan, role):
    """Batches that the limits and the schedule admit."""
    families = decode_families(role, plan)
    return batches(plan, role).filter(lambda batch: is_admissible(batch, plan, families))


@pytest.fixture(scope="module")
def modules():
    """VLLM's modules with the plugin's hooks in them."""
    with vllm_modules() as made:
        hooks.apply_to_managers(made[MANAGERS])
        yield made


def applied(modules, plan, role, mode=None):
    """A role's manager under a plan, captured, with its configuration."""
    config = config_for(modules, plan)
    dynamic = bool(config.tiers)
    hooks.set_sizes(plan, config)
    chains = dynamic and role is Role.DRAFT_DECODE and any(e.draft_steps for e in plan.role(role).entries)
    with mock.patch.object(hooks, "current_plan", return_value=plan):
        manager = manager_for(modules, config, plan, role, mode)
        return manager, capture(manager, chains=chains), dynamic


def answer(manager, batch, plan, tokens=None):
    """The manager's answer, asked as the model runner and the drafter ask."""
    loras = batch.active_loras if batch.role is Role.TARGET else 0
    longest = (batch.query_len or manager.decode_query_len) if batch.past_prompt else None
    desc = manager.dispatch(batch.num_reqs, tokens or batch.num_tokens, batch.uniform_query_len, loras, longest)
    if batch.role is Role.DRAFT_DECODE:
        desc = manager.specialize_spec_tokens(desc, plan.speculative.draft_tokens(batch.num_reqs))
    return descriptor_row(desc)


@given(vllm_plans(), st.data())
def test_vllm_captures_the_entries_and_answers_as_the_dispatcher(modules, plan, data):
    """Law 12: role by role, in the plan's order, and every batch as a scan over all entries answers."""
    usable = runnable(plan)
    for role in usable.roles:
        manager, captured, dynamic = applied(modules, plan, role.role)
        assert [descriptor_row(desc) for desc in captured] == [entry_row(e, dynamic) for e in role.entries]
        if role.role is Role.DRAFT_PREFILL:
            continue
        for batch in data.draw(st.lists(admissible(plan, role.role), min_size=1, max_size=20)):
            entry = reference.dispatch(usable, batch)
            assert answer(manager, batch, plan) == (None if entry is None else entry_row(entry, dynamic))


@given(vllm_plans(), st.data())
def test_draft_prefill_has_the_full_graph_of_the_target_or_next_fit(modules, plan, data):
    """Law 12: it is asked with the tokens that the target's batch is padded to, and runs on the target's metadata."""
    usable = runnable(plan)
    for role in (each for each in usable.roles if each.role is Role.DRAFT_PREFILL):
        manager, _, dynamic = applied(modules, plan, role.role)
        batch = data.draw(admissible(plan, role.role))
        target = reference.dispatch(usable, attrs.evolve(batch, role=Role.TARGET))
        tokens = batch.num_tokens if target is None else target.num_tokens
        best = next_fit(usable, batch, tokens)
        assert answer(manager, batch, plan, tokens) == (None if best is None else entry_row(best, dynamic))
        if best is not None and best.mode is GraphMode.FULL:
            assert target is not None
            assert (target.mode, target.num_reqs) == (GraphMode.FULL, best.num_reqs)


@given(vllm_plans())
def test_draft_prefill_with_the_sizes_of_the_target_answers_as_the_dispatcher(modules, plan):
    """Law 12: the usual plan, in which both roles have one ladder; every decode."""
    drafted = [role for role in plan.roles if role.role is Role.DRAFT_PREFILL]
    entries = tuple(entry for entry in runnable(plan).role(Role.TARGET).entries if not entry.active_loras)
    roles = (plan.role(Role.TARGET), *(replace(role, entries=entries) for role in drafted))
    plan = replace(plan, roles=roles)
    usable = runnable(plan)
    for role in drafted:
        manager, captured, dynamic = applied(modules, plan, role.role, plan.role(Role.TARGET).mode)
        assert len(captured) == len(entries)
        for family in decode_families(role.role, plan):
            for num_reqs, _ in family.requests.counts():
                batch = Batch.decode(role.role, num_reqs, family.query_len)
                entry = reference.dispatch(usable, batch)
                tokens = batch.num_tokens if entry is None else entry.num_tokens
                assert answer(manager, batch, plan, tokens) == (None if entry is None else entry_row(entry, dynamic))


def over_ranks(manager, vector):
    """What each rank's target answers, as vLLM's ranks agree (worker/gpu/dp_utils.py)."""
    alone = [ask(manager, batch, batch.num_tokens, batch.uniform_query_len) for batch in vector]
    if None in alone:
        return [None] * len(vector)
    lengths = {batch.uniform_query_len for batch in vector}
    uniform = lengths.pop() if len(lengths) == 1 else None
    return [ask(manager, batch, max(each.num_tokens for each in vector), uniform) for batch in vector]


def ask(manager, batch, tokens, uniform):
    """One rank's answer for other tokens and another query length than its own."""
    return descriptor_row(manager.dispatch(batch.num_reqs, tokens, uniform, batch.active_loras))


@given(vllm_plans(), st.data())
def test_data_parallel_ranks_run_the_planned_entry_of_their_vector(modules, plan, data):
    """Law 12 over ranks, and law 8: as a scan over the plan's entries answers, idle ranks included, and all alike."""
    config = config_for(modules, replace(plan, speculative=plan.speculative and replace(plan.speculative, schedule=())))
    config.parallel_config.data_parallel_size = 2
    hooks.set_sizes(plan, config)
    with mock.patch.object(hooks, "current_plan", return_value=plan):
        manager = manager_for(modules, config, plan, Role.TARGET)
        captured = capture(manager)
    usable = runnable_by_ranks(plan)
    entries = usable.role(Role.TARGET).entries
    assert [descriptor_row(desc) for desc in captured] == [entry_row(entry, False) for entry in entries]
    idle = Batch.decode(Role.TARGET, 1, manager.decode_query_len, max(manager.lora_capture_cases))
    ranks = st.lists(admissible(plan, Role.TARGET) | st.just(idle), min_size=2, max_size=4)
    for vector in data.draw(st.lists(ranks, min_size=1, max_size=8)):
        answers = over_ranks(manager, vector)
        assert answers == [None if each is None else entry_row(each, False) for each in rank_answers(usable, vector)]
        assert len({None if each is None else each[:2] for each in answers}) == 1


@given(vllm_plans(), st.sampled_from(GraphMode), st.data())
def test_lower_mode_leaves_graphs_out_and_says_so(modules, plan, mode, data):
    """Law 12: what the resolved mode cannot run is a decision; the rest is next fit, and nothing raises."""
    for role in plan.roles:
        manager, captured, _ = applied(modules, plan, role.role, mode)
        halves = {False: mode.decode_mode, True: mode.mixed_mode}
        expected = [e for e in runnable(plan).role(role.role).entries if halves[e.query_len is None] is e.mode]
        rules = {decision.rule for decision in hooks.decisions.get(role.role, ())}
        assert len(captured) == len(expected)
        # Without graphs of the target a drafter has none, whatever its mode is.
        bare = "engine-bare-target" in rules
        assert not bare or (role.role.is_drafter and not captured)
        lowered = any(halves[e.query_len is None] is not e.mode for e in role.entries)
        assert ("engine-mode" in rules) == (lowered and not bare)
        for desc in captured:
            assert desc.num_tokens <= plan.limits.max_num_tokens
        for batch in data.draw(st.lists(admissible(plan, role.role), max_size=5)):
            row = answer(manager, batch, plan)
            assert row is None or row[:5] in {descriptor_row(desc)[:5] for desc in captured}
