"""Coverage: all admissible batches of a plan, in cells of batches with the same answer.

Between two adjacent sizes and two adjacent LoRA cases every batch has the same answer. So a finite walk over the cells
proves for all batches that each has an entry or a waiver (law 1), and which entries are reachable (law 4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import attrs

from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import grouped
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import (
    DecodeFamily,
    Domain,
    decode_families,
    mixed_tokens,
    most_loras,
    split_at,
)
from capture_planner.records.plan import Plan, RolePlan, Waiver


@attrs.frozen(kw_only=True)
class Cell:
    """Batches of one kind with one answer.

    ``first`` to ``last`` are requests of decodes, tokens of mixed batches; a schedule may leave gaps.
    ``min_reqs`` to ``max_reqs`` matter for mixed batches only. ``answer`` belongs to the largest batch: of varying
    decodes, those of fewer tokens may have a nearer graph of mixed batches.
    """

    role: Role
    kind: Kind
    query_len: int | None
    varies: bool = False
    """True for decodes of up to ``query_len`` tokens each."""
    draft_steps: int | None = None
    """Draft decodes that follow each other at these batch sizes; None for other roles."""
    first: int
    last: int
    min_reqs: int
    max_reqs: int
    min_loras: int
    max_loras: int
    answer: Dispatch

    @property
    def entry(self) -> Entry | None:
        return self.answer.entry

    @property
    def largest(self) -> Batch:
        """The batch that the answer belongs to."""
        if self.varies and self.query_len is not None:
            tokens = self.last * self.query_len
            return Batch.varying(self.role, self.last, tokens, self.query_len, self.min_loras)
        if self.kind is Kind.DECODE and self.query_len is not None:
            return Batch.decode(self.role, self.last, self.query_len, self.min_loras)
        return Batch.mixed(self.role, self.max_reqs, self.last, self.min_loras)

    @property
    def padded(self) -> float:
        """The share of computed tokens that is padding, over the batches of the cell."""
        if self.entry is None:
            return 0.0
        # Counts are spread evenly over the cell, gaps of a schedule aside, so their mean is its middle.
        return 1 - ((self.first + self.last) / 2 * (self.query_len or 1)) / self.entry.num_tokens

    @property
    def worst(self) -> float:
        """The largest padded/real ratio of tokens in the cell."""
        return 1.0 if self.entry is None else self.entry.num_tokens / (self.first * (self.query_len or 1))


@attrs.frozen(kw_only=True)
class Coverage:
    """All cells of a plan."""

    plan: Plan
    cells: tuple[Cell, ...]

    @property
    def uncovered(self) -> tuple[Cell, ...]:
        """Cells with neither entry nor waiver."""
        holes = (cell for cell in self.cells if cell.answer.reason is Reason.UNCOVERED)
        return tuple(cell for cell in holes if cell.answer.waiver is None)

    @property
    def covered(self) -> bool:
        """Whether every cell has an entry or a waiver."""
        return not self.uncovered

    def reached(self, role: Role) -> frozenset[Entry]:
        """Return the entries of a role that some admissible batch is dispatched to."""
        return frozenset(cell.entry for cell in self.cells if cell.role is role and cell.entry is not None)


def coverage(plan: Plan) -> Coverage:
    """Return the cells of every role of ``plan``."""
    dispatcher = Dispatcher(plan)
    return Coverage(plan=plan, cells=tuple(cell for role in plan.roles for cell in _role_cells(role, plan, dispatcher)))


def _role_cells(role: RolePlan, plan: Plan, dispatcher: Dispatcher) -> Iterator[Cell]:
    # The LoRA counts, split where the answer can change; drafters take none.
    cases = {entry.active_loras for entry in role.entries}
    cases |= {case for waiver in role.waivers for case in (waiver.min_loras - 1, waiver.max_loras)}
    adapters = list(split_at(0, most_loras(role.role, plan), cases))
    for family in decode_families(role.role, plan):
        for alike in _decodes_of(role, family):
            for first, last in _ranges(alike.requests, _decode_stops(role, alike)):
                for low, high in adapters:
                    # A request has at most one adapter, so fewer requests than ``low`` have no such batch.
                    if low <= last:
                        cell = _cell(dispatcher, alike.largest(role.role, last, low), Kind.DECODE, first, first, high)
                        steps = family.draft_steps
                        yield attrs.evolve(cell, query_len=alike.query_len, varies=alike.varies, draft_steps=steps)
    # Graphs for decodes reject every mixed batch.
    mixed = [entry for entry in role.entries if entry.tokens_each is None]
    stops = {entry.num_tokens for entry in mixed} | _waiver_stops(role, Kind.MIXED, None)
    for first, last in _ranges(mixed_tokens(role.role, plan), stops):
        # A batch has no more requests than tokens.
        most = min(last, plan.limits.max_num_reqs)
        for low, high in adapters:
            fewest = max(low, 1)
            while fewest <= most:
                batch = Batch.mixed(role.role, fewest, last, low)
                # The cheapest entry for some requests is the cheapest for all that it has room for.
                entry = dispatcher.dispatch(batch).entry
                room = most if entry is None or entry.num_reqs is None else min(most, entry.num_reqs)
                yield _cell(dispatcher, attrs.evolve(batch, num_reqs=room), Kind.MIXED, first, fewest, high)
                fewest = room + 1


def _cell(dispatcher: Dispatcher, largest: Batch, kind: Kind, first: int, min_reqs: int, max_loras: int) -> Cell:
    return Cell(
        role=largest.role,
        kind=kind,
        query_len=largest.query_len,
        first=first,
        last=largest.extent(kind),
        min_reqs=min_reqs,
        max_reqs=largest.num_reqs,
        min_loras=largest.active_loras,
        max_loras=max_loras,
        answer=dispatcher.dispatch(largest),
    )


@attrs.frozen(kw_only=True)
class _Decodes:
    """Decodes of a family whose requests alone decide what serves them, and their tokens where mixed graphs do."""

    query_len: int
    varies: bool
    """True where requests have up to ``query_len`` tokens."""
    requests: Domain
    alone: int
    """Tokens of the longest decode of one request."""
    is_named: bool = False
    """True where uniform decodes of ``query_len`` tokens are told apart from these."""

    def largest(self, role: Role, num_reqs: int, loras: int) -> Batch:
        """Return the decode of so many requests that has the most tokens."""
        if not self.varies:
            return Batch.decode(role, num_reqs, self.query_len, loras)
        if num_reqs == 1:
            return Batch.varying(role, 1, self.alone, self.alone, loras)
        # With all tokens the batch would be a uniform decode, which has an answer of its own where it is named.
        return Batch.varying(role, num_reqs, num_reqs * self.query_len - self.is_named, self.query_len, loras)


def _decodes_of(role: RolePlan, family: DecodeFamily) -> Iterator[_Decodes]:
    """Yield the decodes of a family that are answered alike.

    Where decodes vary, the answer can change with the longest request, at each length that a varying graph or a waiver
    ends at. Uniform decodes are told apart at the lengths that have a graph or a waiver of their own.
    """
    most, requests = family.query_len, family.requests
    if not family.varies:
        yield _Decodes(query_len=most, varies=False, requests=requests, alone=most)
        return
    # A waiver ends an answer as a graph does: its reason is part of the answer.
    named: list[Entry | Waiver] = [*role.entries, *(each for each in role.waivers if each.kind is Kind.DECODE)]
    uniform = {each.query_len for each in named if each.query_len and each.query_len <= most}
    ends = {each.max_query_len for each in named if each.max_query_len and each.max_query_len < most}
    for length in sorted(uniform):
        yield _Decodes(query_len=length, varies=False, requests=requests, alone=length)
    below = 0
    for end in sorted({*ends, most}):
        # One request is always uniform.
        alone = max({*range(below + 1, end + 1)} - uniform, default=0)
        several = requests if alone else requests.above(1)
        # Requests of at most one token each cannot differ.
        if alone or (several and end > 1):
            yield _Decodes(query_len=end, varies=True, requests=several, alone=alone, is_named=end in uniform)
        below = end


def _decode_stops(role: RolePlan, alike: _Decodes) -> set[int]:
    """Return the requests of decodes after which the answer can change."""
    query_len = alike.query_len
    stops = _waiver_stops(role, Kind.DECODE, None if alike.varies else query_len)
    for entry in role.entries:
        if entry.max_query_len is not None:
            stops.add(entry.num_reqs or 0)
        # A uniform graph serves no varying decode, so that its size changes nothing there.
        elif entry.query_len is None or (entry.query_len == query_len and not alike.varies):
            tokens = (entry.num_tokens + alike.is_named) // query_len
            stops.add(tokens if entry.num_reqs is None else min(tokens, entry.num_reqs))
    return stops


def _waiver_stops(role: RolePlan, kind: Kind, query_len: int | None) -> set[int]:
    waivers = [w for w in role.waivers if w.kind is kind and w.query_len in (None, query_len)]
    return {stop for waiver in waivers for stop in (waiver.first - 1, waiver.last)}


def _ranges(domain: Domain, stops: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Split a domain after each stop; yield the first and last real count of each part."""
    first = domain.after(0)
    for stop in sorted({*stops, *(end for _, end in domain.intervals[-1:])}):
        if first is None:
            return
        last = domain.upto_count(stop)
        if last is not None and last >= first:
            yield first, last
            first = domain.after(last)


def nearest_group_misses(plan: Plan, role: Role) -> tuple[int, ...]:
    """Return the decode batch sizes, in requests, that miss a full graph by looking at one size only.

    For a number of tokens vLLM 0.33 looks only at the graphs of the *smallest* captured size that holds it. Where those
    have another query length, it misses a full graph of the next size (vllm#53407, #56136).
    """
    full = [entry for entry in plan.role(role).entries if entry.mode is GraphMode.FULL and entry.active_loras == 0]
    if len({entry.query_len for entry in full}) < 2:
        return ()  # sizes of one query length cannot hide each other
    by_tokens, dispatcher = grouped(full, lambda entry: entry.num_tokens), Dispatcher(plan)
    sizes = sorted(by_tokens)
    missed = []
    for family in decode_families(role, plan):
        for count, _ in family.requests.counts():
            tokens = count * family.query_len
            batch = Batch.decode(role, count, family.query_len)
            nearest = bisect_left(sizes, tokens)
            near = by_tokens[sizes[nearest]] if nearest < len(sizes) else []
            seen = any(entry.rejection(batch, family.draft_steps) is None for entry in near)
            if not seen and dispatcher.dispatch(batch).mode is GraphMode.FULL:
                missed.append(count)
    return tuple(sorted(missed))
