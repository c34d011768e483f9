"""The mode ladder: from the requested mode down to one that every backend of a role can run, group by group.

Source of the rules: vLLM 0.33.0 ``CompilationConfig.resolve_cudagraph_mode_and_sizes``, and its
EAGLE speculator for drafters. Each downgrade is a Decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from capture_planner.errors import BackendError, PlanningError, Problem
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention, Support
from capture_planner.records.batch_space import max_query_len
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Decision
from capture_planner.records.spec import GroupSpec, Piecewise, Spec
from capture_planner.records.text import counted

_FULL, _NONE, _PIECEWISE = GraphMode.FULL, GraphMode.NONE, GraphMode.PIECEWISE


@attrs.frozen(kw_only=True)
class GroupSupport:
    """The support of one attention group of a role, according to its backend."""

    group: str
    backend: str
    support: Support


@attrs.frozen(kw_only=True)
class ResolvedMode:
    """A mode on its way down, and the downgrades that led to it."""

    role: Role
    mode: GraphMode
    decisions: tuple[Decision, ...] = ()

    def step(self, rule: str, after: GraphMode, message: str, cause: GroupSupport | None = None) -> ResolvedMode:
        """Return what follows from a rule, with its decision where the mode changes; ``cause``: the deciding group."""
        if after is self.mode:
            return self
        step = _decision(self.role, rule, self.mode.value, after.value, message, cause)
        return attrs.evolve(self, mode=after, decisions=(*self.decisions, step))


def _decision(
    role: Role, rule: str, before: str, after: str, message: str, cause: GroupSupport | None = None
) -> Decision:
    named = {} if cause is None else {"backend": cause.backend, "group": cause.group}
    return Decision(rule=rule, before=before, after=after, role=role, message=message, **named)


def resolve_roles(
    spec: Spec, supports: Mapping[Role, Sequence[GroupSupport]]
) -> tuple[Spec, dict[Role, tuple[GraphMode, ResolvedMode]]]:
    """Return the requested mode of each role (a drafter's is its target's), and its resolution.

    The spec is returned with the roles whose decodes can vary in length.

    :param supports: the attention groups of each role, the target's first.
    :raises PlanningError: as ``resolve``.
    """
    found: dict[Role, tuple[GraphMode, ResolvedMode]] = {}
    for role, groups in supports.items():
        found[role] = _resolve(spec, role, groups, found[Role.TARGET][1].mode if found else None)
    if spec.speculative is None or not spec.speculative.varying_decodes:
        return spec, found
    varying: list[Role] = []
    for role in spec.speculative.varying_decodes:
        requested, resolved = found[role]
        decision = resolve_varying(role, resolved.mode, supports[role])
        if decision is None and Role.TARGET not in (role, *varying):
            message = "the draft prefill follows the target's batch, whose decodes do not vary"
            decision = _decision(role, "varying-decode-target", "varying", "uniform", message)
        if decision is None:
            varying.append(role)
        else:
            found[role] = requested, attrs.evolve(resolved, decisions=(*resolved.decisions, decision))
    return replace(spec, speculative=replace(spec.speculative, varying_decodes=tuple(varying))), found


def _resolve(
    spec: Spec, role: Role, groups: Sequence[GroupSupport], target: GraphMode | None
) -> tuple[GraphMode, ResolvedMode]:
    wanted, query_len = spec.roles.of(role).mode, max_query_len(role, spec)
    if target is None:
        # The spec's mode is the target's; drafters start from what became of it.
        start = ResolvedMode(role=role, mode=wanted or spec.mode)
        return start.mode, resolve(start, groups, max_query_len=query_len, piecewise=spec.piecewise)
    assert spec.speculative is not None, "a drafter's role is active"
    if (reason := spec.speculative.model.eager_because) is not None:
        message = f"the drafter has no graphs: {reason}"
        return target, ResolvedMode(role=role, mode=target).step("drafter-without-graphs", _NONE, message)
    if role is Role.DRAFT_DECODE:
        return target, resolve_draft_decode(target, wanted, groups)
    modules = spec.speculative.is_modules
    return target, resolve_draft_prefill(
        target, wanted, groups, max_query_len=query_len, piecewise=spec.piecewise, modules=modules
    )


def weakest(groups: Sequence[GroupSupport]) -> GroupSupport:
    """Return the group that decides for the role: the first one with the lowest support."""
    return min(groups, key=lambda group: group.support.level)


def resolve(
    found: ResolvedMode, groups: Sequence[GroupSupport], *, max_query_len: int, piecewise: Piecewise
) -> ResolvedMode:
    """Lower a mode to what the weakest of ``groups`` can run. Idempotent.

    :param max_query_len: the longest uniform decode of the role, in tokens.
    :raises PlanningError: FULL is requested of a target whose backend has no full graphs at all.
        vLLM refuses that too; a drafter is lowered instead.
    """
    cause = weakest(groups)
    level, requested = cause.support.level, found.mode
    why = f"{cause.backend} declares {level.name}: {cause.support.reason}"
    # Where attention cannot be split out of the graph there are no piecewise graphs to fall back on.
    split = piecewise.split_attention
    without_full = _PIECEWISE if split else _NONE

    # Mixed batches first: the mode that they are lowered to may keep full graphs of decodes.
    if requested.mixed_mode is _FULL and level < GraphSupport.ALWAYS:
        if level is GraphSupport.NEVER and found.role is Role.TARGET:
            message = f"{requested.value} is not possible: {why.rstrip('.')}"
            remedy = "request PIECEWISE or FULL_AND_PIECEWISE, or choose another backend"
            raise PlanningError([Problem(path=("mode",), message=message, remedy=remedy)])
        after = GraphMode.FULL_AND_PIECEWISE if split else GraphMode.FULL_DECODE_ONLY
        message = f"full graphs of mixed batches need ALWAYS, but {why}"
        found = found.step("mixed-full-unsupported", after, message, cause)
    if found.mode.decode_mode is _FULL and level is GraphSupport.NEVER:
        found = found.step("decode-full-unsupported", without_full, f"full graphs are not possible: {why}", cause)
    # With speculation a decode verifies 1 + K tokens of each request.
    if found.mode.decode_mode is _FULL and max_query_len > 1 and level < GraphSupport.UNIFORM_BATCH:
        message = f"decodes of {counted(max_query_len, 'token')} need UNIFORM_BATCH, but {why}"
        found = found.step("speculative-decode-unsupported", without_full, message, cause)
    if found.mode.has_piecewise and not piecewise.capturable:
        message = "the spec says that the model cannot be captured between attention layers"
        found = found.step("piecewise-not-capturable", found.mode.without_piecewise, message)
    return found


def resolve_draft_prefill(
    target: GraphMode,
    wanted: GraphMode | None,
    groups: Sequence[GroupSupport],
    *,
    max_query_len: int,
    piecewise: Piecewise,
    modules: bool = False,
) -> ResolvedMode:
    """Resolve draft position 0: from the target's *resolved* mode, by its own backend's support.

    :param wanted: the mode that the spec requests for this role; it can lower the start, not raise it.
    :param modules: whether several modules draft after one another in this pass. They run without PIECEWISE, as in
        vLLM 0.33 (``MultiModuleMTPSpeculator.init_cudagraph_manager``): between two modules tokens are drafted for
        each request, and PIECEWISE does not pad requests.
    """
    start = _start(Role.DRAFT_PREFILL, target, wanted)
    found = resolve(start, groups, max_query_len=max_query_len, piecewise=piecewise)
    if not modules:
        return found
    message = "between two modules tokens are drafted for each request, and PIECEWISE does not pad requests"
    return found.step("modules-never-piecewise", found.mode.without_piecewise, message)


def resolve_draft_decode(target: GraphMode, wanted: GraphMode | None, groups: Sequence[GroupSupport]) -> ResolvedMode:
    """Resolve later draft positions: FULL_DECODE_ONLY, or NONE. Never PIECEWISE."""
    found, cause = _start(Role.DRAFT_DECODE, target, wanted), weakest(groups)
    # PIECEWISE does not pad requests: a backend would read entries of an earlier, larger batch (vllm#39773).
    if found.mode.decode_mode is not _FULL:
        message = (
            f"the target's decodes run {found.mode.decode_mode.value}, but draft decodes need full graphs: "
            "PIECEWISE does not pad requests"
        )
        found = found.step("draft-decode-never-piecewise", _NONE, message)
    else:
        message = "every draft decode is a uniform decode of one token"
        found = found.step("draft-decode-only", GraphMode.FULL_DECODE_ONLY, message)
    if cause.support.level is not GraphSupport.NEVER:
        return found
    message = f"full graphs are not possible: {cause.backend} declares NEVER: {cause.support.reason}"
    return found.step("decode-full-unsupported", _NONE, message, cause)


def resolve_varying(role: Role, mode: GraphMode, groups: Sequence[GroupSupport]) -> Decision | None:
    """Return why the decodes of a role cannot vary in length, or None if they can."""
    cause = weakest(groups)
    # PIECEWISE and eager decodes run attention on the real requests; a full graph of decodes that vary needs what one
    # of mixed batches needs: kernels that read on the device where each request begins.
    if mode.decode_mode is not _FULL or cause.support.level is GraphSupport.ALWAYS:
        return None
    message = (
        "full graphs of decodes whose requests differ in tokens need ALWAYS, but "
        f"{cause.backend} declares {cause.support.level.name}: {cause.support.reason}"
    )
    return _decision(role, "varying-decode-unsupported", "varying", "uniform", message, cause)


def _start(role: Role, target: GraphMode, wanted: GraphMode | None) -> ResolvedMode:
    """Return where a drafter starts: the target's resolved mode, or a lower one that the spec requests."""
    if wanted is None or wanted is target:
        return ResolvedMode(role=role, mode=target)
    # As in vLLM, a drafter starts from the target's resolved mode and is only lowered.
    less = wanted < target
    message = f"the spec requests {wanted.value} for this role, the target resolved to {target.value}: " + (
        "the lower mode is used" if less else "a drafter's mode is never above its target's"
    )
    after, rule = min(wanted, target), "role-asks-for-less" if less else "role-asks-for-more"
    return ResolvedMode(role=role, mode=after, decisions=(_decision(role, rule, target.value, after.value, message),))


# Attention groups --------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Group(GroupSupport):
    """An attention group while it is planned."""

    spec: GroupSpec
    registered: RegisteredBackend
    attention: Attention


def ask_backends(spec: Spec, role: Role, environment: Environment, registry: Registry) -> tuple[Group, ...]:
    """Return a role's attention groups and their support; raises ``PlanningError`` for a backend not installed."""
    groups = []
    for index, group in enumerate(groups_of(spec, role)):
        registered = _backend(spec, role, index, group, registry)
        attention = Attention.of(spec, role, layers=group.layers, window=group.window)
        support = registered.support(role, attention, environment)
        named = {"group": group.name, "backend": registered.name}
        groups.append(Group(spec=group, registered=registered, attention=attention, support=support, **named))
    return tuple(groups)


def _backend(spec: Spec, role: Role, index: int, group: GroupSpec, registry: Registry) -> RegisteredBackend:
    """Return a group's backend; where it is unknown, the error points to the place that names it."""
    wanted = spec.roles.of(role)
    path: tuple[str | int, ...]
    if group.backend is not None:
        name, path = group.backend, ("roles", role.value, "groups", index, "backend")
    elif wanted.backend is not None:
        name, path = wanted.backend, ("roles", role.value, "backend")
    else:
        name, path = spec.backend, ("backend",)
    try:
        return registry[name]
    except BackendError as error:
        raise PlanningError([Problem(path=path, message=str(error))]) from None


def fewest_graphs(groups: Iterable[Group]) -> Group | None:
    """Return the group whose backend can hold the fewest full graphs; None: no backend has a limit."""
    capped = [group for group in groups if group.support.max_graphs is not None]
    return min(capped, key=lambda group: group.support.max_graphs or 0, default=None)


def groups_of(spec: Spec, role: Role) -> tuple[GroupSpec, ...]:
    """Return the attention groups of a role: the spec's, or one group of all layers."""
    if groups := spec.roles.of(role).groups:
        return groups
    return (GroupSpec(name="all", layers=spec.num_layers(role)),)


def attentions(spec: Spec) -> Iterator[tuple[Role, str, Attention]]:
    """Yield role, group name and what the group asks of its backend, for every group."""
    for role in spec.active_roles:
        for group in groups_of(spec, role):
            yield role, group.name, Attention.of(spec, role, layers=group.layers, window=group.window)
