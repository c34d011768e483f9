"""A dispatcher that nobody could get wrong: it looks at every entry, for every batch, each time.

Compatibility is stated here a second time, from the laws and not from ``Entry.rejection``.
"""

from __future__ import annotations

from capture_planner.entry import Batch, Entry
from capture_planner.modes import Role
from capture_planner.plan import Plan


def cheapest(plan: Plan, batch: Batch) -> Entry | None:
    """Return the cheapest entry of the role that serves the batch, by a scan over all of them."""
    if not 0 < batch.num_reqs <= batch.num_tokens:
        return None
    chain = None
    if batch.role is Role.DRAFT_DECODE and plan.speculative is not None:
        chain = max(0, plan.speculative.draft_tokens(batch.num_reqs) - 1)
    able = [entry for entry in plan.role(batch.role).entries if _serves(entry, batch, chain)]
    return min(able, key=_price, default=None)


def _serves(entry: Entry, batch: Batch, chain: int | None) -> bool:
    """Say whether a graph can compute a batch: room on each axis, and nothing baked in that is untrue."""
    room = batch.num_tokens <= entry.num_tokens and batch.active_loras <= entry.active_loras
    if entry.num_reqs is not None:
        room = room and batch.num_reqs <= entry.num_reqs
    if entry.query_len is not None:
        each = batch.query_len == entry.query_len and batch.num_tokens == batch.num_reqs * entry.query_len
        room = room and each and batch.past_prompt
    return room and entry.draft_steps in (None, chain)


def _price(entry: Entry) -> tuple[object, ...]:
    """Return what is least of the best: a full graph, then little padding, then the most special."""
    return (
        entry.num_reqs is None,
        entry.num_tokens,
        entry.num_reqs or 0,
        entry.active_loras,
        entry.query_len is None,
        entry.draft_steps is None,
    )
