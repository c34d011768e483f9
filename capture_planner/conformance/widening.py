"""Plans with entries beyond the limits, as people edit them by hand and as engines align them."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.plugins.registry import Registry
from capture_planner.records._base import grouped, replace
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry
from capture_planner.records.batch_space import request_step, token_step
from capture_planner.records.plan import GroupPlan, Plan, RolePlan, StatePool
from capture_planner.records.spec import Parallel


def widened(plan: Plan, more: int, registry: Registry) -> Plan:
    """Return the plan with its largest entries wider by ``more`` requests, or tokens, or the next aligned number.

    Workspaces and the pool of recurrent states are sized for the wider entries.
    """
    roles = tuple(_wider_role(plan, role, more, registry) for role in plan.roles)
    return replace(plan, roles=roles, states=StatePool.of(plan, roles, plan.speculative))


def _wider_role(plan: Plan, role: RolePlan, more: int, registry: Registry) -> RolePlan:
    entries = tuple(_wider(role.entries, more, plan.parallel))

    def sized(group: GroupPlan) -> GroupPlan:
        attention = Attention.of(plan, role.role, layers=group.layers, window=group.window)
        backend = registry[group.backend]
        workspace = backend.workspace(role.role, attention, plan.environment, entries, plan.limits)
        return replace(group, workspace=workspace)

    return replace(role, entries=entries, groups=tuple(map(sized, role.groups)))


def _wider(entries: tuple[Entry, ...], more: int, parallel: Parallel) -> Iterator[Entry]:
    """Yield the entries; of those that differ in size alone, the largest is wider."""
    alike = grouped(entries, _kind)
    largest = {max(each, key=lambda entry: (entry.num_tokens, entry.num_reqs or 0)) for each in alike.values()}
    for entry in entries:
        if entry not in largest:
            yield entry
        elif entry.tokens_each is not None:
            step = request_step(entry.tokens_each, parallel)
            reqs = -(-((entry.num_reqs or 0) + more) // step) * step
            yield replace(entry, num_reqs=reqs, num_tokens=reqs * entry.tokens_each)
        else:
            step = token_step(parallel)
            tokens = -(-(entry.num_tokens + more) // step) * step
            reqs_or_none = None if entry.num_reqs is None else entry.num_reqs + more
            yield replace(entry, num_tokens=tokens, num_reqs=reqs_or_none)


def _kind(entry: Entry) -> tuple[object, ...]:
    return entry.mode, entry.query_len, entry.max_query_len, entry.active_loras, entry.draft_steps
