"""The graphs of a plan in transformers: every answer is a graph that is captured, and the plan's own entry."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capture_planner.dispatch import Dispatcher
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Budget
from capture_planner.testing import plans
from capture_planner_transformers.tables import EngineStep, GraphTable, fitting, ladder, table, thinned

LIMIT = 4096
Ladders = st.sets(st.integers(0, LIMIT), min_size=1, max_size=6).map(lambda sizes: tuple(sorted(sizes)))


def tables(plan: Plan, reads: tuple[int, ...], block_table: bool = False, copies: int = 1) -> GraphTable:
    return table(plan, name="plan.yaml", limit=LIMIT, reads=reads, block_table=block_table, copies=copies)[0]


@st.composite
def steps(draw: st.DrawFn, plan: Plan, block_table: bool) -> EngineStep:
    """Return a step that transformers' scheduler could make within the plan's limits."""
    limits = plan.limits
    num_reqs = draw(st.integers(1, min(limits.max_num_reqs, limits.max_num_tokens)))
    fast = block_table and draw(st.booleans())
    past_prompt = fast or draw(st.booleans())
    num_tokens = num_reqs if past_prompt else draw(st.integers(num_reqs, limits.max_num_tokens))
    most = min(LIMIT, num_reqs * plan.model.max_model_len)
    reads = draw(st.integers(num_reqs if past_prompt else 0, max(most, num_reqs)))
    return EngineStep(num_reqs=num_reqs, num_tokens=num_tokens, reads=reads, past_prompt=past_prompt, block_table=fast)


@given(st.data(), plans(), Ladders, st.booleans())
def test_every_answer_is_a_captured_graph_of_the_plans_entry_or_has_a_reason(
    data: st.DataObject, plan: Plan, reads: tuple[int, ...], block_table: bool
) -> None:
    """Law 12 for transformers: the dispatcher's entry, and never a key that warm-up does not capture."""
    plan = replace(plan, budget=Budget())
    graphs = tables(plan, reads, block_table)
    step = data.draw(steps(plan, block_table))
    answer = graphs.answer(step)
    entry = Dispatcher(plan).dispatch(step.batch).entry
    assert answer.entry == entry
    if answer.key is None:
        assert answer.reason is not None
        assert entry is None or entry.mode is not GraphMode.FULL or fitting(graphs.reads_of(entry), step.reads) is None
    else:
        assert answer.reason is None
        assert answer.key in graphs.keys
        assert answer.key[0] == entry.num_tokens >= step.num_tokens
        assert step.block_table or answer.key[1] == min(size for size in graphs.reads_of(entry) if size >= step.reads)


@given(plans(max_reqs=12, max_tokens=64), Ladders)
def test_every_graph_serves_some_step(plan: Plan, reads: tuple[int, ...]) -> None:
    """Law 4: each padded size of cache reads is the least that fits some step of its entry."""
    plan = replace(plan, budget=Budget())
    graphs = tables(plan, reads)
    served = set()
    for entry in plan.role(Role.TARGET).entries:
        requests = min(entry.num_reqs or entry.num_tokens, plan.limits.max_num_reqs)
        for count in graphs.reads_of(entry):
            below = max((size for size in graphs.reads if size < count), default=-1)
            least = below + 1
            assert least <= min(LIMIT, requests * plan.model.max_model_len)
            assert fitting(graphs.reads_of(entry), least) == count
            served.add((entry.num_tokens, count))
    full = {entry.num_tokens for entry in plan.role(Role.TARGET).entries if entry.mode is GraphMode.FULL}
    assert {key for key in served if key[0] in full} >= set(graphs.keys)


@given(plans(), Ladders, st.integers(1, 200), st.integers(1, 2), st.booleans())
def test_a_budget_bounds_the_graphs_or_is_refused(
    plan: Plan, reads: tuple[int, ...], most: int, copies: int, block_table: bool
) -> None:
    """The ladder of cache reads gets shorter first; its largest size stays, and no entry is dropped."""
    unbounded = tables(replace(plan, budget=Budget()), reads, block_table)
    tight = replace(plan, budget=Budget(max_graphs=most))
    least = tables(replace(plan, budget=Budget()), unbounded.reads[-1:], block_table)
    if copies * len(least.keys) > most:
        with pytest.raises(RunError, match=r"^plan\.yaml: its budget allows"):
            tables(tight, reads, block_table, copies)
    else:
        graphs = tables(tight, reads, block_table, copies)
        assert copies * len(graphs.keys) <= most
        assert {key[0] for key in graphs.keys} == {key[0] for key in unbounded.keys}
        assert graphs.reads[-1:] == unbounded.reads[-1:]


@given(plans(), Ladders, st.booleans())
def test_capture_order_is_largest_first(plan: Plan, reads: tuple[int, ...], block_table: bool) -> None:
    """So that later graphs fit the pool; the tokens come first."""
    keys = tables(replace(plan, budget=Budget()), reads, block_table).keys
    assert list(keys) == sorted(set(keys), reverse=True)


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20), st.data())
def test_a_ladder_reaches_its_limit_and_thins_to_one(first: int, most: int, data: st.DataObject) -> None:
    """Every count up to the limit fits some size, also after the ladder was made shorter."""
    sizes = ladder(first, most)
    count = data.draw(st.integers(0, most))
    assert list(sizes) == sorted(set(sizes))
    while True:
        fits = fitting(sizes, count)
        assert fits is not None
        assert sizes[-1] == most
        if len(sizes) == 1:
            break
        shorter = thinned(sizes)
        assert set(shorter) < set(sizes)
        sizes = shorter


@given(plans())
def test_a_count_above_every_size_runs_eager_with_the_reason(plan: Plan) -> None:
    """Requests longer than the plan's model, for example."""
    plan = replace(plan, budget=Budget())
    graphs = tables(plan, (0, 64))
    step = EngineStep(num_reqs=1, num_tokens=1, reads=65, past_prompt=True, block_table=False)
    answer = graphs.answer(step)
    assume(answer.entry is not None and answer.entry.mode is GraphMode.FULL)
    assert (answer.key, answer.reason) == (None, "sizes")


@pytest.mark.parametrize("past_prompt", [True, False])
def test_one_token_each_is_a_decode_past_the_prompt_or_with_a_block_table(past_prompt: bool) -> None:
    """Transformers' decode kernel reads a prompt's last single token like any other."""
    step = EngineStep(num_reqs=3, num_tokens=3, reads=9, past_prompt=past_prompt, block_table=False)
    assert (step.batch.uniform_query_len == 1) is past_prompt
    fast = EngineStep(num_reqs=3, num_tokens=3, reads=9, past_prompt=past_prompt, block_table=True)
    assert fast.batch.uniform_query_len == 1
