"""A dispatcher that is simple to verify: it scans all entries for every batch.

Compatibility and preference are implemented a second time, from the laws and not from ``Entry.rejection``
and ``Entry.cost``.
"""

from __future__ import annotations

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.plan import Plan


def cheapest(plan: Plan, batch: Batch) -> Entry | None:
    """Return the cheapest entry of the role that serves the batch, by a scan over all of them."""
    batch = without_adapters(batch)
    if not 0 < batch.num_reqs <= batch.num_tokens or batch.active_loras < 0:
        return None
    chain = chain_length(plan, batch.role, batch.num_reqs)
    able = [entry for entry in plan.role(batch.role).entries if serves(entry, batch, chain)]
    return min(able, key=_price, default=None)


def serves(entry: Entry, batch: Batch, chain: int | None) -> bool:
    """Say whether a graph can compute a batch: room on each axis, and nothing baked in that is wrong."""
    room = batch.num_tokens <= entry.num_tokens and batch.active_loras <= entry.active_loras
    if entry.num_reqs is not None:
        room = room and batch.num_reqs <= entry.num_reqs
    if entry.query_len is not None:
        each = batch.query_len == entry.query_len and batch.num_tokens == batch.num_reqs * entry.query_len
        room = room and each and batch.past_prompt
    if entry.max_query_len is not None:
        room = room and 0 < longest_of(batch) <= entry.max_query_len
    return room and entry.draft_steps in (None, chain)


def longest_of(batch: Batch) -> int:
    """Return the tokens of the longest request of a decode; 0 for another batch, and where it is not known."""
    longest = batch.max_query_len if batch.query_len is None else batch.query_len
    if not batch.past_prompt or longest is None or not longest <= batch.num_tokens <= batch.num_reqs * longest:
        return 0
    return longest if batch.query_len is None or batch.num_tokens == batch.num_reqs * longest else 0


def scheduled_k(plan: Plan, num_reqs: int) -> int:
    """Return the draft tokens for a batch size: the last range that starts at or before it, at most K."""
    assert plan.speculative is not None, "asked where there is a drafter"
    k = plan.speculative.num_tokens
    for first, _, drafted in plan.speculative.ranges:
        if first <= num_reqs:
            k = min(drafted, plan.speculative.num_tokens)
    return k


def chain_length(plan: Plan, role: Role, num_reqs: int) -> int | None:
    """Return the number of draft decodes in a chain; None for a role or plan without chains."""
    if role is not Role.DRAFT_DECODE or plan.speculative is None:
        return None
    return max(0, scheduled_k(plan, num_reqs) - 1)


def without_adapters(batch: Batch) -> Batch:
    """Return the batch without its adapter count if its role is a drafter, which uses no adapters."""
    return attrs.evolve(batch, active_loras=0) if batch.role.is_drafter and batch.active_loras > 0 else batch


def _price(entry: Entry) -> tuple[object, ...]:
    """Return the sort key of preference: a full graph, then little padding, then the most specific."""
    return (
        entry.mode is not GraphMode.FULL,
        entry.num_tokens,
        entry.num_reqs or 0,
        entry.active_loras,
        0 if entry.query_len is not None else 1 if entry.max_query_len is not None else 2,
        entry.draft_steps is None,
    )
