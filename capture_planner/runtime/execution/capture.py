"""Capture: every entry of a plan, in an order and in pools that need least memory.

PIECEWISE first, then FULL, each largest first over all roles, so that a smaller graph finds the
memory that a larger one left. Each forward runs twice, to warm up and to be captured, with metadata
made anew. A graph that does not fit into memory is left out, and what it would have served is waived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np
import torch

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.modes import Pool as Pooling
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.backend import Attention
from capture_planner.records.batch import Entry, Kind
from capture_planner.records.plan import Plan, RolePlan, Waiver
from capture_planner.runtime.execution.role import Options, RoleRun
from capture_planner.runtime.execution.step import Made
from capture_planner.runtime.executor import NULL_PAGE, NULL_SLOT
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.ledger import Captured


def capture_all(
    plan: Plan,
    roles: Sequence[RoleRun],
    grapher: Grapher,
    options: Options,
    *,
    memory: int | None = None,
) -> Iterator[Captured]:
    """Capture all entries of ``plan``, and yield what each cost.

    ``memory`` bounds the bytes of each pool. Raises ``RunError`` where a graph does not fit and the
    options are strict.
    """
    shared = grapher.pool(memory)
    for role in roles:
        role.pool = shared if plan.pool is Pooling.SHARED else grapher.pool(memory)
        role.watch()
    work = sorted(
        ((role, entry) for role in roles for entry in role.plan.entries),
        key=lambda item: item[1].capture_order,
    )
    for role, entry in work:
        yield _capture(role, entry, grapher, options)


def _capture(role: RoleRun, entry: Entry, grapher: Grapher, options: Options) -> Captured:
    """Capture one entry; the device is read before, between and after, so that growth has one cause."""
    started = perf_counter()
    assert role.pool is not None, "pools are given out before the first capture"
    memory, alone, waiver = 0, 0, None
    before = warm = grapher.reading()
    try:
        role.warm_up(entry, warm_values(role, entry))
        warm = grapher.reading()
        graph = role.capture(entry, warm_values(role, entry), role.pool)
        memory, alone = graph.memory, graph.alone
    except torch.OutOfMemoryError as error:
        says = " ".join(str(error).split())
        if options.strict:
            raise RunError(f"{role.role.value}: {entry} does not fit into memory: {says}") from error
        waiver = _waiver(role.plan, entry, says)
    after = grapher.reading()
    if waiver is not None and warm and after:
        # Nothing but the graph grew in between: this is what it left behind in its pool.
        memory = max(after.held - warm.held, 0)
    return Captured(
        role=role.role,
        entry=entry,
        seconds=perf_counter() - started,
        memory=memory,
        alone=alone,
        readings=(before, warm, after) if before and warm and after else None,
        waiver=waiver,
    )


def warm_values(role: RoleRun, entry: Entry) -> Made:
    """Return the largest batch that the entry serves; it reads and writes the null page alone.

    Every request has one token at least, no request is longer than the model, and there are no more
    than the limits admit: what an entry has beyond that is padding, at capture as at replay.
    """
    plan = role.dispatcher.plan
    longest = plan.model.max_model_len
    reqs = min(entry.num_reqs or entry.num_tokens, entry.num_tokens, plan.limits.max_num_reqs)
    tokens = reqs * entry.query_len if entry.query_len else min(entry.num_tokens, reqs * longest)
    counts = np.full(reqs, tokens // reqs, dtype=np.int64)
    counts[: tokens % reqs] += 1
    starts = np.zeros(reqs + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    lengths = np.minimum(counts, longest).astype(np.int32)
    # As wide as the lengths say: lists of pages are made from both.
    pages = -(-int(lengths.max()) // role.page_size)
    positions = np.minimum(np.arange(tokens) - np.repeat(starts[:-1], counts), longest - 1)
    return {
        "input_ids": np.zeros(tokens, dtype=np.int32),
        "positions": positions,
        "slot_mapping": np.full(tokens, NULL_SLOT, dtype=np.int64),
        "query_start_loc": starts,
        "seq_lens": lengths,
        "block_table": np.full((reqs, pages), NULL_PAGE, dtype=np.int32),
        "last_token_indices": starts[1:] - 1,
        "idx_mapping": np.arange(reqs, dtype=np.int32),
        "cu_num_draft_tokens": (starts[1:] - np.arange(1, reqs + 1)).astype(np.int32),
    }


def _waiver(role: RolePlan, entry: Entry, says: str) -> Waiver:
    """Waive what only this entry served: the extents between the next smaller one and itself."""
    decode = entry.query_len is not None
    smaller = [_extent(other) for other in role.entries if _alike(other, entry)]
    below = max((size for size in smaller if size < _extent(entry)), default=0)
    return Waiver(
        kind=Kind.DECODE if decode else Kind.MIXED,
        query_len=entry.query_len,
        first=below + 1,
        last=_extent(entry),
        max_loras=entry.active_loras,
        reason=Reason.MEMORY,
        message=f"{entry} did not fit into memory when it was captured: {says}"[:500],
    )


def _extent(entry: Entry) -> int:
    return entry.num_tokens // entry.query_len if entry.query_len else entry.num_tokens


def _alike(entry: Entry, other: Entry) -> bool:
    """Say whether two entries stand in one ladder."""
    return (entry.mode, entry.query_len, entry.active_loras, entry.draft_steps) == (
        other.mode,
        other.query_len,
        other.active_loras,
        other.draft_steps,
    )


def as_captured(plan: Plan, captured: Sequence[Captured]) -> Plan:
    """Return the plan without what could not be captured, each with its waiver."""
    lost: dict[Role, list[Captured]] = {}
    for item in captured:
        if item.waiver is not None:
            lost.setdefault(item.role, []).append(item)
    if not lost:
        return plan
    return replace(
        plan,
        roles=tuple(_without(role, lost.get(role.role, [])) for role in plan.roles),
    )


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
        asked = registry[group.backend]
        attention = Attention.of(alone, Role.TARGET, layers=group.layers, window=group.window)
        padding = asked.padding(Role.TARGET, attention, plan.environment)
        workspace = asked.workspace(Role.TARGET, attention, plan.environment, (), plan.limits)
        groups.append(replace(group, padding=padding, workspace=workspace))
    return replace(alone, roles=(replace(target, groups=tuple(groups)),))
