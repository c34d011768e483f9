"""Observations with anything in them that the records admit."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.observation import (
    BatchCount,
    DispatchRun,
    Observation,
    ObservedGraph,
    ObservedRole,
    ObservedVector,
)
from capture_planner.testing.strategies.plans import entries
from capture_planner.testing.strategies.specs import specs
from capture_planner.testing.strategies.values import composite, counts, list_of, maybe, one_of, record_of, records
from support.strategies.traffic import drafts_by_position


@functools.cache
def _graphs() -> SearchStrategy[ObservedGraph]:
    return records(ObservedGraph, entry=entries(True, varying=False))


@composite
def _outcomes(draw: DrawFn, graphs: int) -> dict[str, Any]:
    """Return the graph, or the reason for none, of a batch."""
    graph = draw(st.none() | st.integers(0, graphs - 1)) if graphs else None
    return {"graph": graph, "reason": draw(one_of(Reason)) if graph is None else None}


@composite
def _runs(draw: DrawFn, graphs: int) -> DispatchRun:
    first = draw(st.integers(0, 64))
    last, query_len = first + draw(st.integers(0, 64)), draw(maybe(st.integers(1, 4)))
    return record_of(draw, DispatchRun, query_len=query_len, first=first, last=last, **draw(_outcomes(graphs)))


@composite
def _batch_counts(draw: DrawFn, graphs: int) -> BatchCount:
    query_len, num_reqs = draw(maybe(st.integers(1, 4))), draw(counts())
    return record_of(
        draw,
        BatchCount,
        num_reqs=num_reqs,
        num_tokens=draw(counts()) if query_len is None else num_reqs * query_len,
        query_len=query_len,
        active_loras=draw(st.integers(0, 5)),
        steps=draw(counts() | st.integers(0, 1 << 40)),
        **draw(_outcomes(graphs)),
    )


@composite
def _vectors(draw: DrawFn, graphs: int) -> ObservedVector:
    size = draw(st.integers(1, 4))

    def by_rank(values: SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=size, max_size=size)))

    return ObservedVector(
        num_reqs=by_rank(st.integers(0, 64)),
        num_tokens=by_rank(st.integers(0, 512)),
        query_len=by_rank(maybe(st.integers(1, 4))),
        past_prompt=by_rank(st.booleans()),
        modes=by_rank(one_of(GraphMode)),
        steps=draw(st.integers(0, 1 << 40)),
        **draw(_outcomes(graphs)),
    )


@composite
def _observed_roles(draw: DrawFn, role: Role) -> ObservedRole:
    graphs = tuple(draw(list_of(_graphs(), max_size=8)))
    return record_of(
        draw,
        ObservedRole,
        role=role,
        graphs=graphs,
        trials=tuple(draw(list_of(_graphs(), max_size=3))),
        answers=tuple(draw(list_of(_runs(len(graphs)), max_size=8))),
        batches=tuple(draw(list_of(_batch_counts(len(graphs)), max_size=8))),
        vectors=tuple(draw(list_of(_vectors(len(graphs)), max_size=2))),
    )


@composite
def observations(draw: DrawFn) -> Observation:
    """Return valid observations, however unlikely: answers that overlap, counts of batches never admitted."""
    spec = draw(specs(max_reqs=64))
    roles = draw(list_of(one_of(Role), min_size=1, unique=True))
    return record_of(
        draw,
        Observation,
        **draw(drafts_by_position()),
        limits=spec.limits,
        speculative=spec.speculative,
        lora=spec.lora,
        parallel=spec.parallel,
        roles=tuple(draw(_observed_roles(role)) for role in roles),
    )
