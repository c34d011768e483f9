"""Traffic with anything in it that the records admit."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from capture_planner.modes import Role
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner.testing.strategies.plans import list_of
from capture_planner.testing.strategies.values import any_text, composite, counts, maybe, one_of


@composite
def _traffic_counts(draw: DrawFn) -> TrafficCount:
    num_reqs, query_len = draw(maybe(counts())), draw(maybe(st.integers(1, 4)))
    tokens = counts() if num_reqs is None else maybe(counts())
    return TrafficCount(
        role=draw(one_of(Role)),
        num_reqs=num_reqs,
        num_tokens=draw(tokens) if num_reqs is None or query_len is None else num_reqs * query_len,
        query_len=query_len,
        past_prompt=draw(one_of((True, False, None))),
        active_loras=draw(st.integers(0, 3)),
        count=draw(counts() | st.integers(1, 1 << 40)),
    )


@composite
def traffics(draw: DrawFn) -> Traffic:
    """Return valid traffic, however unlikely; shapes are in it once."""
    positions = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
    texts = st.lists(any_text(), max_size=2).map(tuple)
    return Traffic(
        sources=draw(texts),
        seconds=draw(maybe(st.sampled_from((0.0, 1.0, 1e-05, 1.25)) | st.floats(0, 1e9, allow_nan=False))),
        batches=tuple(draw(list_of(_traffic_counts(), max_size=12, unique_by=lambda count: count.shape))),
        skipped=draw(st.integers(0, 1 << 40)),
        drafted=draw(positions),
        accepted=draw(positions),
        notes=draw(texts),
    )
