"""Batches by brute force, and the dispatcher that nobody could get wrong, for the laws."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan, RolePlan


def admissible(plan: Plan, role: RolePlan) -> Iterator[Batch]:
    """Every batch of a role that the limits and the schedule admit, by brute force.

    A request has at most one adapter, rows without one count as one more, and the schedule says
    how many draft tokens a decode of each size has. Mixed batches are enumerated by tokens, and by
    the request counts that an entry or the limits tell apart.
    """
    limits, slots = plan.limits, extra_rows(plan.speculative)
    more = slots if role.role is Role.DRAFT_PREFILL else 0
    most_loras = 0 if plan.lora is None or role.role.is_drafter else plan.lora.max_active + 1
    for num_reqs in range(1, limits.max_num_reqs + 1):
        k = 0 if plan.speculative is None else scheduled_k(plan, num_reqs)
        if role.role is Role.DRAFT_DECODE:
            query_len = 1
            if k < 2 or not is_chain(plan.speculative):
                continue
        else:
            query_len = 1 + k + more
        if num_reqs * (1 if role.role is Role.DRAFT_DECODE else 1 + k + slots) > limits.max_num_tokens:
            continue
        varies = plan.speculative is not None and role.role in plan.speculative.varying_decodes and k > 0
        shapes = _varying_shapes(num_reqs, query_len) if varies else [(num_reqs * query_len, query_len, None)]
        for loras in range(min(most_loras, num_reqs) + 1):
            for num_tokens, each, longest in shapes:
                yield Batch(
                    role=role.role,
                    num_reqs=num_reqs,
                    num_tokens=num_tokens,
                    query_len=each,
                    active_loras=loras,
                    max_query_len=longest,
                )
    if role.role is Role.DRAFT_DECODE:
        return
    bounds = {entry.num_reqs for entry in role.entries if entry.tokens_each is None and entry.num_reqs}
    told_apart = {1, limits.max_num_reqs} | {bound + shift for bound in bounds for shift in (0, 1)}
    counts = sorted(n for n in told_apart if 1 <= n <= limits.max_num_reqs)
    largest = limits.max_num_tokens - (slots if role.role is Role.TARGET else 0)
    for num_tokens in range(1, largest + 1):
        for num_reqs in {*(n for n in counts if n <= num_tokens), min(num_tokens, limits.max_num_reqs)}:
            for loras in range(min(most_loras, num_reqs) + 1):
                yield Batch(
                    role=role.role, num_reqs=num_reqs, num_tokens=num_tokens, past_prompt=False, active_loras=loras
                )


def _varying_shapes(num_reqs: int, most: int) -> list[tuple[int, int | None, int | None]]:
    """Tokens, query length and longest query of decodes of 1 to ``most`` tokens each: uniform ones, and of those that
    differ the one with the fewest tokens, and the one with the most, for each longest query.
    """
    shapes: list[tuple[int, int | None, int | None]] = [(num_reqs * each, each, None) for each in range(1, most + 1)]
    for longest in range(2, most + 1) if num_reqs > 1 else ():
        shapes += [(tokens, None, longest) for tokens in {num_reqs - 1 + longest, num_reqs * longest - 1}]
    return shapes


def extra_rows(speculative: Speculative | None) -> int:
    """Rows of each request in the first draft pass beyond the target's: the table of vLLM 0.33, method by method."""
    if speculative is None:
        return 0
    drafts = speculative.num_tokens
    if speculative.method is Method.DRAFT_MODEL:
        return drafts if speculative.parallel_drafting else 1
    return drafts - 1 if speculative.parallel_drafting else 0


def is_chain(speculative: Speculative | None) -> bool:
    """Whether drafts come one after another, after the first pass."""
    if speculative is None or speculative.parallel_drafting:
        return False
    return speculative.method is not Method.MTP or speculative.model.num_layers == 1


def is_decode(batch: Batch) -> bool:
    """Whether the batch came from the decode half of ``admissible``."""
    return batch.query_len is not None or batch.max_query_len is not None


def is_waived(role: RolePlan, batch: Batch) -> bool:
    """Whether a waiver of the role names the batch, by the meaning of its fields."""
    for waiver in role.waivers:
        extent = batch.num_reqs if is_decode(batch) else batch.num_tokens
        if (
            waiver.kind.value == ("decode" if is_decode(batch) else "mixed")
            and waiver.query_len in (None, batch.query_len)
            and (waiver.max_query_len is None or 0 < longest_of(batch) <= waiver.max_query_len)
            and waiver.first <= extent <= waiver.last
            and waiver.min_loras <= batch.active_loras <= waiver.max_loras
        ):
            return True
    return False


# Dispatch. Compatibility and preference are written a second time, from the laws and not from ``Entry.rejection`` and
# ``Entry.cost``.


def dispatch(plan: Plan, batch: Batch) -> Entry | None:
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
