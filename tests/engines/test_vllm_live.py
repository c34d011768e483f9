"""Graphs that change between steps: a manager is then as one that was made under the plan; an error changes nothing.

Draft lengths that depend on the batch are left out: vLLM multiplies the graphs by them at every capture.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from _live import GraphTable, LiveGraphs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner_vllm.inside import hooks
from engines.generators.vllm_plans import random_plans
from support.vllm_module import MANAGERS, capture, config_for, manager_for, model, vllm_modules

PLANS = random_plans().filter(lambda plan: plan.speculative is None or not plan.speculative.ranges)


@contextmanager
def running(plan: Plan) -> Iterator[tuple[LiveGraphs, dict]]:
    """The managers of a plan, captured, and where a test can let captures fail."""
    with vllm_modules() as modules, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "current_plan", lambda: plan)
        hooks.apply_to_config(modules[hooks.CONFIG])
        hooks.apply_to_managers(modules[MANAGERS])
        config = config_for(modules, plan)
        config._set_cudagraph_sizes()
        managers = {role: manager_for(modules, config, plan, role) for role in plan.planned}
        for manager in managers.values():
            capture(manager)
        failing: dict[Role, Exception] = {}

        def captured(role: Role) -> None:
            capture(managers[role])
            if role in failing:
                raise failing[role]

        yield LiveGraphs(managers, captured, {}), failing


def part_of(plan: Plan, random) -> Plan:
    """The plan with some of its entries; those that the drafter shares with the target go together."""
    kept = {entry for role in plan.roles for entry in role.entries if random.random() < 0.5}
    return replace(
        plan,
        roles=tuple(
            replace(role, entries=tuple(entry for entry in role.entries if entry in kept)) for role in plan.roles
        ),
    )


def as_made(live: LiveGraphs, tables: dict[Role, GraphTable]) -> None:
    """Assert that each manager has what it would have, were it made under the plan."""
    for role, manager in live.managers.items():
        want = tables[role]
        assert set(manager.graphs) == set(want.graphs)
        assert {key: tuple(tried) for key, tried in manager._candidates.items()} == {
            key: tried for key, tried in want.candidates.items() if tried
        }
        listed = [desc for mode in manager._capture_descs.values() for desc in mode]
        assert set(listed) == set(want.graphs)
        assert len(listed) == len(want.graphs)


@given(PLANS, st.randoms(use_true_random=False), st.integers(0, 3))
def test_changed_manager_is_as_a_fresh_one(plan: Plan, random, together: int) -> None:
    """Also between two parts of a change: then every batch is dispatched to a graph that is there."""
    with running(plan) as (live, _):
        for each in (part_of(plan, random), part_of(plan, random), plan):
            tables = live.tables(each)
            for _ in live.stepwise(tables, together) if together else ():
                for manager in live.managers.values():
                    assert {desc for tried in manager._candidates.values() for desc in tried} <= set(manager.graphs)
            live.change(tables)
            as_made(live, tables)
        target = live.managers[Role.TARGET]
        for desc in target.graphs:
            if desc.cg_mode.name == "FULL":
                ids = target.input_buffers.input_ids[: desc.num_tokens]
                assert torch.equal(target.run_fullgraph(desc), model(ids))


@given(PLANS, st.randoms(use_true_random=False), st.sampled_from(Role))
def test_failed_change_changes_nothing(plan: Plan, random, role: Role) -> None:
    with running(plan) as (live, failing):
        first = live.tables(part_of(plan, random))
        live.change(first)
        whole = live.tables(plan)
        failing[role] = RuntimeError("no memory")
        if any(each is role for each, _ in live.missing(whole)):
            with pytest.raises(RuntimeError, match="no memory"):
                live.change(whole)
            as_made(live, first)


@given(PLANS)
def test_graph_that_serves_is_not_dropped(plan: Plan) -> None:
    with running(plan) as (live, _):
        for role, manager in live.managers.items():
            for desc in {desc for tried in manager._candidates.values() for desc in tried}:
                with pytest.raises(ValueError, match="use other tables first"):
                    live.drop([(role, desc)])
