"""Why a batch ran eager, as far as the captured graphs say."""

from __future__ import annotations

import attrs
from hypothesis import given
from hypothesis import strategies as st

from capture_planner.engines.emulation import CapturedGraph
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.observation import ObservedGraph
from capture_planner_vllm.inside.steps import why_eager

QUERY_LENS = st.none() | st.integers(1, 4)


@st.composite
def graphs(draw: st.DrawFn) -> ObservedGraph:
    """Full graphs of decodes of one length, of decodes up to a length, and of any batch."""
    reqs, query_len = draw(st.integers(1, 6)), draw(QUERY_LENS)
    tokens = reqs * (query_len or draw(st.integers(1, 4)))
    loras, steps = draw(st.integers(0, 2)), draw(st.none() | st.integers(1, 3))
    entry = Entry(
        mode=GraphMode.FULL,
        num_tokens=tokens,
        num_reqs=reqs,
        query_len=query_len,
        active_loras=loras,
        draft_steps=steps,
    )
    widest = draw(QUERY_LENS) if query_len is None else None
    prompts_only = query_len is None and widest is None and draw(st.booleans())
    return ObservedGraph(entry=entry, max_query_len=widest, prompts_only=prompts_only)


@given(
    st.lists(graphs(), max_size=4),
    st.sampled_from(GraphMode),
    st.integers(1, 8),
    QUERY_LENS,
    st.booleans(),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_reason_for_eager_is_one_that_the_graphs_show(
    own: list[ObservedGraph],
    mode: GraphMode,
    reqs: int,
    query_len: int | None,
    past_prompt: bool,
    loras: int,
    steps: int,
) -> None:
    """By search: whether a graph serves the batch, or a smaller batch of its kind, or none does."""
    batch = Batch(
        role=Role.TARGET,
        num_reqs=reqs,
        num_tokens=reqs * (query_len or 2),
        query_len=query_len,
        past_prompt=past_prompt,
        active_loras=loras,
    )
    smaller = [
        attrs.evolve(batch, num_reqs=fewer, num_tokens=fewer * query_len if query_len else tokens)
        for fewer in range(1, reqs + 1)
        for tokens in range(fewer, batch.num_tokens + 1)
    ]

    def serves(some: Batch) -> bool:
        return any(CapturedGraph.of(some.role, graph).rejection(some, steps) is None for graph in own)

    half = mode.mixed_mode if batch.uniform_query_len is None else mode.decode_mode
    if serves(batch):
        expected = Reason.SHADOWED
    elif half is not GraphMode.NONE and any(map(serves, smaller)):
        expected = Reason.SIZES
    else:
        expected = Reason.MODE
    assert why_eager(batch, mode, own, steps) is expected
