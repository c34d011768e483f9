"""plan(spec, environment, registry) -> Plan: one pass from the spec to the decisions.

For each role the backends declare their support, the mode is resolved and ladders are chosen. The
budget is then applied to all ladders at once, and the result is written as entries and waivers.

A ladder serves all counts up to its last size, so what is waived is always a tail: decodes of more requests, mixed
batches of more tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from capture_planner import codec
from capture_planner.errors import InvalidDocument, PlanningError, Problem
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.measured import choose, choose_schedule, leave_to_first_use
from capture_planner.planning.resolve import Group, ask_backends, fewest_graphs, resolve_roles
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder, fit, total
from capture_planner.planning.sizing.budget import PRICE_RULE, price_of
from capture_planner.plugins.registry import Registry, load_backends
from capture_planner.records._base import replace
from capture_planner.records.backend import (
    COMMON_FIELDS,
    DECODE_CONTEXT_FIELDS,
    LORA_FIELDS,
    MROPE_FIELDS,
    PARALLEL_FIELDS,
    SPECULATIVE_FIELDS,
    STATE_FIELDS,
    MetadataField,
    data_parallel_fields,
)
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.batch_space import DecodeFamily, lora_cases, most_tokens, split_when
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method
from capture_planner.records.plan import MAX_GRAPHS, MAX_SIZES, GroupPlan, Plan, RolePlan, Waiver
from capture_planner.records.spec import CapturePolicy, Policy, Spec
from capture_planner.records.text import counted

__all__ = ["plan"]


def plan(
    spec: Spec, environment: Environment, registry: Registry | None = None, measurements: Measurements | None = None
) -> Plan:
    """Return the plan of ``spec`` for ``environment``. Deterministic; needs neither torch nor a device.

    :param registry: the backends; the installed ones by default, as ``load_backends()`` finds them.
    :param measurements: what measured sizes and a measured schedule are chosen by, from ``codec.load_measurements``.
    :raises PlanningError: a mode is not possible, a backend is not installed, there are too many graphs, or measured
        sizes or a measured schedule are wanted without measurements.
    :raises BackendError: a backend breaks its contract.
    """
    if spec.sizes.policy is Policy.MEASURED and (measurements is None or measurements.traffic is None):
        message = "the policy measured needs a traffic and a profile"
        remedy = "name their files in sizes.traffic and sizes.profile, and pass codec.load_measurements(spec file)"
        raise PlanningError([Problem(path=("sizes",), message=message, remedy=remedy)])
    registry = load_backends() if registry is None else registry
    resolved, roles = _resolved(spec, environment, registry)
    load = measurements
    if resolved.speculative is not None and resolved.speculative.is_measured:
        schedule = choose_schedule(resolved, _modes(roles), measurements)
        load = schedule.measurements
        # Other draft lengths may need other modes, so the roles are resolved again.
        resolved, roles = _resolved(replace(resolved, speculative=schedule.speculative), environment, registry)
        # The modes were resolved for these draft lengths, so their decisions come first.
        roles[0].decisions[:0] = schedule.decisions
    for working in roles:
        working.choose_ladders(load)
    measured = choose(resolved, roles, load) if load is not None and spec.sizes.policy is Policy.MEASURED else None
    if measured is None:
        _fit_bounds(resolved, roles)
    else:
        sized = iter(measured.ladders)
        for working in roles:
            working.ladders = tuple(next(sized) for _ in working.ladders)
            working.decisions += [decision for decision in measured.decisions if decision.role is working.role]
    has_graphs = any(ladder.sizes for ladder in _ladders(roles))
    for working in roles:
        # A target without graphs next to a drafter with some keeps its mode: a drafter's is never above its target's.
        if working.role.is_drafter or not has_graphs:
            working.settle_mode()
    # Checked before the entries are made: there may be far too many.
    _refuse_excess(roles)
    if resolved.capture.policy is CapturePolicy.LAZY:
        leave_to_first_use(resolved, roles, load)
    written = tuple(map(_written, roles))
    forecast = None
    if measured is not None and measurements is not None:
        # By the files that were given: the traffic of ``load`` is rewritten for the schedule.
        forecast = measured.forecast(_modes(roles), measurements)
    made = Plan.of(spec, environment, written, forecast=forecast, speculative=resolved.speculative)
    _refuse_unreadable(made)
    return made


def _resolved(spec: Spec, environment: Environment, registry: Registry) -> tuple[Spec, list[RoleInProgress]]:
    """Return the spec with the roles whose decodes can vary, and each role with its backends and its resolved mode."""
    groups = {role: ask_backends(spec, role, environment, registry) for role in spec.active_roles}
    spec, modes = resolve_roles(spec, groups)
    return spec, [RoleInProgress(spec, environment, role, groups[role], *modes[role]) for role in groups]


def _modes(roles: Iterable[RoleInProgress]) -> dict[Role, GraphMode]:
    return {working.role: working.mode for working in roles}


def _fit_bounds(spec: Spec, roles: Sequence[RoleInProgress]) -> None:
    """Drop graphs beyond what backends hold and the budget allows, with one decision on what the budget costs."""
    for working in roles:
        group = fewest_graphs(working.groups)
        if group is not None:
            most, name = group.support.max_graphs, group.registered.name
            full = [ladder for ladder in working.ladders if ladder.mode is GraphMode.FULL]
            why = f"{name} can hold {most} full graphs"
            _fit([working], full, most, Reason.BACKEND_CAP, "backend-max-graphs", why, name)
    # Taken after the backends' limits: what a backend cannot hold is not the budget's cost.
    wanted = _ladders(roles)
    for kind in Kind:
        alike = [ladder for ladder in _ladders(roles) if ladder.kind is kind]
        _fit(roles, alike, spec.budget.allowed_of(kind), Reason.BUDGET, "budget")
    # Kinds first: what their limits drop leaves room within the limit on all.
    bound = spec.budget.allowed_graphs()
    _fit(roles, _ladders(roles), None if bound is None else bound[0], Reason.BUDGET, "budget")
    left = _ladders(roles)
    if left != wanted:
        before, after = (counted(total(each), "graph") for each in (wanted, left))
        roles[0].decide(PRICE_RULE, before, after, price_of(spec.budget, wanted, left))


def _fit(
    roles: Sequence[RoleInProgress],
    ladders: Sequence[Ladder],
    allowed: int | None,
    reason: Reason,
    rule: str,
    why: str = "",
    backend: str | None = None,
) -> None:
    """Thin some ladders of the roles until they have at most ``allowed`` graphs together; None: no bound."""
    if allowed is not None and total(ladders) > allowed:
        fitted = dict(zip(ladders, fit(ladders, allowed, reason), strict=True))
        for working in roles:
            working.refit([fitted.get(ladder, ladder) for ladder in working.ladders], rule, why, backend)


def _ladders(roles: Iterable[RoleInProgress]) -> list[Ladder]:
    return [ladder for working in roles for ladder in working.ladders]


def _refuse_excess(roles: Sequence[RoleInProgress]) -> None:
    """Refuse far more graphs than any engine captures: neither the plan's file nor the capture would be usable."""
    ladders = _ladders(roles)
    sizes, graphs = sum(len(ladder.sizes) for ladder in ladders), total(ladders)
    if sizes > MAX_SIZES or graphs > MAX_GRAPHS:
        message = f"{sizes} sizes and {graphs} graphs; a plan has at most {MAX_SIZES} and {MAX_GRAPHS}"
        remedy = "set budget.max_graphs, or choose a policy with fewer sizes"
        raise PlanningError([Problem(path=("sizes",), message=message, remedy=remedy)])


def _refuse_unreadable(made: Plan) -> None:
    """Refuse a plan whose file no command would read. Only a large one is written to see it: that takes long."""
    groups = sum(len(role.groups) for role in made.roles)
    decisions = sum(len(role.decisions) for role in made.roles)
    if 100 * groups + 10 * decisions + made.num_graphs + made.num_lazy < _SURELY_READABLE:
        return
    try:
        codec.loads(codec.dumps(made), Plan)
    except InvalidDocument as error:
        message = f"no command could read its plan: {error.problems[0].message}"
        remedy = "join attention groups, or have fewer sizes"
        raise PlanningError([Problem(path=("roles",), message=message, remedy=remedy)]) from None


_SURELY_READABLE = 8_000
"""Values: half of what a file may have, to be far from it."""


def _written(working: RoleInProgress) -> RolePlan:
    entries = tuple(entry for ladder in working.ladders for entry in ladder.entries())
    return RolePlan(
        role=working.role,
        requested=working.requested,
        mode=working.mode,
        groups=tuple(_group(working, group, entries) for group in working.groups),
        decisions=tuple(working.decisions),
        entries=entries,
        lazy=working.lazy,
        waivers=waivers(working),
        inputs=tuple(_inputs(working)),
    )


def _inputs(working: RoleInProgress) -> Iterator[MetadataField]:
    """Yield the inputs of a role's graphs besides those of its backends."""
    spec, speculative, parallel = working.spec, working.spec.speculative, working.spec.parallel
    yield from COMMON_FIELDS
    if working.role is Role.TARGET:
        yield from () if speculative is None else SPECULATIVE_FIELDS
        yield from MROPE_FIELDS if spec.model.mrope else ()
        yield from () if spec.model.recurrent is None else STATE_FIELDS
        yield from () if spec.lora is None else LORA_FIELDS
    elif working.role is Role.DRAFT_PREFILL and speculative is not None and speculative.parallel_drafting:
        # A draft model (PARD) reads no hidden states of the target.
        yield from () if speculative.method is Method.DRAFT_MODEL else PARALLEL_FIELDS
    if parallel.data > 1:
        yield from data_parallel_fields(parallel.data)
    if parallel.decode_context > 1:
        yield from DECODE_CONTEXT_FIELDS


def _group(working: RoleInProgress, group: Group, entries: tuple[Entry, ...]) -> GroupPlan:
    backend, context = group.registered, (working.role, group.attention, working.environment)
    return GroupPlan(
        name=group.spec.name,
        layers=group.spec.layers,
        window=group.spec.window,
        backend=backend.name,
        distribution=backend.distribution,
        version=backend.version,
        support=group.support,
        padding=backend.padding(*context),
        workspace=backend.workspace(*context, entries, working.spec.limits),
    )


# Waivers -----------------------------------------------------------------------------------------


_WHY = {
    Reason.MODE: "the resolved mode has no graph for them",
    Reason.SIZES: "the size policy ends below them",
    Reason.BACKEND_CAP: "the backend cannot capture that many requests",
    Reason.BUDGET: "their graphs were dropped to meet the budget",
}

_NAMES = {Kind.DECODE: "decodes of {} to {} requests", Kind.MIXED: "mixed batches of {} to {} tokens"}

_OF_MOST_TOKENS = "decodes of {} to {} requests that no graph of mixed batches has the tokens for"
"""Varying decodes: those of few tokens may fit where the largest do not."""


def waivers(working: RoleInProgress) -> tuple[Waiver, ...]:
    """Return the waivers of a role whose ladders are final."""
    tails = list(_decode_tails(working))
    # A draft decode never has prompts.
    if working.role is not Role.DRAFT_DECODE:
        tails += _mixed_tails(working)
    has_mixed, loras = working.mixed_ladder is not None, lora_cases(working.role, working.spec)[-1]
    return tuple(replace(each, message=_message(each, has_mixed=has_mixed), max_loras=loras) for each in tails)


def _message(tail: Waiver, *, has_mixed: bool) -> str:
    name = _OF_MOST_TOKENS if tail.max_query_len is not None and has_mixed else _NAMES[tail.kind]
    why = f"{name.format(tail.first, tail.last)} run eager: {_WHY[tail.reason]}"
    return f"{why}; {tail.message}" if tail.message else why


def _decode_tails(working: RoleInProgress) -> Iterator[Waiver]:
    """Yield the decodes that no entry serves, adjacent ranges with the same reason merged; messages are prices."""
    tails = []
    for family in working.families:
        reach, reason, price = _decode_reach(working, family)
        length = {"max_query_len" if family.varies else "query_len": family.query_len}
        tails += [
            Waiver(kind=Kind.DECODE, first=first, last=last, reason=reason, message=price, **length)
            for first, last in family.requests.above(reach).intervals
        ]

    def apart(before: Waiver, after: Waiver) -> bool:
        return replace(before, first=before.last + 1, last=after.last) != after

    by_length = sorted(tails, key=lambda tail: (tail.query_len or tail.max_query_len or 0, tail.first))
    for run in split_when(apart, by_length):
        yield replace(run[0], last=run[-1].last)


def _decode_reach(working: RoleInProgress, family: DecodeFamily) -> tuple[int, Reason, str]:
    """Return the most requests that an entry serves, why none serves more, and the price of that."""
    alike = [ladder for ladder in working.ladders if ladder.query_len == family.query_len]
    serving = [ladder for ladder in alike if ladder.draft_steps in (None, family.draft_steps)]
    mixed, own = working.mixed_ladder, max(serving, key=lambda ladder: ladder.sizes[-1:], default=None)
    reach = own.sizes[-1] if own is not None and own.sizes else 0
    # Graphs of mixed batches serve decodes too; FULL ones hold no more requests than they were captured with.
    if mixed is not None and mixed.sizes:
        tokens = mixed.sizes[-1] // family.query_len
        reach = max(reach, min(tokens, mixed.max_num_reqs) if mixed.mode is GraphMode.FULL else tokens)
    ladder = own or mixed
    reason = Reason.MODE if ladder is None else ladder.cut or Reason.SIZES
    # The graphs of mixed batches hold no more requests then, whatever tokens they have.
    if own is None and mixed is not None and mixed.sizes and reach == mixed.max_num_reqs:
        reason = Reason.BACKEND_CAP
    return reach, reason, "" if ladder is None else ladder.price


def _mixed_tails(working: RoleInProgress) -> Iterator[Waiver]:
    ladder, limits = working.mixed_ladder, working.spec.limits
    last = most_tokens(working.role, working.spec)
    if ladder is None:
        yield Waiver(kind=Kind.MIXED, first=1, last=last, reason=Reason.MODE, message="")
        return
    top = ladder.sizes[-1] if ladder.sizes else 0
    most = ladder.max_num_reqs
    # A batch of few tokens may have more requests than a graph of its size holds.
    if most < min(top, limits.max_num_reqs):
        end = min(top, last)
        yield Waiver(kind=Kind.MIXED, first=most + 1, last=end, reason=Reason.BACKEND_CAP, message="")
    if top < last:
        reason = ladder.cut or Reason.SIZES
        yield Waiver(kind=Kind.MIXED, first=top + 1, last=last, reason=reason, message=ladder.price)
