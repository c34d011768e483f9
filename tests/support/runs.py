"""Strategies for plans that are executed: tiny deployments of the reference backend, and requests."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner.errors import PlanningError
from capture_planner.modes import Chain, GraphMode, Pool, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins.registry import Registry
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType, DraftModel, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import (
    CapturePolicy,
    CaptureTiming,
    GroupSpec,
    Limits,
    Policy,
    Roles,
    RoleSpec,
    Sizes,
    Spec,
)
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import Request

CPU = Environment(name="cpu", device=Device(kind=DeviceKind.CPU, name="x86-64", memory=1 << 36))
"""A host without a GPU, and no package that a plan of it could be refused for."""

VOCABULARY = 61


def planned(spec: Spec, registry: Registry) -> Plan:
    """Return the plan of a spec on ``CPU``; a spec that cannot be planned is rejected as an example."""
    try:
        return make_plan(spec, CPU, registry)
    except PlanningError:
        reject()


def pages_for(plan: Plan) -> PageFormat:
    """Return pages of 4 tokens, enough for all requests of a plan at full length."""
    return PageFormat(page_size=4, num_pages=1 + plan.limits.max_num_reqs * -(-plan.model.max_model_len // 4))


@st.composite
def runnable_specs(
    draw: DrawFn,
    *,
    backend: str = "reference",
    speculative: bool | None = None,
    max_reqs: int = 4,
    dtype: DataType = DataType.FLOAT64,
    lazy: bool = False,
) -> Spec:
    """Return specs whose plans are executed in a blink: every mode, policy, pool, schedule and head.

    In float64, where a sum in another order never changes the likeliest token. ``speculative`` says
    whether there is a drafter; None: sometimes. ``lazy``: whether some graphs may be captured on first use.
    """
    layers = draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from((1, 2)))
    reqs = draw(st.integers(1, max_reqs))
    window = draw(st.sampled_from((None, None, 5)))
    sliding = () if window is None or layers < 2 else (layers // 2, window)
    drafts = draw(st.booleans()) if speculative is None else speculative
    drafter = draw(_speculatives(reqs)) if drafts else None
    slots = 0 if drafter is None else drafter.extra_slots
    target = RoleSpec()
    if sliding:
        target = RoleSpec(
            groups=(
                GroupSpec(name="full", layers=layers - sliding[0]),
                GroupSpec(name="sliding", layers=sliding[0], window=sliding[1]),
            )
        )
    return Spec(
        model=Model(
            name="tiny",
            num_layers=layers,
            num_heads=kv_heads * draw(st.sampled_from((1, 2))),
            num_kv_heads=kv_heads,
            head_dim=draw(st.sampled_from((4, 8))),
            hidden_size=16,
            vocab_size=VOCABULARY,
            max_model_len=draw(st.sampled_from((12, 24, 33))),
            dtype=dtype,
            embeddings=draw(st.sampled_from((False, False, True))),
        ),
        limits=Limits(max_num_reqs=reqs, max_num_tokens=draw(st.integers(max(reqs, 1 + slots), 20))),
        mode=draw(st.sampled_from(GraphMode)),
        backend=backend,
        speculative=drafter,
        sizes=draw(_sizes(reqs)),
        roles=Roles(target=target),
        pool=draw(st.sampled_from(Pool)),
        capture=draw(_LAZY) if lazy else CaptureTiming(),
    )


_LAZY = st.just(CaptureTiming()) | st.builds(
    CaptureTiming,
    policy=st.just(CapturePolicy.LAZY),
    memory=st.sampled_from((1 << 40, 1 << 14, 0)),
    seconds_per_minute=st.sampled_from((1e6, 1e6, 1e-9)),
)


@st.composite
def _speculatives(draw: DrawFn, reqs: int) -> Speculative:
    method = draw(st.sampled_from(Method))
    most = draw(st.sampled_from((1, 2, 3, 5)))
    schedule: list[tuple[int, int, int]] = []
    if reqs > 1 and draw(st.booleans()):
        middle = draw(st.integers(1, reqs - 1))
        ks = st.integers(0, most)
        schedule = [(1, middle, draw(ks)), (middle + 1, reqs, draw(ks))]
    reduced = draw(st.sampled_from((None, 20))) if method is Method.EAGLE3 else None
    layers = draw(st.sampled_from((1, 1, 2)))
    if method is Method.MTP and layers > 1:
        layers = max(most, 2)
    varying = draw(st.sampled_from(((), (), (Role.TARGET,), (Role.TARGET, Role.DRAFT_PREFILL))))
    return Speculative(
        method=method,
        num_tokens=most,
        schedule=tuple(schedule),
        model=DraftModel(num_layers=layers, vocab_size=reduced),
        chain=draw(st.sampled_from(Chain)),
        parallel_drafting=draw(st.sampled_from((False, method is not Method.MTP))),
        varying_decodes=varying,
    )


def _sizes(reqs: int) -> SearchStrategy[Sizes]:
    few = st.sets(st.integers(1, 24), min_size=1, max_size=4).map(lambda sizes: tuple(sorted(sizes)))
    some = st.sets(st.integers(1, reqs), min_size=1, max_size=3).map(lambda sizes: tuple(sorted(sizes)))
    return st.one_of(
        st.just(Sizes()),
        st.builds(Sizes, policy=st.just(Policy.POWERS_OF_TWO)),
        st.builds(Sizes, policy=st.just(Policy.MINIMAX), graphs=st.integers(1, 3)),
        st.builds(Sizes, policy=st.just(Policy.EXPLICIT), num_tokens=few, num_reqs=some),
    )


@st.composite
def requests_for(draw: DrawFn, spec: Spec, *, most: int = 6) -> Sequence[Request]:
    """Return a few requests that a deployment can serve: any lengths, all tokens, a few arrivals."""
    longest = spec.model.max_model_len
    made = []
    for index in range(draw(st.integers(1, most))):
        prompt = draw(st.integers(1, longest - 1))
        made.append(
            Request(
                name=f"r{index}",
                arrival=draw(st.sampled_from((0.0, 0.0, 0.02, 0.05))),
                prompt=tuple(draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=prompt, max_size=prompt))),
                max_new_tokens=draw(st.integers(1, min(longest - prompt, 12))),
                stop=frozenset(draw(st.sampled_from(((), (), (3, 5, 7, 11, 13))))),
            )
        )
    return tuple(made)
