"""Plans that a plan is changed into before it runs: without graphs, without speculation, as captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Kind
from capture_planner.records.plan import Plan, RolePlan, Waiver
from capture_planner.runtime.ledger import Captured


def as_captured(plan: Plan, captured: Sequence[Captured]) -> Plan:
    """Return the plan without what could not be captured, each with its waiver."""
    lost: dict[Role, list[Captured]] = {}
    for item in captured:
        if item.waiver is not None:
            lost.setdefault(item.role, []).append(item)
    if not lost:
        return plan
    return replace(plan, roles=tuple(_without(role, lost.get(role.role, [])) for role in plan.roles))


def _without(role: RolePlan, lost: Sequence[Captured]) -> RolePlan:
    gone = {item.entry for item in lost}
    return replace(
        role,
        entries=tuple(entry for entry in role.entries if entry not in gone),
        waivers=role.waivers + tuple(waiver for item in lost for waiver in _all_waivers(item)),
    )


def _all_waivers(lost: Captured) -> Iterator[Waiver]:
    """Yield the waiver of a graph; one for any batch served decodes too, where no other graph did."""
    if lost.waiver is not None:
        yield lost.waiver
        if lost.entry.query_len is None:
            yield replace(lost.waiver, kind=Kind.DECODE, first=1, last=lost.entry.num_tokens)


def without_graphs(plan: Plan) -> Plan:
    """Return the plan with nothing to capture: everything runs eager."""
    return replace(plan, roles=tuple(_eager(role, plan) for role in plan.roles))


def _eager(role: RolePlan, plan: Plan) -> RolePlan:
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
    return replace(role, mode=GraphMode.NONE, entries=(), waivers=waivers)


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
