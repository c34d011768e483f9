"""A dispatcher nobody could get wrong: it looks at every entry, for every batch, each time.

Compatibility is stated here a second time, from the laws and not from ``Entry.rejection``.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from capture_planner.entry import Batch, Entry
from capture_planner.modes import Role
from capture_planner.plan import Plan, RolePlan


def scheduled_k(plan: Plan, num_reqs: int) -> int:
    """Draft tokens for a batch size: the last range that starts at or before it, at most K."""
    assert plan.speculative is not None
    k = plan.speculative.num_tokens
    for first, _, drafted in plan.speculative.schedule:
        if first <= num_reqs:
            k = min(drafted, plan.speculative.num_tokens)
    return k


def chain_length(plan: Plan, role: Role, num_reqs: int) -> int | None:
    """How many draft decodes follow each other; None where the question makes no sense."""
    if role is not Role.DRAFT_DECODE or plan.speculative is None:
        return None
    return max(0, scheduled_k(plan, num_reqs) - 1)


def without_adapters(batch: Batch) -> Batch:
    """A drafter takes no adapters, so a count of them means nothing to it."""
    return attrs.evolve(batch, active_loras=0) if batch.role.is_drafter and batch.active_loras > 0 else batch


def serves(entry: Entry, batch: Batch, chain: int | None) -> bool:
    """Whether a graph can compute a batch: room on each axis, and nothing baked in that is untrue."""
    room = batch.num_tokens <= entry.num_tokens and batch.active_loras <= entry.active_loras
    if entry.num_reqs is not None:
        room = room and batch.num_reqs <= entry.num_reqs
    if entry.query_len is not None:
        each = batch.query_len == entry.query_len and batch.num_tokens == batch.num_reqs * entry.query_len
        room = room and each and batch.past_prompt
    return room and entry.draft_steps in (None, chain)


def dispatch(plan: Plan, batch: Batch) -> Entry | None:
    """The cheapest entry of the role that serves the batch, by a scan over all of them."""
    batch = without_adapters(batch)
    if not 0 < batch.num_reqs <= batch.num_tokens or batch.active_loras < 0:
        return None
    chain = chain_length(plan, batch.role, batch.num_reqs)
    able = [entry for entry in plan.role(batch.role).entries if serves(entry, batch, chain)]
    return min(able, key=lambda entry: entry.cost, default=None)


def admissible(plan: Plan, role: RolePlan) -> Iterator[Batch]:
    """Every batch of a role that the limits and the schedule admit, by brute force.

    A request has at most one adapter, rows without one count as one more, and the schedule says
    how many draft tokens a decode of each size has. Mixed batches are enumerated by tokens, and by
    the request counts that an entry or the limits tell apart.
    """
    limits = plan.limits
    most_loras = 0 if plan.lora is None or role.role.is_drafter else plan.lora.max_active + 1
    for num_reqs in range(1, limits.max_num_reqs + 1):
        k = 0 if plan.speculative is None else scheduled_k(plan, num_reqs)
        if role.role is Role.DRAFT_DECODE:
            query_len = 1
            if k < 2:
                continue
        else:
            query_len = 1 + k
        if num_reqs * query_len > limits.max_num_tokens:
            continue
        for loras in range(min(most_loras, num_reqs) + 1):
            yield Batch(
                role=role.role,
                num_reqs=num_reqs,
                num_tokens=num_reqs * query_len,
                query_len=query_len,
                active_loras=loras,
            )
    if role.role is Role.DRAFT_DECODE:
        return
    bounds = {entry.num_reqs for entry in role.entries if entry.query_len is None and entry.num_reqs}
    told_apart = {1, limits.max_num_reqs} | {bound + shift for bound in bounds for shift in (0, 1)}
    counts = sorted(n for n in told_apart if 1 <= n <= limits.max_num_reqs)
    for num_tokens in range(1, limits.max_num_tokens + 1):
        for num_reqs in {*(n for n in counts if n <= num_tokens), min(num_tokens, limits.max_num_reqs)}:
            for loras in range(min(most_loras, num_reqs) + 1):
                yield Batch(
                    role=role.role,
                    num_reqs=num_reqs,
                    num_tokens=num_tokens,
                    past_prompt=False,
                    active_loras=loras,
                )


def is_decode(batch: Batch) -> bool:
    """Whether the batch came from the decode half of ``admissible``."""
    return batch.query_len is not None


def is_waived(role: RolePlan, batch: Batch) -> bool:
    """Whether a waiver of the role names the batch, by the meaning of its fields."""
    for waiver in role.waivers:
        extent = batch.num_reqs if is_decode(batch) else batch.num_tokens
        if (
            waiver.kind.value == ("decode" if is_decode(batch) else "mixed")
            and waiver.query_len in (None, batch.query_len)
            and waiver.first <= extent <= waiver.last
            and waiver.min_loras <= batch.active_loras <= waiver.max_loras
        ):
            return True
    return False
