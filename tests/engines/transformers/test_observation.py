"""The observation of a manager: its answers are those that steps get."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.dispatch import Dispatcher
from capture_planner.engines.deployments import emulation_of
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Budget
from capture_planner.testing import plans
from capture_planner_transformers.observation import Facts, Ledger, observed
from capture_planner_transformers.tables import EngineStep, GraphAnswer, GraphTable, table

FACTS = Facts(
    engine_version="5.23.0", device="cpu", torch="2.13.0", rank=0, world_size=1, kv_blocks=32, settings=(("a", "b"),)
)
applicable = plans(max_reqs=16, max_tokens=128).filter(
    lambda plan: plan.speculative is None and plan.lora is None and plan.parallel.decode_context == 1
)


def graphs_of(plan: Plan) -> GraphTable:
    return table(
        replace(plan, budget=Budget()), name="plan.yaml", limit=1 << 20, reads=(0, 1 << 20), block_table=False
    )[0]


@given(st.data(), applicable)
def test_an_observation_answers_as_the_plan_does(data: st.DataObject, plan: Plan) -> None:
    """For every batch; graphs that were not captured are eager, for memory. It can be read again."""
    graphs = graphs_of(plan)
    sizes = sorted({key[0] for key in graphs.keys})
    lost = data.draw(st.sets(st.sampled_from(sizes), max_size=2)) if sizes else set()
    captured = frozenset(key for key in graphs.keys if key[0] not in lost)
    costs = dict.fromkeys(graphs.keys, (0.5, 1 << 20))
    observation = observed(graphs, captured, costs, FACTS)
    assert codec.loads(codec.dumps(observation), Observation) == observation
    (manager,) = emulation_of(observation).managers
    num_reqs = data.draw(st.integers(1, min(plan.limits.max_num_reqs, plan.limits.max_num_tokens)))
    num_tokens = data.draw(st.integers(num_reqs, plan.limits.max_num_tokens))
    for batch in (Batch.decode(Role.TARGET, num_reqs, 1), Batch.mixed(Role.TARGET, num_reqs, num_tokens)):
        own, seen = Dispatcher(plan).dispatch(batch), manager.dispatch(batch)
        if own.mode is GraphMode.FULL and own.entry.num_tokens not in lost:
            assert seen.entry == own.entry
        else:
            assert seen.entry is None
            none = Reason.MEMORY if own.mode is GraphMode.FULL and captured else Reason.MODE
            assert seen.reason == (own.reason or none)


@given(applicable)
def test_costs_are_those_of_all_cache_reads(plan: Plan) -> None:
    graphs = graphs_of(plan)
    costs = dict.fromkeys(graphs.keys, (0.5, 1 << 20))
    (role,) = observed(graphs, frozenset(graphs.keys), costs, FACTS).roles
    for graph in role.graphs:
        own = sum(key[0] == graph.entry.num_tokens for key in graphs.keys)
        assert (graph.seconds, graph.mib) == (0.5 * own, own)


def test_each_reason_for_eager_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger("plan.yaml", FACTS)
    step = EngineStep(num_reqs=2, num_tokens=70, reads=9, past_prompt=False, block_table=False)
    with caplog.at_level(logging.WARNING, "capture_planner.transformers"):
        for reason in (Reason.SIZES, Reason.SIZES, Reason.MODE):
            ledger.count(step, GraphAnswer(None, None, reason))
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["sizes", "mode"]
    assert "plan.yaml: a batch of 70 tokens, 2 requests and 9 cache reads runs eager" in caplog.text
    assert ledger.steps[None, Reason.SIZES] == 2
