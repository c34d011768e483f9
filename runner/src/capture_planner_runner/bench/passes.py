"""Single passes of a role: the graphs of any size, captured for measuring, and eager passes of the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

import attrs

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.costs import Family
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import decode_families
from capture_planner.records.plan import Plan, RolePlan
from capture_planner_runner.bench.rig import ROOM, Rig, inputs_with_context
from capture_planner_runner.bench.staircase import SizeRange
from capture_planner_runner.plan_variants import without_graphs
from capture_planner_runner.runner import Runner

WINDOW = 0.005
"""Seconds of one repeat: as many passes in a row as fill it."""
MOST_PASSES = 20


def ranges_of(plan: Plan, *, named: bool) -> tuple[SizeRange[Family], ...]:
    """Return the sizes that are measured: of each family of graphs in the plan, and of eager passes.

    Sizes are requests of decodes and tokens of mixed batches. Decodes go up to the limits; mixed batches up to the
    largest size of the plan, and eagerly up to the limits.

    :param named: whether the sizes of the plan's graphs are measured in any case.
    """
    return tuple(
        each for role in plan.roles for each in (*_graph_ranges(plan, role, named=named), *_eager_ranges(plan, role))
    )


def _graph_ranges(plan: Plan, role: RolePlan, *, named: bool) -> Iterable[SizeRange[Family]]:
    capped = any(waiver.reason is Reason.BACKEND_CAP for waiver in role.waivers)
    by_family: dict[Family, list[int]] = {}
    for entry in role.entries:
        family = (role.role, entry.mode, entry.query_len, entry.draft_steps)
        by_family.setdefault(family, []).append(entry.num_tokens // (entry.query_len or 1))
    for family, sizes in by_family.items():
        last = max(sizes)
        if family[2] is not None and not capped:
            last = max(last, _most_requests(plan, role.role, family[2], family[3]))
        yield SizeRange(key=family, last=last, named=tuple(sorted(set(sizes))) if named else ())


def _eager_ranges(plan: Plan, role: RolePlan) -> Iterable[SizeRange[Family]]:
    """Yield eager passes at a few sizes each: powers of 8, the ceiling of the graphs, and above it."""
    most = plan.limits.max_num_tokens
    mixed = [entry.num_tokens for entry in role.entries if entry.query_len is None]
    ceiling = max(mixed, default=0)
    for query_len in sorted({family.query_len for family in decode_families(role.role, plan)}):
        last = _most_requests(plan, role.role, query_len, None)
        yield _few((role.role, GraphMode.NONE, query_len, None), last, ())
    if role.role is not Role.DRAFT_DECODE:
        above = [ceiling, ceiling * 3 // 2, *(ceiling << shift for shift in range(1, 12))] if ceiling else []
        yield _few((role.role, GraphMode.NONE, None, None), most, above)


def _few(family: Family, last: int, named: Iterable[int]) -> SizeRange[Family]:
    sizes = {size for size in (*(8**power for power in range(7)), *named) if size <= last}
    return SizeRange(key=family, last=last, named=tuple(sorted(sizes)), search=False)


def _most_requests(plan: Plan, role: Role, query_len: int, draft_steps: int | None) -> int:
    """Return the most requests that decode at a query length, as the limits and the schedule admit."""
    return max(
        family.requests.intervals[-1][1]
        for family in decode_families(role, plan)
        if family.query_len == query_len and draft_steps in (None, family.draft_steps)
    )


def entry_of(family: Family, size: int, max_num_reqs: int) -> Entry:
    """Return the graph of a family and a size."""
    _, mode, query_len, draft_steps = family
    reqs = size if query_len else None if mode is GraphMode.PIECEWISE else min(size, max_num_reqs)
    tokens = size * (query_len or 1)
    return Entry(mode=mode, num_tokens=tokens, num_reqs=reqs, query_len=query_len, draft_steps=draft_steps)


def plan_with(plan: Plan, registry: Registry, graphs: Iterable[tuple[Role, Entry]]) -> Plan:
    """Return the plan with these graphs alone; its backends are asked anew what workspaces they need."""
    listed = list(dict.fromkeys(graphs))
    roles = []
    for before, after in zip(plan.roles, without_graphs(plan).roles, strict=True):
        entries = tuple(entry for role, entry in listed if role is before.role)
        groups = []
        for group in before.groups:
            attention = Attention.of(plan, before.role, layers=group.layers, window=group.window)
            workspace = registry[group.backend].workspace(
                before.role, attention, plan.environment, entries, plan.limits
            )
            groups.append(replace(group, workspace=workspace))
        changed = replace(before, entries=entries) if entries else after
        roles.append(replace(changed, groups=tuple(groups), waivers=after.waivers))
    return replace(plan, roles=tuple(roles))


def passes(rig: Rig, runner: Runner, family: Family, size: int, context: int) -> Callable[[], float]:
    """Return what measures passes of one size in a row, in milliseconds of one: a graph's, or eager ones.

    The graph was captured. What is timed is what the runner does after preparation: guards, the replay with whatever
    runs between and behind its pieces, or the eager forward.
    """
    role, (_, mode, query_len, _) = runner.roles[family[0]], family
    shape = entry_of(family, size, rig.plan.limits.max_num_reqs)
    if mode is GraphMode.NONE:
        shape = attrs.evolve(shape, mode=GraphMode.FULL)
    inputs = inputs_with_context(rig, role, shape, context, ROOM)
    batch = Batch(
        role=role.role,
        num_reqs=inputs.num_reqs,
        num_tokens=inputs.num_tokens,
        query_len=query_len,
        past_prompt=query_len is not None,
    )
    step = role.step(batch, None if mode is GraphMode.NONE else shape, inputs)
    role.stage_inputs(step)
    role.prepare_backends(step)

    def once() -> None:
        role.execute(step, perf_counter())

    single = attrs.evolve(rig, effort=attrs.evolve(rig.effort, steps=1))
    single.repeated(runner, once)  # warms up
    count = max(1, min(MOST_PASSES, int(WINDOW / max(single.repeated(runner, once), 1e-6))))
    several = attrs.evolve(rig, effort=attrs.evolve(rig.effort, steps=count))
    return lambda: several.repeated(runner, once) * 1e3
