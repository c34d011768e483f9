"""Class G, mode resolution: every mode is allowed, and every downgrade is explained."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.analysis.coverage import Coverage
from capture_planner.analysis.lint.core import Diagnostic, error, note, of_role
from capture_planner.modes import Chain, GraphMode, GraphSupport, Role
from capture_planner.records.plan import Decision, RolePlan
from capture_planner.records.text import counted

_MODES = {mode.value for mode in GraphMode}


def _is_step(decision: Decision) -> bool:
    """Whether a decision changes a mode; others choose sizes."""
    return {decision.before, decision.after} <= _MODES


def _needed(role: RolePlan) -> GraphSupport:
    if role.mode.decode_mode is not GraphMode.FULL:
        return GraphSupport.NEVER
    if role.mode.mixed_mode is GraphMode.FULL:
        return GraphSupport.ALWAYS
    # A batch of decodes that differ in length is not uniform.
    if any(entry.max_query_len is not None for entry in role.entries):
        return GraphSupport.ALWAYS
    long = any((entry.query_len or 1) > 1 for entry in role.entries)
    return GraphSupport.UNIFORM_BATCH if long else GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE


@error("CP030", "vllm#39773", "use FULL_DECODE_ONLY or NONE for draft decodes", at="roles.draft_decode.mode")
def piecewise_draft_decode(coverage: Coverage) -> Iterator[Diagnostic]:
    """A draft decode runs PIECEWISE.

    PIECEWISE pads tokens but not requests. A backend that indexes by request (FlashInfer: paged_kv_indptr) then reads
    entries of an earlier, larger batch, and last_token_indices gathers out of bounds.
    """
    for role in coverage.plan.roles:
        if role.role is not Role.DRAFT_DECODE:
            continue
        graphs = sum(entry.mode is GraphMode.PIECEWISE for entry in role.entries)
        if graphs or role.mode.has_piecewise:
            message = f"{role.mode.value} with {graphs} piecewise graphs reads stale request metadata"
            yield of_role(coverage, role, message, "mode")


@error("CP031", "vllm#49547", "plan again from the spec")
def mode_above_request(coverage: Coverage) -> Iterator[Diagnostic]:
    """A role resolved to more than was requested: a higher mode, or chains instead of single steps."""
    speculative = coverage.plan.speculative
    single = speculative is not None and speculative.chain is Chain.SINGLE
    for role in coverage.plan.roles:
        chains = [entry for entry in role.entries if entry.draft_steps is not None]
        if single and chains:
            message = f"{len(chains)} graphs such as {chains[0]} run a chain, but speculative.chain is single"
            yield of_role(coverage, role, message, "entries")
        if role.mode > role.requested:
            yield of_role(coverage, role, f"{role.mode.value} is above the requested {role.requested.value}", "mode")


@error("CP032", "vllm#49547 vllm#50619", "record each downgrade as a decision with its rule, backend and group")
def unexplained_mode(coverage: Coverage) -> Iterator[Diagnostic]:
    """The decisions of a role do not lead from its requested mode to its resolved mode."""
    for role in coverage.plan.roles:
        at = role.requested.value
        for decision in role.decisions:
            if _is_step(decision) and decision.before == at:
                at = decision.after
        if at != role.mode.value:
            message = f"the decisions lead from {role.requested.value} to {at}, but the mode is {role.mode.value}"
            yield of_role(coverage, role, message, "mode")


@error("CP033", "vllm#49547 vllm#50619", "lower the drafter's mode only")
def drafter_lowers_target(coverage: Coverage) -> Iterator[Diagnostic]:
    """A drafter's limits lowered the target's mode.

    Five draft layers disabled the graphs of 93 target layers in vLLM.
    """
    for role in coverage.plan.roles:
        if role.role is not Role.TARGET:
            continue
        own = {(group.name, group.backend) for group in role.groups}
        for step, decision in enumerate(role.decisions):
            # Two roles may have groups of one name, and then their backends tell them apart.
            foreign = decision.group is not None and (decision.group, decision.backend) not in own
            if decision.role.is_drafter or foreign:
                cause = f"{decision.role} ({decision.backend or 'no backend'})"
                message = f"{decision.before} became {decision.after} because of {cause}"
                yield of_role(coverage, role, message, "decisions", step)


@error("CP034", "vllm#28207", "choose another backend or a lower mode", at="backend")
def mode_beyond_support(coverage: Coverage) -> Iterator[Diagnostic]:
    """A mode or a graph needs more than the weakest attention group of its role supports."""
    for role in coverage.plan.roles:
        needed = _needed(role)
        for number, group in enumerate(role.groups):
            if group.support.level < needed:
                support = f"{group.backend} ({group.name}) supports only {group.support.level.name}"
                yield of_role(coverage, role, f"{role.mode.value} needs {needed.name}, but {support}", "groups", number)


@note("CP035", "vllm#49547", "choose another backend if the mode matters", at="mode")
def stepped_down(coverage: Coverage) -> Iterator[Diagnostic]:
    """A backend's limits lowered a mode. The plan records the decision; this makes it visible."""
    for role in coverage.plan.roles:
        for step, decision in enumerate(role.decisions):
            if decision.backend is not None and _is_step(decision):
                message = f"{decision.before} became {decision.after}: {decision.message}"
                yield of_role(coverage, role, message, "decisions", step)


@error("CP036", "vllm#39773", "lower the drafter's mode or raise the target's")
def drafter_above_target(coverage: Coverage) -> Iterator[Diagnostic]:
    """A drafter has a mode that its target does not allow.

    Draft prefill starts from the target's resolved mode; a draft decode has full graphs only where
    the target's decodes have.
    """
    target = next((role for role in coverage.plan.roles if role.role is Role.TARGET), None)
    for role in coverage.plan.roles:
        if target is None or not role.role.is_drafter:
            continue
        if role.role is Role.DRAFT_PREFILL:
            wrong = role.mode > target.mode
        else:
            wrong = role.mode is not GraphMode.NONE and target.mode.decode_mode is not GraphMode.FULL
        if wrong:
            yield of_role(coverage, role, f"runs {role.mode.value} while the target runs {target.mode.value}", "mode")


@error("CP037", "vllm#47460", "remove them or change the mode")
def graph_outside_mode(coverage: Coverage) -> Iterator[Diagnostic]:
    """A graph does not belong to its role's mode, so no batch is dispatched to it."""
    for role in coverage.plan.roles:
        mixed, decode = role.mode.mixed_mode, role.mode.decode_mode
        wrong = [each for each in role.entries if each.mode is not (mixed if each.tokens_each is None else decode)]
        if wrong:
            verb = "does" if len(wrong) == 1 else "do"
            message = f"{counted(len(wrong), 'graph')} {verb} not belong to {role.mode.value}, such as {wrong[0]}"
            yield of_role(coverage, role, message, "entries")
