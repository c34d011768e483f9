"""The admissible batches of each role: what the limits and the schedule admit.

The planner plans for exactly these (law 4), and the lint proves that each has an entry or a waiver. A
dynamic schedule leaves gaps in the counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import attrs

from capture_planner.modes import Role
from capture_planner.records._base import grouped
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.model import Speculative
from capture_planner.records.spec import Limits, Lora, Parallel

T = TypeVar("T")


class Deployment(Protocol):
    """What decides which batches are admissible; specs, plans and emulations of engines have it."""

    @property
    def limits(self) -> Limits: ...
    @property
    def speculative(self) -> Speculative | None: ...
    @property
    def lora(self) -> Lora | None: ...
    @property
    def parallel(self) -> Parallel: ...


@attrs.frozen
class Domain:
    """The real counts that a ladder must cover; its sizes must be multiples of ``step``."""

    intervals: tuple[tuple[int, int], ...]
    """Inclusive ranges of real counts: ascending, disjoint."""
    step: int = 1
    # Kept apart from the intervals, because planning bisects them for every size that it tries.
    _firsts: tuple[int, ...] = attrs.field(init=False, repr=False, eq=False)
    _lasts: tuple[int, ...] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_firsts", tuple(first for first, _ in self.intervals))
        object.__setattr__(self, "_lasts", tuple(last for _, last in self.intervals))

    @classmethod
    def upto(cls, last: int, step: int = 1) -> Domain:
        """Return the domain of every count from 1 to ``last``."""
        return cls(((1, last),) if last >= 1 else (), step)

    def __bool__(self) -> bool:
        return bool(self.intervals)

    def __contains__(self, count: int) -> bool:
        return self.after(count - 1) == count

    @property
    def ceiling(self) -> int:
        """The size that serves the largest count."""
        return self.round_up(self._lasts[-1])

    def round_up(self, count: int) -> int:
        """Return the least size that is a multiple of the step and holds ``count``."""
        return -(-count // self.step) * self.step

    def after(self, count: int) -> int | None:
        """Return the least admissible count above ``count``, or None."""
        index = bisect_right(self._lasts, count)
        return None if index == len(self._lasts) else max(count + 1, self._firsts[index])

    def upto_count(self, count: int) -> int | None:
        """Return the largest admissible count that is at most ``count``, or None."""
        index = bisect_right(self._firsts, count) - 1
        return None if index < 0 else min(count, self._lasts[index])

    def tight(self, limit: int) -> int | None:
        """Return the largest useful size up to ``limit``: one that some count needs exactly."""
        # From a multiple of the step, so that rounding up does not exceed the limit.
        count = self.upto_count(limit // self.step * self.step)
        return None if count is None else self.round_up(count)

    def clipped(self, last: int) -> Domain:
        """Return the part up to ``last``."""
        return Domain(tuple((first, min(end, last)) for first, end in self.intervals if first <= last), self.step)

    def above(self, count: int) -> Domain:
        """Return the part above ``count``."""
        return Domain(tuple((max(first, count + 1), last) for first, last in self.intervals if last > count), self.step)

    def counts(self, least: int = 1, upto: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield ``(count, count)`` from ``least`` to ``upto``, then ``(first, last)`` of each range above."""
        for first, last in self.intervals:
            end = last if upto is None else min(last, upto)
            yield from ((count, count) for count in range(max(first, least), end + 1))
            if end < last and least <= last:
                yield max(first, least, end + 1), last

    def needed(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Return the sizes, rounded up to the step, that some count needs: ascending."""
        return tuple(size for size, _ in self.served(sorted({self.round_up(size) for size in sizes})))

    def served(self, sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yield each of the ascending sizes that some count needs, with the least count that it serves."""
        previous = 0
        for size in sizes:
            least = self.after(previous)
            if least is not None and least <= size:
                yield size, least
            previous = size


@attrs.frozen(kw_only=True)
class DecodeFamily:
    """Decodes of one role, counted in requests: uniform ones of one query length, or all up to it."""

    query_len: int
    varies: bool = False
    """True where each request has 1 to ``query_len`` tokens, rather than exactly so many."""
    draft_steps: int | None
    """Length of the chain of draft decodes at these batch sizes; None for other roles."""
    requests: Domain


def decode_tiers(deployment: Deployment) -> tuple[tuple[int, int, int], ...]:
    """Return ``(first, last, k)``: the draft tokens of each batch size, 0 without speculation."""
    most = deployment.limits.max_num_reqs
    return ((1, most, 0),) if deployment.speculative is None else deployment.speculative.tiers(most)


def decode_families(role: Role, deployment: Deployment) -> tuple[DecodeFamily, ...]:
    """Return the decodes of ``role``.

    Target and draft prefill run 1 + k tokens per request, at the batch sizes where the schedule has k, or up to so many
    where the role's decodes vary; the draft prefill of some methods has more. Draft decodes run one token, k - 1 times
    after the draft prefill, where the drafter is a chain. A batch has no more requests than fit max_num_tokens in both
    passes.
    """
    limits, slots = deployment.limits, extra_slots(deployment)
    is_decode = role is Role.DRAFT_DECODE
    varying = () if deployment.speculative is None else deployment.speculative.varying_decodes
    # Parallel drafting and several MTP modules make all drafts in the prefill.
    if is_decode and deployment.speculative is not None and not deployment.speculative.is_chain:
        return ()
    # With one draft, which the prefill makes, no draft decode follows.
    tiers = (tier for tier in decode_tiers(deployment) if tier[2] >= 2 or not is_decode)
    families = []
    for k, alike in sorted(grouped(tiers, lambda tier: tier[2]).items()):
        query_len, draft_steps = (1, k - 1) if is_decode else (1 + k + slots * role.is_drafter, None)
        # Ranges with the same k are one family, whose counts may have gaps.
        intervals = tuple((first, last) for first, last, _ in alike)
        domain = Domain(intervals, request_step(query_len, deployment.parallel))
        # The first draft pass has the same requests with more rows, and must hold them too.
        domain = domain.clipped(limits.max_num_tokens // (1 if is_decode else 1 + k + slots))
        if domain:
            # Without drafts every request has one token.
            varies = k > 0 and role in varying
            families.append(DecodeFamily(query_len=query_len, varies=varies, draft_steps=draft_steps, requests=domain))
    return tuple(families)


def max_query_len(role: Role, deployment: Deployment) -> int:
    """Return the longest uniform query of a role: 1 + the largest k that is scheduled, with its slots, or 1."""
    return max(query_len_of(role, deployment, first) for first, *_ in decode_tiers(deployment))


def query_len_of(role: Role, deployment: Deployment, num_reqs: int) -> int:
    """Return the tokens that each of so many requests has in a decode of a role."""
    if role is Role.DRAFT_DECODE:
        return 1
    k = 0 if deployment.speculative is None else deployment.speculative.draft_tokens(num_reqs)
    return 1 + k + extra_slots(deployment) * role.is_drafter


def draft_prefill_of(batch: Batch, slots: int) -> Batch:
    """Return the first draft pass after the target's ``batch``: ``slots`` more rows for each request, no adapters."""
    return attrs.evolve(
        batch,
        role=Role.DRAFT_PREFILL,
        num_tokens=batch.num_tokens + batch.num_reqs * slots,
        query_len=None if batch.query_len is None else batch.query_len + slots,
        active_loras=0,
        max_query_len=None if batch.max_query_len is None else batch.max_query_len + slots,
    )


def extra_slots(deployment: Deployment) -> int:
    """Return the rows of each request that the first draft pass has more than the target's batch."""
    return 0 if deployment.speculative is None else deployment.speculative.extra_slots


def most_tokens(role: Role, deployment: Deployment) -> int:
    """Return the most tokens of a batch: the target's leaves room for one request's rows of the first draft pass."""
    return deployment.limits.max_num_tokens - extra_slots(deployment) * (role is Role.TARGET)


def token_step(parallel: Parallel) -> int:
    """Return what padded tokens must be a multiple of: with sequence parallelism, ranks share them."""
    return parallel.tensor if parallel.sequence else 1


def request_step(query_len: int, parallel: Parallel) -> int:
    """Return what padded requests must be a multiple of, so that padded tokens are aligned."""
    # The fewest requests whose tokens are a multiple of the step.
    step = token_step(parallel)
    return step // math.gcd(step, query_len)


def mixed_tokens(role: Role, deployment: Deployment) -> Domain:
    """Return the token counts of mixed batches; draft decodes are always uniform and have none."""
    if role is Role.DRAFT_DECODE:
        return Domain((), 1)
    return Domain.upto(most_tokens(role, deployment), token_step(deployment.parallel))


def lora_cases(role: Role, deployment: Deployment) -> tuple[int, ...]:
    """Return the adapter counts that graphs are planned for. Drafters take no adapters (vLLM 0.33)."""
    return (0,) if deployment.lora is None or role.is_drafter else deployment.lora.cases()


def served_cases(cases: tuple[int, ...], num_reqs: int) -> tuple[int, ...]:
    """Return the cases that a batch of at most ``num_reqs`` requests can need.

    A request has at most one adapter, so a case is needed only if the next smaller one can be
    exceeded by that many requests.
    """
    return cases[: 1 + bisect_left(cases, num_reqs)]


def most_loras(role: Role, deployment: Deployment) -> int:
    """Return the most active adapters; rows without one count as one more (vLLM 0.33). Drafters: 0."""
    return 0 if deployment.lora is None or role.is_drafter else deployment.lora.max_active + 1


def batches(
    role: Role, deployment: Deployment, *, families: Iterable[DecodeFamily] | None = None, upto: int | None = None
) -> Iterator[tuple[Batch, int]]:
    """Yield every admissible batch of a role: decodes by requests, mixed batches by tokens.

    Of the mixed batches with the same tokens, only the one with the most requests, which is the hardest to serve; of
    decodes that vary in length, the uniform ones with the most tokens. Each batch comes with every possible number of
    active adapters, and with the last count of requests or tokens that it represents.

    :param families: the role's decodes; None: ``decode_families``.
    :param upto: above this many tokens, the smallest batch of a range represents the range.
    """
    decodes = decode_families(role, deployment) if families is None else tuple(families)
    # A request has at most one adapter, so no batch has more adapters than requests.
    for loras in range(min(most_loras(role, deployment), deployment.limits.max_num_reqs) + 1):
        for family in decodes:
            query_len = family.query_len
            # ``upto`` counts tokens, and a family requests.
            for num_reqs, last in family.requests.counts(loras, None if upto is None else upto // query_len):
                yield Batch.decode(role, num_reqs, query_len, loras), last
        for num_tokens, last in mixed_tokens(role, deployment).counts(loras, upto):
            num_reqs = min(num_tokens, deployment.limits.max_num_reqs)
            yield Batch.mixed(role, num_reqs, num_tokens, loras), last


def split_at(first: int, last: int, stops: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Split the counts from ``first`` to ``last`` after each stop between them; yield the ends of each part."""
    for stop in sorted({stop for stop in stops if first <= stop < last} | {last}):
        yield first, stop
        first = stop + 1


def union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return inclusive ranges in ascending order, those that touch as one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        # 1 to 3 and 4 to 6 have no count between them.
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def split_when(apart: Callable[[T, T], bool], items: Iterable[T]) -> Iterator[list[T]]:
    """Yield runs of items, with an end between two neighbours that are ``apart``."""
    run: list[T] = []
    for item in items:
        if run and apart(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def draft_steps(role: Role, num_reqs: int, speculative: Speculative | None) -> int | None:
    """Return how many draft decodes the schedule runs for this many requests; None for other roles."""
    if role is not Role.DRAFT_DECODE or speculative is None:
        return None
    # The draft prefill makes the first draft.
    return max(speculative.draft_tokens(num_reqs) - 1, 0) if speculative.is_chain else 0


def kind_of(batch: Batch, families: Iterable[DecodeFamily]) -> Kind:
    """Return DECODE for a decode that the schedule admits, uniform or varying as the role's are, else MIXED."""
    uniform, longest = batch.uniform_query_len, batch.decode_query_len
    scheduled = any(
        batch.num_reqs in f.requests
        # A varying family has uniform decodes too, of any length up to its own.
        and (longest is not None and longest <= f.query_len if f.varies else f.query_len == uniform)
        for f in families
    )
    return Kind.DECODE if scheduled else Kind.MIXED


def is_admissible(batch: Batch, deployment: Deployment, families: Iterable[DecodeFamily]) -> bool:
    """Whether the limits and the schedule admit a batch.

    :param families: ``decode_families`` of its role.
    """
    if not (
        1 <= batch.num_reqs <= deployment.limits.max_num_reqs
        and batch.num_reqs <= batch.num_tokens <= most_tokens(batch.role, deployment)
        and 0 <= batch.active_loras <= min(most_loras(batch.role, deployment), batch.num_reqs)
    ):
        return False
    # Draft decodes have no mixed batches.
    return batch.role is not Role.DRAFT_DECODE or kind_of(batch, families) is Kind.DECODE
