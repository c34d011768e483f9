"""Profiles with anything in them that the records admit."""

from __future__ import annotations

import functools
from operator import attrgetter

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.records.profile import CostCurve, GraphCost, Profile
from capture_planner.testing.strategies.machines import environments
from capture_planner.testing.strategies.plans import list_of
from capture_planner.testing.strategies.specs import specs
from capture_planner.testing.strategies.values import any_names, any_text, composite, counts, maybe, one_of, versions

_GRAPHS = (GraphMode.PIECEWISE, GraphMode.FULL)
_KEY = attrgetter("key")


@functools.cache
def _amounts() -> SearchStrategy[float]:
    return st.sampled_from((0.0, 1.0, 1e-05, 1.25)) | st.floats(0, 1e9, allow_nan=False)


@composite
def _curves(draw: DrawFn) -> CostCurve:
    tokens = sorted(draw(st.sets(counts(), min_size=1, max_size=6)))
    times = st.floats(1e-6, 1e6, allow_nan=False)
    return CostCurve(
        role=draw(one_of(Role)),
        mode=draw(one_of((GraphMode.NONE, *_GRAPHS))),
        query_len=draw(maybe(st.integers(1, 4))),
        draft_steps=draw(maybe(st.integers(1, 4))),
        tokens=tuple(tokens),
        milliseconds=tuple(draw(times) for _ in tokens),
    )


@functools.cache
def _graph_costs() -> SearchStrategy[GraphCost]:
    return st.builds(
        GraphCost,
        role=one_of(Role),
        mode=one_of(_GRAPHS),
        query_len=maybe(st.integers(1, 4)),
        draft_steps=maybe(st.integers(1, 4)),
        mib=_amounts(),
        driver_mib=_amounts(),
        mib_per_token=_amounts(),
        seconds=_amounts(),
        seconds_per_token=_amounts(),
        largest_mib=_amounts(),
        mib_error=_amounts(),
        seconds_error=_amounts(),
    )


@composite
def profiles(draw: DrawFn) -> Profile:
    """Return valid profiles, however unlikely their figures."""
    spec, machine = draw(specs(max_reqs=64)), draw(environments())
    return Profile(
        source=draw(any_names()),
        command=draw(any_text()),
        date=draw(one_of(("2026-11-22T13:00:00Z", "2026-11-22T13:00:00.25+00:00"))),
        device=machine.device,
        driver=draw(maybe(any_text())),
        torch=draw(maybe(any_text())),
        packages=draw(st.dictionaries(any_names(), versions(), max_size=2)),
        model=spec.model,
        speculative=spec.speculative,
        parallel=spec.parallel,
        context=draw(maybe(counts())),
        curves=tuple(draw(list_of(_curves(), max_size=4, unique_by=_KEY))),
        graphs=tuple(draw(list_of(_graph_costs(), max_size=4, unique_by=_KEY))),
        base_mib=draw(_amounts()),
        pool=draw(one_of(Pool)),
        base_seconds=draw(_amounts()),
        step_milliseconds=draw(_amounts()),
        step_milliseconds_per_request=draw(_amounts()),
        drafts_overlap=draw(st.booleans()),
        spread=draw(maybe(_amounts())),
        notes=tuple(draw(st.lists(any_text(), max_size=2))),
    )
