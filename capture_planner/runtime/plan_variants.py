"""Plans that a plan is changed into before it runs: without graphs, without speculation, as captured."""

from __future__ import annotations

from collections.abc import Sequence

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import grouped, replace
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Kind
from capture_planner.records.plan import Plan, RolePlan, Waiver
from capture_planner.runtime.ledger import GraphCapture


def as_captured(plan: Plan, captured: Sequence[GraphCapture]) -> Plan:
    """Return the plan without what could not be captured, each with its waiver."""
    lost = [item for item in captured if item.waiver is not None]
    return replace(plan, roles=tuple(_without(role, lost) for role in plan.roles)) if lost else plan


def _without(role: RolePlan, lost: Sequence[GraphCapture]) -> RolePlan:
    gone = {item.entry: item.waiver for item in lost if item.role is role.role and item.waiver is not None}
    waivers = list(role.waivers)
    for entry, waiver in gone.items():
        waivers.append(waiver)
        if entry.query_len is None:
            # One for any batch served decodes too, where no other graph did.
            waivers.append(replace(waiver, kind=Kind.DECODE, first=1, last=entry.num_tokens))
    return replace(role, entries=tuple(e for e in role.entries if e not in gone), waivers=tuple(waivers))


def without_graphs(plan: Plan) -> Plan:
    """Return the plan with nothing to capture: everything runs eager."""
    loras = 0 if plan.lora is None else plan.lora.max_active + 1
    waivers = tuple(
        Waiver(
            kind=kind,
            query_len=None,
            first=1,
            last=plan.limits.max_num_tokens,
            max_loras=loras,
            reason=Reason.MODE,
            message="everything runs eager",
        )
        for kind in Kind
    )
    eager = (replace(role, mode=GraphMode.NONE, entries=(), waivers=waivers) for role in plan.roles)
    return replace(plan, roles=tuple(eager))


def sampled(plan: Plan) -> Plan:
    """Return the plan with three graphs of each kind at most, the largest, the middle one and the smallest.

    A kind is a role, a mode, and whether its graphs are of uniform decodes. All else runs eager.
    """
    roles = []
    for before, after in zip(plan.roles, without_graphs(plan).roles, strict=True):
        kinds = grouped(
            sorted(before.entries, key=lambda entry: entry.capture_order), lambda e: (e.mode, e.query_len is None)
        )
        chosen = {kind[place] for kind in kinds.values() for place in (0, len(kind) // 2, -1)}
        entries = tuple(entry for entry in before.entries if entry in chosen)
        roles.append(replace(before, entries=entries, waivers=after.waivers) if entries else after)
    return replace(plan, roles=tuple(roles))


def without_speculation(plan: Plan, registry: Registry) -> Plan:
    """Return the plan of the target alone, with nothing to capture: plain greedy decoding.

    Its queries are shorter, so its backends are asked anew what they read and need.
    """
    target = without_graphs(plan).role(Role.TARGET)
    alone = replace(plan, speculative=None, roles=(target,))
    groups = []
    for group in target.groups:
        registered = registry[group.backend]
        attention = Attention.of(alone, Role.TARGET, layers=group.layers, window=group.window)
        padding = registered.padding(Role.TARGET, attention, plan.environment)
        workspace = registered.workspace(Role.TARGET, attention, plan.environment, (), plan.limits)
        groups.append(replace(group, padding=padding, workspace=workspace))
    return replace(alone, roles=(replace(target, groups=tuple(groups)),))
