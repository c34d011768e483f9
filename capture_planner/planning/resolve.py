"""The mode ladder: from the requested mode down to one that every backend of a role can run.

Source of the rules: vLLM 0.33.0 ``CompilationConfig.resolve_cudagraph_mode_and_sizes``, and its
EAGLE speculator for drafters. Each downgrade is a Decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from capture_planner.errors import PlanningError, Problem
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.records._base import replace
from capture_planner.records.backend import Support
from capture_planner.records.batch_space import max_query_len
from capture_planner.records.plan import Decision
from capture_planner.records.spec import Piecewise, Spec
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
    """A resolved mode, and the downgrades that led to it."""

    mode: GraphMode
    decisions: tuple[Decision, ...] = ()


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
            decision = Decision(
                rule="varying-decode-target", before="varying", after="uniform", role=role, message=message
            )
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
        requested = wanted or spec.mode
        return requested, resolve(role, requested, groups, max_query_len=query_len, piecewise=spec.piecewise)
    assert spec.speculative is not None, "a drafter's role is active"
    if (reason := spec.speculative.model.eager_because) is not None:
        return target, resolve_eager_drafter(role, target, reason)
    if role is Role.DRAFT_DECODE:
        return target, resolve_draft_decode(target, wanted, groups)
    modules = spec.speculative.is_modules
    return target, resolve_draft_prefill(
        target, wanted, groups, max_query_len=query_len, piecewise=spec.piecewise, modules=modules
    )


def weakest(groups: Sequence[GroupSupport]) -> GroupSupport:
    """Return the group that decides for the role: the first one with the lowest support."""
    return min(groups, key=lambda group: group.support.level)


@attrs.define
class _Ladder:
    """A mode while it is resolved."""

    role: Role
    cause: GroupSupport
    mode: GraphMode
    decisions: list[Decision] = attrs.field(factory=list)

    def step(self, rule: str, after: GraphMode, message: str, *, backend: bool = True) -> None:
        if after is self.mode:
            return
        cause = {"backend": self.cause.backend, "group": self.cause.group} if backend else {}
        before, self.mode = self.mode.value, after
        self.decisions.append(
            Decision(rule=rule, before=before, after=after.value, role=self.role, message=message, **cause)
        )


def resolve(
    role: Role, requested: GraphMode, groups: Sequence[GroupSupport], *, max_query_len: int, piecewise: Piecewise
) -> ResolvedMode:
    """Lower ``requested`` to what the weakest of ``groups`` can run. Idempotent.

    :param max_query_len: the longest uniform decode of the role, in tokens.
    :raises PlanningError: FULL is requested of a target whose backend has no full graphs at all.
        vLLM refuses that too; a drafter is lowered instead.
    """
    cause = weakest(groups)
    level = cause.support.level
    why = f"{cause.backend} declares {level.name}: {cause.support.reason}"
    ladder = _Ladder(role, cause, requested)
    # Where attention cannot be split out of the graph there are no piecewise graphs to fall back on.
    split = piecewise.split_attention

    if ladder.mode.mixed_mode is _FULL and level < GraphSupport.ALWAYS:
        if level is GraphSupport.NEVER and role is Role.TARGET:
            message = f"{requested.value} is not possible: {why.rstrip('.')}"
            remedy = "request PIECEWISE or FULL_AND_PIECEWISE, or choose another backend"
            raise PlanningError([Problem(path=("mode",), message=message, remedy=remedy)])
        after = GraphMode.FULL_AND_PIECEWISE if split else GraphMode.FULL_DECODE_ONLY
        ladder.step("mixed-full-unsupported", after, f"full graphs of mixed batches need ALWAYS, but {why}")
    if ladder.mode.decode_mode is _FULL and level is GraphSupport.NEVER:
        after = _PIECEWISE if split else _NONE
        ladder.step("decode-full-unsupported", after, f"full graphs are not possible: {why}")
    if ladder.mode.decode_mode is _FULL and max_query_len > 1 and level < GraphSupport.UNIFORM_BATCH:
        after = _PIECEWISE if split else _NONE
        message = f"decodes of {counted(max_query_len, 'token')} need UNIFORM_BATCH, but {why}"
        ladder.step("speculative-decode-unsupported", after, message)
    if ladder.mode.has_piecewise and not piecewise.capturable:
        ladder.step(
            "piecewise-not-capturable",
            ladder.mode.without_piecewise,
            "the spec says that the model cannot be captured between attention layers",
            backend=False,
        )
    return ResolvedMode(mode=ladder.mode, decisions=tuple(ladder.decisions))


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
    start, lowered = _lowered(Role.DRAFT_PREFILL, target, wanted)
    resolved = resolve(Role.DRAFT_PREFILL, start, groups, max_query_len=max_query_len, piecewise=piecewise)
    ladder = _Ladder(Role.DRAFT_PREFILL, weakest(groups), resolved.mode)
    if modules:
        message = "between two modules tokens are drafted for each request, and PIECEWISE does not pad requests"
        ladder.step("modules-never-piecewise", resolved.mode.without_piecewise, message, backend=False)
    return ResolvedMode(mode=ladder.mode, decisions=(*lowered, *resolved.decisions, *ladder.decisions))


def resolve_draft_decode(target: GraphMode, wanted: GraphMode | None, groups: Sequence[GroupSupport]) -> ResolvedMode:
    """Resolve later draft positions: FULL_DECODE_ONLY, or NONE. Never PIECEWISE.

    PIECEWISE pads tokens but not requests, so a backend that indexes by request would read entries
    of an earlier, larger batch (vllm#39773).
    """
    start, lowered = _lowered(Role.DRAFT_DECODE, target, wanted)
    cause = weakest(groups)
    ladder = _Ladder(Role.DRAFT_DECODE, cause, start, list(lowered))
    if start.decode_mode is not _FULL:
        message = (
            f"the target's decodes run {start.decode_mode.value}, but draft decodes need full graphs: "
            "PIECEWISE does not pad requests"
        )
        ladder.step("draft-decode-never-piecewise", _NONE, message, backend=False)
    else:
        message = "every draft decode is a uniform decode of one token"
        ladder.step("draft-decode-only", GraphMode.FULL_DECODE_ONLY, message, backend=False)
    if cause.support.level is GraphSupport.NEVER:
        message = f"full graphs are not possible: {cause.backend} declares NEVER: {cause.support.reason}"
        ladder.step("decode-full-unsupported", _NONE, message)
    return ResolvedMode(mode=ladder.mode, decisions=tuple(ladder.decisions))


def resolve_varying(role: Role, mode: GraphMode, groups: Sequence[GroupSupport]) -> Decision | None:
    """Return why the decodes of a role cannot vary in length, or None if they can.

    A full graph of them needs what one of mixed batches needs: kernels that read where each request begins on the
    device. PIECEWISE and eager decodes run attention on the real requests, whatever their lengths.

    :param mode: the role's, as resolved.
    """
    cause = weakest(groups)
    if mode.decode_mode is not _FULL or cause.support.level is GraphSupport.ALWAYS:
        return None
    return Decision(
        rule="varying-decode-unsupported",
        before="varying",
        after="uniform",
        role=role,
        backend=cause.backend,
        group=cause.group,
        message="full graphs of decodes whose requests differ in tokens need ALWAYS, but "
        f"{cause.backend} declares {cause.support.level.name}: {cause.support.reason}",
    )


def resolve_eager_drafter(role: Role, target: GraphMode, reason: str) -> ResolvedMode:
    """Resolve a role of a drafter that no graph can hold to NONE, with the drafter's reason (if there were graphs)."""
    if target is _NONE:
        return ResolvedMode(mode=_NONE)
    message = f"the drafter has no graphs: {reason}"
    step = Decision(
        rule="drafter-without-graphs", before=target.value, after=_NONE.value, role=role, message=message[:500]
    )
    return ResolvedMode(mode=_NONE, decisions=(step,))


def _lowered(role: Role, target: GraphMode, wanted: GraphMode | None) -> tuple[GraphMode, tuple[Decision, ...]]:
    """Return where a drafter starts: the target's resolved mode, or a lower one that the spec requests."""
    if wanted is None or wanted is target:
        return target, ()
    less = wanted < target
    decision = Decision(
        rule="role-asks-for-less" if less else "role-asks-for-more",
        before=target.value,
        after=(wanted if less else target).value,
        role=role,
        message=f"the spec requests {wanted.value} for this role, the target resolved to {target.value}: "
        + ("the lower mode is used" if less else "a drafter's mode is never above its target's"),
    )
    return min(wanted, target), (decision,)
