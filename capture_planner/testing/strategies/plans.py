"""Plans, as the planner makes them or with arbitrary graphs, and the batches that they admit."""

from __future__ import annotations

import functools

import attrs
from hypothesis import assume, reject
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import replace
from capture_planner.records.backend import Workspace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import decode_families
from capture_planner.records.fingerprint import Fingerprint, Fingerprints, digest_of, kernel_name
from capture_planner.records.plan import Decision, Forecast, GroupPlan, Plan, RolePlan, Waiver
from capture_planner.records.promise import ExpectedSteps, Promise, PromisedSteps
from capture_planner.records.spec import CapturePolicy
from capture_planner.testing.strategies.machines import SUPPORTS, deployments, environments, padding_contracts
from capture_planner.testing.strategies.specs import specs
from capture_planner.testing.strategies.values import (
    BACKENDS,
    BYTE_COUNTS,
    TEXTS,
    VERSIONS,
    composite,
    counts,
    list_of,
    maybe,
    one_of,
    record_of,
    records,
)


@composite
def plans(draw: DrawFn, *, max_reqs: int = 64, max_tokens: int = 4096, varying: bool = True) -> Plan:
    """Return plans that the planner made.

    :param varying: whether decodes may vary in length, which no engine takes.
    """
    try:
        return draw(deployments(max_reqs=max_reqs, max_tokens=max_tokens, varying=varying)).plan()
    # Some specs have no plan on the machine that was drawn: FULL on a backend that has no full graphs.
    except PlanningError:
        reject()


@functools.cache
def entries(lora: bool, *, varying: bool = True) -> SearchStrategy[Entry]:
    """Return graphs as no planner would make them: any extents together; those of varying decodes if ``varying``."""
    shapes = {
        "num_tokens": counts(),
        "query_len": maybe(one_of((1, 2, 3, 4))),
        "active_loras": one_of((0, 1, 2, 4, 5)) if lora else st.just(0),
        "draft_steps": st.none() | st.integers(1, 3),
    }
    anything = st.builds(Entry, mode=one_of((GraphMode.FULL, GraphMode.PIECEWISE)), num_reqs=maybe(counts()), **shapes)
    aligned = anything.map(
        lambda e: attrs.evolve(e, num_reqs=e.num_tokens, num_tokens=e.num_tokens * (e.query_len or 1))
    )
    if not varying:
        return anything | aligned
    of_varying = anything.map(
        lambda e: attrs.evolve(
            e,
            mode=GraphMode.FULL,
            num_reqs=e.num_tokens,
            num_tokens=e.num_tokens * (e.query_len or 2),
            query_len=None,
            max_query_len=e.query_len or 2,
        )
    )
    return anything | aligned | of_varying


@composite
def _waivers(draw: DrawFn, varying: bool) -> Waiver:
    first = draw(st.integers(0, 64))
    return record_of(
        draw,
        Waiver,
        query_len=draw(maybe(st.integers(1, 4))),
        max_query_len=draw(st.none() | st.integers(1, 4)) if varying else None,
        # An observation alone has batches of which nothing is known.
        reason=draw(one_of([reason for reason in Reason if reason is not Reason.UNKNOWN])),
        first=first,
        last=first + draw(st.integers(0, 64)),
        min_loras=draw(st.integers(0, 2)),
        max_loras=draw(st.integers(0, 6)),
    )


_WORKSPACES = st.builds(Workspace, device=BYTE_COUNTS, pinned=BYTE_COUNTS, formula=TEXTS)
_GROUPS = records(
    GroupPlan, backend=one_of(BACKENDS), support=SUPPORTS, workspace=_WORKSPACES, padding=padding_contracts()
)


@composite
def _role_plans(draw: DrawFn, role: Role, lora: bool, lazy: bool, varying: bool) -> RolePlan:
    graphs = draw(list_of(entries(lora, varying=varying), max_size=12))
    return record_of(
        draw,
        RolePlan,
        role=role,
        groups=tuple(draw(list_of(_GROUPS, max_size=2))),
        decisions=tuple(draw(list_of(records(Decision), max_size=2))),
        entries=tuple(graphs),
        lazy=tuple(draw(st.lists(st.sampled_from(graphs), max_size=3))) if lazy and graphs else (),
        waivers=tuple(draw(list_of(_waivers(varying), max_size=2))),
        inputs=draw(padding_contracts()).fields,
    )


_FORECASTS = records(Forecast, objective=one_of(("mean", "token", "p99", "regret")), regret=one_of((-0.01, 0.0, 0.5)))


_RAN = one_of((GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL))
_PROMISED = records(PromisedSteps, mode=_RAN, first=st.integers(1, 64), last=st.integers(64, 512))
_EXPECTED = records(ExpectedSteps, rows=st.lists(_PROMISED, max_size=4).map(tuple))
_PROMISES = records(Promise, before=_EXPECTED, after=_EXPECTED)


@composite
def _fingerprints(draw: DrawFn, plan: Plan) -> Fingerprints:
    """Return fingerprints of some graphs of a plan."""
    graphs = [(role.role, index) for role in plan.roles for index in range(len(role.entries))]
    chosen = draw(st.lists(st.sampled_from(graphs), max_size=3, unique=True)) if graphs else []
    names = st.sampled_from(("kernel", "void gemm<128, 64>(float*)", "aten.add.Tensor", "k" * 300))
    found = {
        graph: Fingerprint(
            nodes=draw(st.integers(0, 1000)),
            kernels={
                kernel_name(name): count for name, count in draw(st.dictionaries(names, st.integers(1, 99))).items()
            },
            topology=digest_of(draw(st.integers(0, 3))),
        )
        for graph in chosen
    }
    return Fingerprints.of(found, torch=draw(VERSIONS), device=draw(TEXTS))


@composite
def arbitrary_plans(draw: DrawFn, *, max_tokens: int = 4096, varying: bool = True) -> Plan:
    """Return valid plans as a person could write them, however unwise: overlaps, holes, any order.

    :param varying: whether decodes, and graphs of them, may vary in length.
    """
    spec = draw(specs(max_reqs=64, max_tokens=max_tokens, varying=varying))
    roles = draw(list_of(one_of(Role), min_size=1, unique=True))
    environment, lora = draw(environments()), spec.lora is not None
    lazy = spec.capture.policy is CapturePolicy.LAZY
    written = tuple(draw(_role_plans(role, lora, lazy, varying)) for role in roles)
    plan = Plan.of(spec, environment, written, forecast=draw(maybe(_FORECASTS)))
    return replace(plan, fingerprints=draw(maybe(_fingerprints(plan))), promise=draw(maybe(_PROMISES)))


@st.composite
def batches(draw: DrawFn, plan: Plan, role: Role | None = None) -> Batch:
    """Return batches for a plan: admissible ones and others, biased to the edges of its sizes.

    Of one role where it is given, else of any that the plan has.
    """
    assume(plan.roles)
    planned = draw(st.sampled_from(plan.roles)) if role is None else plan.role(role)
    families = decode_families(planned.role, plan)
    edges = {1, plan.limits.max_num_reqs} | {entry.num_reqs or entry.num_tokens for entry in planned.entries}
    for family in families:
        edges |= {edge for interval in family.requests.intervals for edge in interval}
    # Answers change at these edges.
    near = st.sampled_from([edge + shift for edge in sorted(edges) for shift in (-1, 0, 1)])
    num_reqs = draw(near | st.integers(-1, plan.limits.max_num_reqs + 2))
    lengths = (
        {1} | {family.query_len for family in families} | {each for e in planned.entries if (each := e.tokens_each)}
    )
    query_len = draw(st.none() | st.sampled_from(sorted(lengths)) | st.integers(0, 5))
    totals = {plan.limits.max_num_tokens} | {entry.num_tokens for entry in planned.entries}
    any_total = st.sampled_from([total + shift for total in sorted(totals) for shift in (-1, 0, 1)])
    total: SearchStrategy[int] = any_total | st.integers(num_reqs, num_reqs + 64)
    if query_len is not None:
        # Mostly the total that the length gives; other ones are inadmissible, and are asked about too.
        total = st.just(num_reqs * query_len) | st.just(num_reqs * query_len) | total
    longest = draw(st.none() | st.integers(0, 5) | st.sampled_from(sorted(lengths)))
    if query_len is None and longest is not None:
        total = st.integers(num_reqs, max(num_reqs, num_reqs * longest)) | total
    # One more than the active adapters: requests without one count as another.
    most_loras = 0 if plan.lora is None else plan.lora.max_active + 1
    return Batch(
        role=planned.role,
        num_reqs=num_reqs,
        num_tokens=draw(total),
        query_len=query_len,
        past_prompt=draw(st.booleans()),
        active_loras=draw(st.just(0) | st.integers(0, most_loras) | st.integers(-1, most_loras + 1)),
        max_query_len=longest,
    )
