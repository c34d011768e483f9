"""Variants of a plan: without graphs, without speculation, as captured."""

from __future__ import annotations

from collections.abc import Sequence, Set

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import grouped, replace
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.plan import Plan, RolePlan, Waiver
from capture_planner.records.spec import CaptureTiming
from capture_planner_runner.ledger.rows import GraphCapture


def as_captured(plan: Plan, captured: Sequence[GraphCapture]) -> Plan:
    """Return the plan with captured graphs only: failed ones become waivers, those on first use are left out."""
    left, done = without_lost(plan, captured), {(item.role, item.entry) for item in captured}
    waiting = [{*role.entries} & {*role.lazy} - {entry for of, entry in done if of is role.role} for role in left.roles]
    if not any(waiting):
        return left
    roles = (_not_yet(role, entries, left) for role, entries in zip(left.roles, waiting, strict=True))
    return replace(left, roles=tuple(roles))


def without_lost(plan: Plan, captured: Sequence[GraphCapture]) -> Plan:
    """Return the plan without graphs that could not be captured; each becomes a waiver."""
    lost = [item for item in captured if item.waiver is not None]
    return replace(plan, roles=tuple(_without(role, lost) for role in plan.roles)) if lost else plan


def at_start(plan: Plan) -> Plan:
    """Return the plan with only the graphs that are captured before the first request."""
    return as_captured(plan, ()) if plan.num_lazy else plan


def all_at_start(plan: Plan) -> Plan:
    """Return the plan with all its graphs captured before the first request."""
    return replace(plan, capture=CaptureTiming(), roles=tuple(replace(role, lazy=()) for role in plan.roles))


def _not_yet(role: RolePlan, waiting: Set[Entry], plan: Plan) -> RolePlan:
    """Return a role without graphs that wait for their first use. What else is eager has a waiver before theirs."""
    if not waiting:
        return role
    waivers = _everything(plan, Reason.LAZY, "its graph is captured on first use")
    return _of_entries(role, [entry for entry in role.entries if entry not in waiting], (*role.waivers, *waivers))


def _of_entries(role: RolePlan, entries: Sequence[Entry], waivers: Sequence[Waiver]) -> RolePlan:
    kept = frozenset(entries)
    lazy = tuple(entry for entry in role.lazy if entry in kept)
    return replace(role, entries=tuple(entries), lazy=lazy, waivers=tuple(waivers))


def _without(role: RolePlan, lost: Sequence[GraphCapture]) -> RolePlan:
    gone = {item.entry: item.waiver for item in lost if item.role is role.role and item.waiver is not None}
    waivers = list(role.waivers)
    for entry, waiver in gone.items():
        waivers.append(waiver)
        if entry.tokens_each is None:
            # A graph for mixed batches also served decodes without a graph of their own.
            waivers.append(replace(waiver, kind=Kind.DECODE, first=1, last=entry.num_tokens))
    return _of_entries(role, [entry for entry in role.entries if entry not in gone], waivers)


def without_graphs(plan: Plan) -> Plan:
    """Return the plan with nothing to capture: everything runs eager."""
    waivers = _everything(plan, Reason.MODE, "everything runs eager")
    eager = (replace(role, mode=GraphMode.NONE, entries=(), lazy=(), waivers=waivers) for role in plan.roles)
    return replace(plan, roles=tuple(eager))


def _everything(plan: Plan, reason: Reason, message: str) -> tuple[Waiver, ...]:
    """Waive every batch that a plan admits."""
    # Requests without an adapter count as one more, next to those that have one.
    loras = 0 if plan.lora is None else plan.lora.max_active + 1
    return tuple(
        Waiver(
            kind=kind,
            query_len=None,
            first=1,
            # Of decodes this counts requests, of which a batch has no more than tokens.
            last=plan.limits.max_num_tokens,
            max_loras=loras,
            reason=reason,
            message=message,
        )
        for kind in Kind
    )


def sampled(plan: Plan) -> Plan:
    """Return the plan with three graphs of each kind at most, the largest, the middle one and the smallest.

    A kind is a role, a mode, and whether its graphs are of decodes. All else runs eager.
    """
    roles = []
    for before, after in zip(plan.roles, without_graphs(plan).roles, strict=True):
        kinds = grouped(
            sorted(before.entries, key=lambda entry: entry.capture_order), lambda e: (e.mode, e.tokens_each is None)
        )
        chosen = {kind[place] for kind in kinds.values() for place in (0, len(kind) // 2, -1)}
        entries = [entry for entry in before.entries if entry in chosen]
        # What is dropped has a waiver, so every batch still has an entry or a waiver (law 1).
        roles.append(_of_entries(before, entries, after.waivers) if entries else after)
    return replace(plan, roles=tuple(roles))


def without_speculation(plan: Plan, registry: Registry) -> Plan:
    """Return the plan of the target alone, with nothing to capture: plain greedy decoding.

    Its queries are shorter, so its backends declare padding and workspaces again.
    """
    # Eager, because its graphs are for verification of drafts.
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
