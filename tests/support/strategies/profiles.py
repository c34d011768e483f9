"""Profiles with anything in them that the records admit."""

from __future__ import annotations

from operator import attrgetter

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from capture_planner.modes import GraphMode, Role
from capture_planner.records.profile import CostCurve, ExpertCost, GraphCost, Overhead, Profile
from capture_planner.testing.strategies.machines import environments
from capture_planner.testing.strategies.specs import specs
from capture_planner.testing.strategies.values import composite, counts, list_of, maybe, one_of, record_of, records

_GRAPHS = (GraphMode.PIECEWISE, GraphMode.FULL)
_MODES = (GraphMode.NONE, *_GRAPHS)
_KEY = attrgetter("key")


@composite
def _curves(draw: DrawFn) -> CostCurve:
    tokens = sorted(draw(st.sets(counts(), min_size=1, max_size=6)))
    times = st.floats(1e-6, 1e6, allow_nan=False)
    return CostCurve(
        role=draw(one_of(Role)),
        mode=draw(one_of(_MODES)),
        query_len=draw(maybe(st.integers(1, 4))),
        draft_steps=draw(maybe(st.integers(1, 4))),
        tokens=tuple(tokens),
        milliseconds=tuple(draw(times) for _ in tokens),
    )


@composite
def expert_costs(draw: DrawFn) -> ExpertCost:
    """Return times of experts that grow with the tokens."""
    tokens = sorted(draw(st.sets(counts(), min_size=1, max_size=6)))
    times = sorted(draw(st.floats(0, 1e3, allow_nan=False)) for _ in tokens)
    return ExpertCost(role=draw(one_of(Role)), tokens=tuple(tokens), milliseconds=tuple(times))


@composite
def profiles(draw: DrawFn) -> Profile:
    """Return valid profiles, however unlikely their figures."""
    spec, machine = draw(specs(max_reqs=64)), draw(environments())
    costs, overheads = records(GraphCost, mode=one_of(_GRAPHS)), records(Overhead, mode=one_of(_MODES))
    return record_of(
        draw,
        Profile,
        device=machine.device,
        model=spec.model,
        speculative=spec.speculative,
        parallel=spec.parallel,
        curves=tuple(draw(list_of(_curves(), max_size=4, unique_by=_KEY))),
        experts=tuple(draw(list_of(expert_costs(), max_size=3, unique_by=attrgetter("role")))),
        graphs=tuple(draw(list_of(costs, max_size=4, unique_by=_KEY))),
        overheads=tuple(draw(list_of(overheads, max_size=3, unique_by=_KEY))),
    )
