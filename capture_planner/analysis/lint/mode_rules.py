"""Class G, mode resolution: every mode is allowed, explained, and nobody else's fault."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.analysis.coverage import Coverage
from capture_planner.analysis.lint.core import BugClass, Diagnostic, Severity, rule
from capture_planner.modes import Chain, GraphMode, GraphSupport, Role
from capture_planner.records.plan import RolePlan

_MODES = {mode.value for mode in GraphMode}


def _needed(role: RolePlan) -> GraphSupport:
    """Return the support that a role's mode and graphs need."""
    if role.mode.decode_mode is not GraphMode.FULL:
        return GraphSupport.NEVER
    if role.mode.mixed_mode is GraphMode.FULL:
        return GraphSupport.ALWAYS
    long = any((entry.query_len or 1) > 1 for entry in role.entries)
    return GraphSupport.UNIFORM_BATCH if long else GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE


@rule(
    "CP030",
    Severity.ERROR,
    BugClass.G,
    "vllm#39773",
    remedy="FULL_DECODE_ONLY or NONE are the modes of a draft decode",
    spec_path=("roles", "draft_decode", "mode"),
)
def piecewise_draft_decode(coverage: Coverage) -> Iterator[Diagnostic]:
    """A draft decode runs PIECEWISE.

    PIECEWISE pads tokens but not requests. A backend that indexes by request, like FlashInfer by
    paged_kv_indptr, then reads what an earlier, larger batch left behind, and last_token_indices
    gather out of bounds.
    """
    for index, role in enumerate(coverage.plan.roles):
        if role.role is not Role.DRAFT_DECODE:
            continue
        if role.mode.has_piecewise or any(e.mode is GraphMode.PIECEWISE for e in role.entries):
            yield Diagnostic(
                role=role.role,
                path=("roles", index, "mode"),
                message=f"draft_decode is planned {role.mode.value} with "
                f"{sum(e.mode is GraphMode.PIECEWISE for e in role.entries)} piecewise graphs: its request "
                "metadata would be stale",
            )


@rule("CP031", Severity.ERROR, BugClass.G, "vllm#49547", remedy="plan again from the spec")
def mode_above_request(coverage: Coverage) -> Iterator[Diagnostic]:
    """A role resolved to more than was asked of it: a higher mode, or a chain where single steps were."""
    speculative = coverage.plan.speculative
    single = speculative is not None and speculative.chain is Chain.SINGLE
    for index, role in enumerate(coverage.plan.roles):
        chains = [entry for entry in role.entries if entry.draft_steps is not None]
        if single and chains:
            yield Diagnostic(
                role=role.role,
                path=("roles", index, "entries"),
                message=f"{role.role}: {len(chains)} graphs such as {chains[0]} hold a chain of draft steps, and "
                "speculative.chain is single",
            )
        if role.mode > role.requested:
            yield Diagnostic(
                role=role.role,
                path=("roles", index, "mode"),
                message=f"{role.role}: {role.mode.value} is more than the {role.requested.value} that was wanted",
            )


@rule(
    "CP032",
    Severity.ERROR,
    BugClass.G,
    "vllm#49547",
    "vllm#50619",
    remedy="each step down is a decision with its rule, backend and group",
)
def unexplained_mode(coverage: Coverage) -> Iterator[Diagnostic]:
    """The decisions of a role do not lead from the mode that was wanted to the one it has."""
    for index, role in enumerate(coverage.plan.roles):
        at = role.requested.value
        for decision in role.decisions:
            if decision.before in _MODES and decision.after in _MODES and decision.before == at:
                at = decision.after
        if at != role.mode.value:
            yield Diagnostic(
                role=role.role,
                path=("roles", index, "mode"),
                message=f"{role.role}: the decisions lead from {role.requested.value} to {at}, and the mode is "
                f"{role.mode.value}",
            )


@rule("CP033", Severity.ERROR, BugClass.G, "vllm#49547", "vllm#50619", remedy="degrade the drafter alone")
def drafter_lowers_target(coverage: Coverage) -> Iterator[Diagnostic]:
    """A drafter's limits lowered the target's mode.

    Five draft layers disabled the graphs of 93 target layers in vLLM.
    """
    for index, role in enumerate(coverage.plan.roles):
        if role.role is not Role.TARGET:
            continue
        own = {(group.name, group.backend) for group in role.groups}
        for step, decision in enumerate(role.decisions):
            stranger = decision.group is not None and (decision.group, decision.backend) not in own
            if decision.role.is_drafter or stranger:
                yield Diagnostic(
                    role=role.role,
                    path=("roles", index, "decisions", step),
                    message=f"target: {decision.before} became {decision.after} because of "
                    f"{decision.role} ({decision.backend or 'no backend'})",
                )


@rule(
    "CP034",
    Severity.ERROR,
    BugClass.G,
    "vllm#28207",
    remedy="choose another backend, or a lower mode",
    spec_path=("backend",),
)
def mode_beyond_support(coverage: Coverage) -> Iterator[Diagnostic]:
    """A mode or a graph needs more than the weakest attention group of its role supports."""
    for index, role in enumerate(coverage.plan.roles):
        needed = _needed(role)
        for number, group in enumerate(role.groups):
            if group.support.level < needed:
                yield Diagnostic(
                    role=role.role,
                    path=("roles", index, "groups", number),
                    message=f"{role.role}: {role.mode.value} needs {needed.name}, and {group.backend} ({group.name}) "
                    f"has {group.support.level.name}",
                )


@rule(
    "CP035",
    Severity.NOTE,
    BugClass.G,
    "vllm#49547",
    remedy="choose another backend if the mode matters",
    spec_path=("mode",),
)
def stepped_down(coverage: Coverage) -> Iterator[Diagnostic]:
    """A backend's limits lowered a mode. It is decided and recorded; here it is said aloud."""
    for index, role in enumerate(coverage.plan.roles):
        for step, decision in enumerate(role.decisions):
            if decision.backend is not None and decision.before in _MODES and decision.after in _MODES:
                yield Diagnostic(
                    role=role.role,
                    path=("roles", index, "decisions", step),
                    message=f"{role.role}: {decision.before} became {decision.after}: {decision.message}",
                )


@rule("CP036", Severity.ERROR, BugClass.G, "vllm#39773", remedy="lower the drafter, or raise the target")
def drafter_above_target(coverage: Coverage) -> Iterator[Diagnostic]:
    """A drafter has a mode that its target does not allow.

    Draft prefill starts from the target's resolved mode; a draft decode has full graphs only where
    the target's decodes have.
    """
    target = next((role for role in coverage.plan.roles if role.role is Role.TARGET), None)
    for index, role in enumerate(coverage.plan.roles):
        if target is None or not role.role.is_drafter:
            continue
        if role.role is Role.DRAFT_PREFILL:
            wrong = role.mode > target.mode
        else:
            wrong = role.mode is not GraphMode.NONE and target.mode.decode_mode is not GraphMode.FULL
        if wrong:
            yield Diagnostic(
                role=role.role,
                path=("roles", index, "mode"),
                message=f"{role.role} runs {role.mode.value} while the target runs {target.mode.value}",
            )


@rule("CP037", Severity.ERROR, BugClass.G, "vllm#47460", remedy="remove them, or change the mode")
def graph_outside_mode(coverage: Coverage) -> Iterator[Diagnostic]:
    """A graph is planned that its role's mode does not have, so nothing would dispatch to it."""
    for index, role in enumerate(coverage.plan.roles):
        strange = [
            entry
            for entry in role.entries
            if entry.mode is not (role.mode.mixed_mode if entry.query_len is None else role.mode.decode_mode)
        ]
        if strange:
            yield Diagnostic(
                role=role.role,
                path=("roles", index, "entries"),
                message=f"{role.role}: {len(strange)} graphs such as {strange[0]} do not belong to {role.mode.value}",
            )
