"""Traffic with anything in it that the records admit."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from capture_planner.modes import Role
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner.testing.strategies.values import composite, counts, list_of, maybe, one_of, record_of


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
    listed = draw(list_of(_traffic_counts(), max_size=12, unique_by=lambda count: count.shape))
    return record_of(draw, Traffic, batches=tuple(listed), **draw(drafts_by_position()))


@composite
def drafts_by_position(draw: DrawFn) -> dict[str, tuple[int, ...]]:
    """Return ``drafted`` and ``accepted``, as records of traffic have them."""
    drafted = draw(st.lists(st.integers(0, 1 << 40), max_size=5))
    return {"drafted": tuple(drafted), "accepted": tuple(draw(st.integers(0, proposed)) for proposed in drafted)}
