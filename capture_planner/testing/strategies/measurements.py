"""Traffic and profiles that fit a spec, as measured sizes need them."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch_space import extra_slots, max_query_len
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.profile import CostCurve, ExpertCost, GraphCost, Profile
from capture_planner.records.spec import Spec
from capture_planner.records.traffic import Traffic, TrafficCount
from capture_planner.testing.strategies.values import composite, one_of

_TOKENS = (1, 2, 3, 5, 8, 12, 16, 32, 64, 96, 512, 4096)


@composite
def _curves(draw: DrawFn, role: Role, mode: GraphMode, query_len: int | None = None) -> CostCurve:
    """Draw a staircase: flat where a step is 0, and a mistake of measuring now and then."""
    tokens = _TOKENS[: draw(st.integers(1, len(_TOKENS)))]
    steps = draw(st.lists(one_of((0.0, 0.0, 0.25, 0.5, 2.0)), min_size=len(tokens), max_size=len(tokens)))
    base = draw(one_of((1.0, 2.5, 8.0)))
    times = tuple(base + time for time in accumulate(steps))
    return CostCurve(role=role, mode=mode, query_len=query_len, tokens=tokens, milliseconds=times)


@composite
def measurements(draw: DrawFn, spec: Spec, environment: Environment) -> Measurements:
    """Return traffic within the limits of ``spec``, and a profile with times of all its roles."""
    curves, graphs = [], []
    for role in spec.active_roles:
        # Without these a measured choice is refused; the other curves may be missing.
        curves += [draw(_curves(role, mode)) for mode in (GraphMode.FULL, GraphMode.NONE)]
        if draw(st.booleans()):
            curves.append(draw(_curves(role, GraphMode.PIECEWISE)))
        if draw(st.booleans()):
            curves.append(draw(_curves(role, GraphMode.FULL, max_query_len(role, spec))))
        if draw(st.booleans()):
            memory, pool = draw(one_of((0.0, 7.0, 25.0))), draw(one_of((0.0, 0.0, 0.5, 7.0)))
            seconds, more = draw(one_of((0.0, 0.05, 0.25))), draw(one_of((0.0, 0.0, 0.04)))
            cost = GraphCost(
                role=role, mode=GraphMode.FULL, mib=memory, mib_per_token=pool, seconds=seconds, seconds_per_token=more
            )
            graphs.append(cost)
    each = draw(one_of((0.0, 0.0, 0.25, 2.0)))  # milliseconds of the experts, a token
    experts = [ExpertCost(role=role, tokens=(8,), milliseconds=(8 * each,)) for role in spec.active_roles if each]
    # An eager pass was measured with its experts.
    for index, curve in enumerate(curves):
        if curve.mode is GraphMode.NONE:
            more = each * (curve.draft_steps or 1)
            times = zip(curve.tokens, curve.milliseconds, strict=True)
            curves[index] = replace(curve, milliseconds=tuple(time + more * tokens for tokens, time in times))
    profile = Profile(
        source="drawn",
        date="2026-11-22T13:00:00Z",
        device=environment.device,
        model=spec.model,
        speculative=spec.speculative,
        parallel=spec.parallel,
        curves=tuple(curves),
        experts=tuple(experts),
        graphs=tuple(graphs),
        base_mib=draw(one_of((0.0, 30.0))),
    )
    return Measurements(traffic=draw(_traffic(spec)), profile=profile)


@composite
def _traffic(draw: DrawFn, spec: Spec) -> Traffic:
    limits, slots = spec.limits, extra_slots(spec)
    batches: dict[object, TrafficCount] = {}
    for _ in range(draw(st.integers(1, 6))):
        # A drafter with rows of its own leaves fewer tokens to the target.
        most = min(limits.max_num_reqs, limits.max_num_tokens // (1 + slots))
        num_reqs = draw(st.integers(1, most))
        longest = max(1, limits.max_num_tokens // num_reqs - slots)
        query_len = draw(st.none() | st.integers(1, min(longest, 5)))
        largest = limits.max_num_tokens - num_reqs * slots
        tokens = num_reqs * query_len if query_len else draw(st.integers(num_reqs, largest))
        line = TrafficCount(
            role=Role.TARGET,
            num_reqs=num_reqs,
            num_tokens=tokens,
            query_len=query_len,
            past_prompt=draw(one_of((True, True, False, None))),
            active_loras=0 if spec.lora is None else draw(st.integers(0, min(num_reqs, spec.lora.max_active + 1))),
            count=draw(one_of((1, 3, 50, 10_000))),
        )
        batches.setdefault(line.shape, line)
    return Traffic(sources=("drawn",), batches=tuple(batches.values()))
