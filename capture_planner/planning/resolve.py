"""The mode ladder: from the mode that is wanted to one that every backend of a role can run.

Source of the rules: vLLM 0.33.0 ``CompilationConfig.resolve_cudagraph_mode_and_sizes``, and its
EAGLE speculator for drafters. Each step that changes anything is a Decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from capture_planner.errors import PlanningError, Problem
from capture_planner.modes import GraphMode, GraphSupport, Role
from capture_planner.records.backend import Support
from capture_planner.records.plan import Decision
from capture_planner.records.spec import Piecewise
from capture_planner.records.text import counted

_FULL, _NONE, _PIECEWISE = GraphMode.FULL, GraphMode.NONE, GraphMode.PIECEWISE


@attrs.frozen(kw_only=True)
class GroupSupport:
    """What one attention group of a role can do, and whose word that is."""

    group: str
    backend: str
    support: Support


@attrs.frozen(kw_only=True)
class Resolution:
    """A mode with the steps that led to it."""

    mode: GraphMode
    decisions: tuple[Decision, ...] = ()


def weakest(groups: Sequence[GroupSupport]) -> GroupSupport:
    """Return the group whose support decides for the role: the lowest, the first of equals."""
    return min(groups, key=lambda group: group.support.level)


@attrs.define
class _Ladder:
    """A mode on its way down."""

    role: Role
    cause: GroupSupport
    mode: GraphMode
    decisions: list[Decision] = attrs.field(factory=list)

    def step(self, rule: str, after: GraphMode, message: str, *, backend: bool = True) -> None:
        if after is self.mode:
            return
        self.decisions.append(
            Decision(
                rule=rule,
                before=self.mode.value,
                after=after.value,
                role=self.role,
                backend=self.cause.backend if backend else None,
                group=self.cause.group if backend else None,
                message=message,
            )
        )
        self.mode = after


def resolve(
    role: Role,
    requested: GraphMode,
    groups: Sequence[GroupSupport],
    *,
    max_query_len: int,
    piecewise: Piecewise,
) -> Resolution:
    """Step ``requested`` down to what the weakest of ``groups`` can run at ``max_query_len``.

    Idempotent, and never above the request. Raises ``PlanningError`` where FULL is wanted of a
    target whose backend has no full graphs at all, as vLLM does; a drafter steps down instead.
    """
    cause = weakest(groups)
    level, why = (
        cause.support.level,
        f"{cause.backend} has {cause.support.level.name}: {cause.support.reason}",
    )
    ladder = _Ladder(role, cause, requested)
    split = piecewise.split_attention

    if ladder.mode.mixed_mode is _FULL and level < GraphSupport.ALWAYS:
        if level is GraphSupport.NEVER and role is Role.TARGET:
            raise PlanningError(
                [
                    Problem(
                        path=("mode",),
                        message=f"{requested.value} is out of reach, {why}",
                        remedy="ask for PIECEWISE or FULL_AND_PIECEWISE, or choose another backend",
                    )
                ]
            )
        after = GraphMode.FULL_AND_PIECEWISE if split else GraphMode.FULL_DECODE_ONLY
        ladder.step("mixed-full-unsupported", after, f"mixed batches need ALWAYS, and {why}")
    if ladder.mode.decode_mode is _FULL and level is GraphSupport.NEVER:
        after = _PIECEWISE if split else _NONE
        ladder.step("decode-full-unsupported", after, f"no full graph is possible, as {why}")
    if ladder.mode.decode_mode is _FULL and max_query_len > 1 and level < GraphSupport.UNIFORM_BATCH:
        after = _PIECEWISE if split else _NONE
        ladder.step(
            "speculative-decode-unsupported",
            after,
            f"decodes of {counted(max_query_len, 'token')} need UNIFORM_BATCH, and {why}",
        )
    if ladder.mode.has_piecewise and not piecewise.capturable:
        ladder.step(
            "piecewise-not-capturable",
            ladder.mode.without_piecewise,
            "the pieces between attention cannot be captured for this model",
            backend=False,
        )
    return Resolution(mode=ladder.mode, decisions=tuple(ladder.decisions))


def resolve_draft_prefill(
    target: GraphMode,
    wanted: GraphMode | None,
    groups: Sequence[GroupSupport],
    *,
    max_query_len: int,
    piecewise: Piecewise,
) -> Resolution:
    """Resolve draft position 0: from the target's *resolved* mode down its own backend's ladder.

    ``wanted`` lowers the start where the spec asks for less; it never raises it.
    """
    start, lowered = _lowered(Role.DRAFT_PREFILL, target, wanted)
    resolved = resolve(Role.DRAFT_PREFILL, start, groups, max_query_len=max_query_len, piecewise=piecewise)
    return Resolution(mode=resolved.mode, decisions=lowered + resolved.decisions)


def resolve_draft_decode(
    target: GraphMode, wanted: GraphMode | None, groups: Sequence[GroupSupport]
) -> Resolution:
    """Resolve later draft positions: FULL_DECODE_ONLY, or NONE. Never PIECEWISE.

    PIECEWISE pads tokens but not requests, so a backend that indexes by request reads the stale
    entries of an earlier, larger batch (vllm#39773).
    """
    start, lowered = _lowered(Role.DRAFT_DECODE, target, wanted)
    cause = weakest(groups)
    ladder = _Ladder(Role.DRAFT_DECODE, cause, start, list(lowered))
    if start.decode_mode is not _FULL:
        ladder.step(
            "draft-decode-never-piecewise",
            _NONE,
            f"decodes of the target run {start.decode_mode.value}; a draft decode runs a full graph or none, "
            "because PIECEWISE pads tokens and not requests",
            backend=False,
        )
    else:
        ladder.step(
            "draft-decode-only",
            GraphMode.FULL_DECODE_ONLY,
            "every draft decode is a uniform decode of one token",
            backend=False,
        )
    if cause.support.level is GraphSupport.NEVER:
        ladder.step(
            "decode-full-unsupported",
            _NONE,
            f"no full graph is possible, as {cause.backend} has NEVER: {cause.support.reason}",
        )
    return Resolution(mode=ladder.mode, decisions=tuple(ladder.decisions))


def _lowered(
    role: Role, target: GraphMode, wanted: GraphMode | None
) -> tuple[GraphMode, tuple[Decision, ...]]:
    """Start a drafter at the target's resolved mode, or at the lesser one that the spec asks for."""
    if wanted is None or wanted is target:
        return target, ()
    less = wanted < target
    decision = Decision(
        rule="role-asks-for-less" if less else "role-asks-for-more",
        before=target.value,
        after=(wanted if less else target).value,
        role=role,
        message=f"the spec asks for {wanted.value} here, and the target resolved to {target.value}: "
        + ("the lesser holds" if less else "a drafter does not go beyond its target"),
    )
    return min(wanted, target), (decision,)
