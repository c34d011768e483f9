"""plan(spec, environment, registry) -> Plan: one pass from the spec to the decisions.

For each role the backends declare their support, the mode is resolved and ladders are chosen. The
budget is then applied to all ladders at once, and the result is written as entries and waivers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from capture_planner import codec
from capture_planner.errors import InvalidDocument, PlanningError, Problem
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning import price
from capture_planner.planning.answers import LadderAnswers, entry_of
from capture_planner.planning.costs import Costs
from capture_planner.planning.first_use import leave_to_first_use
from capture_planner.planning.groups import Group, ask_backends
from capture_planner.planning.judging import judge
from capture_planner.planning.measured import SizeChoice, forecast_of, measured_sizes
from capture_planner.planning.measured_schedule import choose_schedule
from capture_planner.planning.resolve import (
    ResolvedMode,
    resolve,
    resolve_draft_decode,
    resolve_draft_prefill,
    resolve_eager_drafter,
    resolve_varying,
)
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder, fit, total
from capture_planner.planning.waivers import waivers
from capture_planner.plugins.registry import Registry
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
from capture_planner.records.batch_space import max_query_len
from capture_planner.records.capture import CapturePolicy
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method
from capture_planner.records.plan import MAX_GRAPHS, MAX_SIZES, Decision, GroupPlan, Plan, RolePlan
from capture_planner.records.spec import Policy, Spec
from capture_planner.records.text import counted

__all__ = ["plan"]


def plan(spec: Spec, environment: Environment, registry: Registry, measurements: Measurements | None = None) -> Plan:
    """Return the plan of ``spec`` for ``environment``. Deterministic; needs neither torch nor a device.

    :param registry: the installed backends, from ``load_backends()``.
    :param measurements: what measured sizes and a measured schedule are chosen by, from ``codec.load_measurements``.
    :raises PlanningError: a mode is not possible, a backend is not installed, there are too many graphs, or measured
        sizes or a measured schedule are wanted without measurements.
    :raises BackendError: a backend breaks its contract.
    """
    if spec.sizes.policy is Policy.MEASURED and (measurements is None or measurements.traffic is None):
        message = "the policy measured needs a traffic and a profile"
        remedy = "name their files in sizes.traffic and sizes.profile, and pass codec.load_measurements(spec file)"
        raise PlanningError([Problem(path=("sizes",), message=message, remedy=remedy)])
    wanted, given = spec, measurements
    spec, roles = _resolved(spec, environment, registry)
    if spec.speculative is not None and spec.speculative.is_measured:
        chosen = choose_schedule(spec, {working.role: working.mode for working in roles}, measurements)
        spec, measurements = replace(spec, speculative=chosen.speculative), chosen.measurements
        spec, roles = _resolved(spec, environment, registry)
        roles[0].decisions[:0] = chosen.decisions
    for working in roles:
        working.choose_ladders(None if measurements is None or measurements.traffic else measurements)
    if spec.sizes.policy is Policy.MEASURED:
        assert measurements is not None
        measured = _measure(spec, roles, measurements)
    else:
        measured = None
        for working in roles:
            working.fit_backend()
        _fit_budget(spec, roles)
    has_graphs = any(ladder.sizes for working in roles for ladder in working.ladders)
    for working in roles:
        # A target without graphs next to a drafter with some keeps its mode: a drafter's is never above its target's.
        if working.role.is_drafter or not has_graphs:
            working.settle_mode()
    _refuse_excess(roles)
    if spec.capture.policy is CapturePolicy.LAZY:
        leave_to_first_use(spec, roles, measurements)
    forecast = None
    if measured is not None:
        assert measurements is not None
        assert given is not None
        modes = {working.role: working.mode for working in roles}
        answer, costs = LadderAnswers(measured.ladders, spec), Costs(measurements.profile)
        forecast = forecast_of(spec, measured, judge(answer, measured.steps, costs, spec, modes), given)
    made = Plan.of(wanted, environment, tuple(map(_written, roles)), forecast=forecast, speculative=spec.speculative)
    _refuse_unreadable(made)
    return made


def _measure(spec: Spec, roles: Sequence[RoleInProgress], measurements: Measurements) -> SizeChoice:
    """Give the roles' ladders the sizes that cost least, with the decisions, and return the choice."""
    measured = measured_sizes(spec, roles, Costs(measurements.profile), measurements)
    ladders, sentences = iter(measured.ladders), iter(measured.sentences)
    for working in roles:
        count = len(working.ladders)
        working.measured([next(ladders) for _ in range(count)], [next(sentences) for _ in range(count)])
    for note in measured.notes:
        roles[0].decide("sizes-measured", "traffic and profile", "sizes", note)
    if measured.warning is not None:
        roles[0].decide("budget-too-small", "graphs", "none", measured.warning)
    return measured


def _resolved(spec: Spec, environment: Environment, registry: Registry) -> tuple[Spec, list[RoleInProgress]]:
    """Return each role with its backends and its resolved mode; the drafter's follow the target's.

    The spec is returned as it was resolved: with the roles whose decodes can vary in length.
    """
    found: list[tuple[Role, tuple[Group, ...], GraphMode, ResolvedMode]] = []
    for role in spec.active_roles:
        groups = ask_backends(spec, role, environment, registry)
        requested, resolved = _resolve(spec, role, groups, found[0][-1].mode if found else None)
        found.append((role, groups, requested, resolved))
    spec, uniform = _varying(spec, {role: (groups, resolved.mode) for role, groups, _, resolved in found})
    roles = [RoleInProgress(spec, environment, *each) for each in found]
    for working in roles:
        working.decisions += [decision for decision in uniform if decision.role is working.role]
    return spec, roles


def _varying(
    spec: Spec, roles: Mapping[Role, tuple[tuple[Group, ...], GraphMode]]
) -> tuple[Spec, tuple[Decision, ...]]:
    """Return the spec with the roles whose decodes can vary in length, and a decision for each that cannot."""
    if spec.speculative is None or not spec.speculative.varying_decodes:
        return spec, ()
    kept: list[Role] = []
    decisions = []
    for role in spec.speculative.varying_decodes:
        groups, mode = roles[role]
        decision = resolve_varying(role, mode, [group.for_resolution for group in groups])
        if decision is None and Role.TARGET not in (role, *kept):
            message = "the draft prefill follows the target's batch, whose decodes do not vary"
            decision = Decision(
                rule="varying-decode-target", before="varying", after="uniform", role=role, message=message
            )
        if decision is None:
            kept.append(role)
        else:
            decisions.append(decision)
    resolved = replace(spec.speculative, varying_decodes=tuple(kept))
    return replace(spec, speculative=resolved), tuple(decisions)


def _resolve(
    spec: Spec, role: Role, groups: Sequence[Group], target: GraphMode | None
) -> tuple[GraphMode, ResolvedMode]:
    """Return the requested mode of a role (a drafter's is its target's), and its resolution."""
    supports = [group.for_resolution for group in groups]
    wanted, query_len = spec.roles.of(role).mode, max_query_len(role, spec)
    if target is None:
        requested = wanted or spec.mode
        return requested, resolve(role, requested, supports, max_query_len=query_len, piecewise=spec.piecewise)
    if spec.speculative is not None and (reason := spec.speculative.model.eager_because) is not None:
        return target, resolve_eager_drafter(role, target, reason)
    if role is Role.DRAFT_PREFILL:
        return target, resolve_draft_prefill(
            target,
            wanted,
            supports,
            max_query_len=query_len,
            piecewise=spec.piecewise,
            modules=spec.speculative is not None and spec.speculative.is_modules,
        )
    return target, resolve_draft_decode(target, wanted, supports)


def _fit_budget(spec: Spec, roles: Sequence[RoleInProgress]) -> None:
    """Drop graphs beyond the budget; one decision of the first role says what that costs the plan."""
    wanted = [ladder for working in roles for ladder in working.ladders]
    _fit_kinds(spec, roles)
    bound = spec.budget.allowed_graphs()
    ladders = [ladder for working in roles for ladder in working.ladders]
    if bound is not None and total(ladders) > bound[0]:
        fitted = iter(fit(ladders, bound[0], Reason.BUDGET))
        for working in roles:
            working.refit([next(fitted) for _ in working.ladders], "budget")
    left = [ladder for working in roles for ladder in working.ladders]
    if left != wanted:
        before, after = (counted(total(each), "graph") for each in (wanted, left))
        roles[0].decide(price.RULE, before, after, price.price_of(spec.budget, wanted, left))


def _fit_kinds(spec: Spec, roles: Sequence[RoleInProgress]) -> None:
    for kind in Kind:
        alike = [ladder for working in roles for ladder in working.ladders if ladder.kind is kind]
        most = spec.budget.allowed_of(kind)
        if most is not None and total(alike) > most:
            rest = iter(fit(alike, most, Reason.BUDGET))
            for working in roles:
                kept = [next(rest) if ladder.kind is kind else ladder for ladder in working.ladders]
                working.refit(kept, "budget")


def _refuse_excess(roles: Sequence[RoleInProgress]) -> None:
    """Refuse far more graphs than any engine captures: neither the plan's file nor the capture would be usable."""
    ladders = [ladder for working in roles for ladder in working.ladders]
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
    entries = tuple(entry for ladder in working.ladders for entry in _entries(ladder))
    inputs: tuple[MetadataField, ...] = COMMON_FIELDS
    if working.role is Role.TARGET and working.spec.speculative is not None:
        inputs += SPECULATIVE_FIELDS
    speculative = working.spec.speculative
    if working.role is Role.DRAFT_PREFILL and speculative is not None and speculative.parallel_drafting:
        inputs += () if speculative.method is Method.DRAFT_MODEL else PARALLEL_FIELDS
    if working.role is Role.TARGET and working.spec.model.mrope:
        inputs += MROPE_FIELDS
    if working.role is Role.TARGET and working.spec.model.recurrent is not None:
        inputs += STATE_FIELDS
    if working.role is Role.TARGET and working.spec.lora is not None:
        inputs += LORA_FIELDS
    if working.spec.parallel.data > 1:
        inputs += data_parallel_fields(working.spec.parallel.data)
    if working.spec.parallel.decode_context > 1:
        inputs += DECODE_CONTEXT_FIELDS
    return RolePlan(
        role=working.role,
        requested=working.requested,
        mode=working.mode,
        groups=tuple(_group(working, group, entries) for group in working.groups),
        decisions=tuple(working.decisions),
        entries=entries,
        lazy=working.lazy,
        waivers=waivers(working),
        inputs=inputs,
    )


def _entries(ladder: Ladder) -> Iterator[Entry]:
    for size in ladder.sizes:
        for case in ladder.served(size):
            yield entry_of(ladder, size, case)


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
