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
    DraftPass,
    EagerCost,
    Observation,
    ObservedGraph,
    ObservedRole,
    ObservedVector,
)
from capture_planner.testing.strategies.plans import decisions, entries, list_of
from capture_planner.testing.strategies.specs import specs
from capture_planner.testing.strategies.values import any_names, any_text, composite, counts, maybe, one_of


@functools.cache
def _amounts() -> SearchStrategy[float]:
    return st.sampled_from((0.0, 1.0, 1e-05, 1.25)) | st.floats(0, 1e9, allow_nan=False)


@functools.cache
def _graphs() -> SearchStrategy[ObservedGraph]:
    return st.builds(
        ObservedGraph,
        entry=entries(True, varying=False),
        max_query_len=maybe(st.integers(1, 4)),
        prompts_only=st.booleans(),
        seconds=maybe(_amounts()),
        mib=maybe(_amounts()),
        milliseconds=maybe(_amounts()),
        replays=st.integers(0, 1 << 40),
    )


@composite
def _outcomes(draw: DrawFn, graphs: int) -> dict[str, Any]:
    """Return the graph, or the reason for none, of a batch."""
    graph = draw(st.none() | st.integers(0, graphs - 1)) if graphs else None
    return {"graph": graph, "reason": draw(one_of(Reason)) if graph is None else None}


@composite
def _runs(draw: DrawFn, graphs: int) -> DispatchRun:
    first = draw(st.integers(0, 64))
    return DispatchRun(
        query_len=draw(maybe(st.integers(1, 4))),
        past_prompt=draw(st.booleans()),
        min_reqs=draw(counts()),
        max_reqs=draw(maybe(counts())),
        min_loras=draw(st.integers(0, 2)),
        max_loras=draw(st.integers(0, 6)),
        first=first,
        last=first + draw(st.integers(0, 64)),
        **draw(_outcomes(graphs)),
    )


@composite
def _batch_counts(draw: DrawFn, graphs: int) -> BatchCount:
    query_len = draw(maybe(st.integers(1, 4)))
    num_reqs = draw(counts())
    return BatchCount(
        num_reqs=num_reqs,
        num_tokens=draw(counts()) if query_len is None else num_reqs * query_len,
        query_len=query_len,
        past_prompt=draw(st.booleans()),
        active_loras=draw(st.integers(0, 5)),
        steps=draw(counts() | st.integers(0, 1 << 40)),
        milliseconds=draw(maybe(_amounts())),
        samples=draw(st.integers(0, 64)),
        interval=draw(maybe(_amounts())),
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
    costs = st.builds(
        EagerCost, num_reqs=counts(), num_tokens=counts(), query_len=maybe(st.integers(0, 4)), milliseconds=_amounts()
    )
    return ObservedRole(
        role=role,
        mode=draw(one_of(GraphMode)),
        graphs=graphs,
        answers=tuple(draw(list_of(_runs(len(graphs)), max_size=8))),
        batches=tuple(draw(list_of(_batch_counts(len(graphs)), max_size=8))),
        rounded_batches=draw(st.integers(0, 1 << 40)),
        other_batches=draw(st.integers(0, 1 << 40)),
        eager=tuple(draw(list_of(costs, max_size=2))),
        vectors=tuple(draw(list_of(_vectors(len(graphs)), max_size=2))),
        other_vectors=draw(st.integers(0, 1 << 40)),
    )


@composite
def observations(draw: DrawFn) -> Observation:
    """Return valid observations, however unlikely: answers that overlap, counts of batches never admitted."""
    spec = draw(specs(max_reqs=64))
    passes = st.builds(
        DraftPass, query_len=st.integers(1, 4), draft_steps=maybe(counts()), first=counts(), last=counts()
    )
    positions = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
    texts = st.lists(any_text(), max_size=2).map(tuple)
    roles = draw(list_of(one_of(Role), min_size=1, unique=True))
    return Observation(
        engine=draw(any_names()),
        engine_version=draw(any_text()),
        device=draw(maybe(any_text())),
        driver=draw(maybe(any_text())),
        torch=draw(maybe(any_text())),
        rank=draw(st.integers(0, 7)),
        world_size=draw(st.integers(1, 8)),
        replica=draw(st.integers(0, 3)),
        started=draw(one_of(("2026-11-22T13:00:00Z", "2026-11-22T13:00:00.25+00:00"))),
        seconds=draw(_amounts()),
        plan=draw(maybe(one_of(("sha256:" + "0" * 64, "sha256:" + "a1" * 32)))),
        model=draw(any_text()),
        limits=spec.limits,
        whole_prompts=draw(st.booleans()),
        speculative=spec.speculative,
        drafts=draw(maybe(st.lists(passes, max_size=2).map(tuple))),
        lora=spec.lora,
        parallel=spec.parallel,
        sizes=tuple(draw(list_of(counts(), max_size=4))),
        settings=tuple(draw(list_of(st.tuples(any_text(), any_text()), max_size=2))),
        decisions=tuple(draw(list_of(decisions(), max_size=2))),
        kv_blocks=draw(maybe(st.integers(0, 1 << 30))),
        capture_seconds=draw(maybe(_amounts())),
        graph_mib=draw(maybe(_amounts())),
        roles=tuple(draw(_observed_roles(role)) for role in roles),
        drafted=draw(positions),
        accepted=draw(positions),
        idle_steps=draw(st.integers(0, 1 << 40)),
        notes=draw(texts),
    )
