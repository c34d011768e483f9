"""Measurements that planning can choose by: times of every role and mode, and a traffic of any batches or none."""

from __future__ import annotations

import functools
from itertools import accumulate

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner.modes import GraphMode, Role
from capture_planner.records.environment import Device, DeviceKind
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Model
from capture_planner.records.profile import CostCurve, GraphCost, Profile
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner.testing.strategies.values import composite, counts, one_of

_DEVICE = Device(kind=DeviceKind.CUDA, name="H100", capability="9.0", memory=80 << 30, multiprocessors=132)
_MODEL = Model(name="measured", num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, max_model_len=4096)


@composite
def _curves(draw: DrawFn, role: Role, mode: GraphMode) -> CostCurve:
    """Draw times that step, or grow, with the size."""
    tokens = sorted(draw(st.sets(counts(1024), min_size=1, max_size=5)))
    steps = draw(st.lists(one_of((0.0, 0.01, 1.0)), min_size=len(tokens) - 1, max_size=len(tokens) - 1))
    floor = draw(one_of((0.1, 1.0, 2.5)))
    return CostCurve(role=role, mode=mode, tokens=tuple(tokens), milliseconds=tuple(accumulate(steps, initial=floor)))


@functools.cache
def _batches() -> SearchStrategy[TrafficCount]:
    def decode(num_reqs: int, query_len: int, count: int) -> TrafficCount:
        tokens = num_reqs * query_len
        return TrafficCount(
            role=Role.TARGET, num_reqs=num_reqs, num_tokens=tokens, query_len=query_len, past_prompt=True, count=count
        )

    decodes = st.builds(decode, num_reqs=counts(), query_len=st.integers(1, 6), count=st.integers(1, 1000))
    prompts = st.builds(
        TrafficCount,
        role=one_of(Role),
        num_tokens=st.integers(64, 4096),
        past_prompt=one_of((False, None)),
        count=counts(),
    )
    return decodes | decodes | prompts


@composite
def measurements(draw: DrawFn) -> Measurements:
    """Return a profile with times of every role, eager and with graphs, and a traffic that has a decode, or none."""
    modes = (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)
    profile = Profile(
        source="strategy",
        date="2026-11-22T13:00:00Z",
        device=_DEVICE,
        model=_MODEL,
        curves=tuple(draw(_curves(role, mode)) for role in Role for mode in modes),
        graphs=tuple(
            GraphCost(role=role, mode=mode, mib=draw(one_of((0.0, 1.5, 25.0))), seconds=draw(one_of((0.0, 0.05, 0.25))))
            for role in Role
            for mode in modes[1:]
        ),
        step_milliseconds=draw(one_of((0.0, 0.3))),
    )
    listed = draw(st.lists(_batches(), min_size=1, max_size=6))
    one = TrafficCount(role=Role.TARGET, num_reqs=1, num_tokens=1, query_len=1, past_prompt=True, count=1)
    traffic = Traffic(sources=("strategy",), batches=(one, *listed))
    return Measurements(profile=profile, traffic=traffic if draw(st.booleans()) else None)
