"""Dispatcher(plan).dispatch(batch): which entry serves a batch, in constant time.

The rule: of all entries of the role that do not reject the batch (``Entry.rejection``), the one with
the least ``Entry.cost``. Nothing is searched per batch: next-fit tables are built per query length and
LoRA case, and answers are cached, so that a batch costs two look-ups and a few comparisons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cache
from operator import attrgetter
from typing import Protocol

import attrs

from capture_planner.errors import DispatchError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import decode_families, draft_steps, is_admissible, kind_of
from capture_planner.records.plan import Plan, RolePlan, Waiver


@attrs.frozen
class Dispatch:
    """The answer for a batch: an entry and the padding, or the reason for none."""

    entry: Entry | None
    padded_tokens: int = 0
    """Rows of padding on the token axis."""
    padded_reqs: int = 0
    """Rows of padding on the request axis; 0 for PIECEWISE, which does not pad requests."""
    reason: Reason | None = None
    """Why there is no entry; None with an entry."""
    waiver: Waiver | None = None
    """The waiver that gives the reason, if one does."""

    @property
    def mode(self) -> GraphMode:
        """How the batch runs: FULL, PIECEWISE or NONE."""
        return GraphMode.NONE if self.entry is None else self.entry.mode


def served(entry: Entry, batch: Batch) -> Dispatch:
    """Return the answer of a batch that runs on an entry, with its padding."""
    padded_reqs = 0 if entry.num_reqs is None else entry.num_reqs - batch.num_reqs
    return Dispatch(entry, entry.num_tokens - batch.num_tokens, padded_reqs)


class AnyDispatcher(Protocol):
    """What answers for batches: a dispatcher, or what stands before one."""

    @property
    def plan(self) -> Plan:
        """The plan whose entries answer."""

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the entry that serves the batch, or none with the reason."""


_CACHE_SIZE = 1 << 16
"""Most cached answers, over all roles."""


class Dispatcher:
    """Finds the entries of one plan for batches. The same batch always has the same answer, on every rank."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._tables = {role.role: _RoleTables(role, plan) for role in plan.roles}
        # The cache. Small integer keys, because hashing a Batch alone takes longer than both
        # look-ups. Uniform decodes are kept by (role, query length, adapters) and requests;
        # batches whose requests do not matter (PIECEWISE) by (role, adapters) and tokens.
        self._decodes: dict[tuple[str, int, int], dict[int, Dispatch]] = {}
        self._mixed: dict[tuple[str, int], dict[int, Dispatch]] = {}
        self._others: dict[tuple[str, int, int, int, int | None], Dispatch] = {}
        self._cached = 0

    def __repr__(self) -> str:
        """Name the plan, and how many graphs each role dispatches to."""
        roles = ", ".join(f"{role.role} {role.mode.value} with {len(role.entries)}" for role in self.plan.roles)
        return f"Dispatcher({self.plan.model.name} on {self.plan.environment.name}: {roles})"

    def dispatch(self, batch: Batch) -> Dispatch:
        """Return the cheapest entry that serves the batch, or none with the reason.

        Total: an inadmissible batch is answered too, with ``Reason.NOT_ADMISSIBLE``. Constant time.
        Raises ``DispatchError`` only for a role that the plan does not have, and for counts that are no numbers.
        """
        # The hot path. ``Batch.uniform_query_len`` is written out here, as a property would double the time of a hit.
        query_len, num_reqs, num_tokens = batch.query_len, batch.num_reqs, batch.num_tokens
        answer: Dispatch | None
        try:
            if query_len is not None and batch.past_prompt and num_reqs * query_len == num_tokens:
                row = self._decodes.get((batch.role, query_len, batch.active_loras))
                answer = None if row is None else row.get(num_reqs)
            else:
                row = self._mixed.get((batch.role, batch.active_loras))
                # Cached for any number of requests that the tokens can have, and for no other.
                answer = None if row is None or not 0 < num_reqs <= num_tokens else row.get(num_tokens)
                if answer is None:
                    longest = batch.max_query_len if query_len is None and batch.past_prompt else None
                    answer = self._others.get((batch.role, num_reqs, num_tokens, batch.active_loras, longest))
            return self._miss(batch) if answer is None else answer
        # A count that is no number fails where it is compared or hashed.
        except TypeError:
            _refuse_counts(batch)
            raise

    def dispatch_counts(
        self,
        role: Role | str,
        num_reqs: int,
        num_tokens: int,
        query_len: int | None = None,
        past_prompt: bool = True,
        active_loras: int = 0,
        max_query_len: int | None = None,
    ) -> Dispatch:
        """Dispatch a batch given by its counts, which ``Batch`` explains.

        Makes a ``Batch`` on every call: a serving loop that has one should call ``dispatch``.

        :param role: a role, or its name.
        """
        return self.dispatch(
            Batch(
                role=self.plan.role(role).role,
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                query_len=query_len,
                past_prompt=past_prompt,
                active_loras=active_loras,
                max_query_len=max_query_len,
            )
        )

    def _miss(self, batch: Batch) -> Dispatch:
        """Answer from the tables, and cache the answer for the next batch like it."""
        tables = self._tables[self.plan.role(batch.role).role]
        _refuse_counts(batch)
        answer = tables.answer(batch)
        role, loras, query_len = batch.role, batch.active_loras, batch.uniform_query_len
        longest = batch.max_query_len if batch.query_len is None and batch.past_prompt else None
        self._cached += 1
        # No serving loop has that many; a fuzzer has.
        if self._cached > _CACHE_SIZE:
            self._cached = 1
            for cache in (self._decodes, self._mixed, self._others):
                cache.clear()
        if query_len is not None:
            self._decodes.setdefault((role, query_len, loras), {})[batch.num_reqs] = answer
        elif answer.entry is not None and answer.entry.num_reqs is None and not tables.requests_matter:
            self._mixed.setdefault((role, loras), {})[batch.num_tokens] = answer
        else:
            self._others[role, batch.num_reqs, batch.num_tokens, loras, longest] = answer
        return answer


class _RoleTables:
    """Next-fit tables of one role, each built when first needed."""

    def __init__(self, role: RolePlan, plan: Plan) -> None:
        self._role, self._plan = role, plan
        self._families = decode_families(role.role, plan)
        self._cases = sorted({entry.active_loras for entry in role.entries})
        # Caches of the instance: on the class, they would keep every plan alive.
        self._decode_fits, self._mixed_fits = cache(self._decode_fit), cache(self._mixed_fit)
        self._varying_fits = cache(self._varying_fit)
        self._by_cost = sorted(role.entries, key=lambda entry: entry.cost)
        mixed = [entry for entry in role.entries if entry.tokens_each is None]
        # A mixed graph may have room for fewer requests than tokens: one table for each such bound.
        self._levels = sorted({bound for entry in mixed if (bound := _binding_reqs(entry)) is not None})
        varying = any(entry.max_query_len for entry in role.entries)
        self.requests_matter = bool(self._levels) or varying or any(entry.draft_steps for entry in mixed)

    def answer(self, batch: Batch) -> Dispatch:
        """Return the cheapest compatible entry with its padding, or the reason for none."""
        if batch.active_loras > 0 and self._role.role.is_drafter:
            # Drafters take no adapters (vLLM 0.33); a negative count stays wrong.
            batch = attrs.evolve(batch, active_loras=0)
        # An entry serves what fits, also a batch that the limits do not admit.
        entry = self._find(batch) if 0 < batch.num_reqs <= batch.num_tokens else None
        if entry is not None:
            return served(entry, batch)
        if not is_admissible(batch, self._plan, self._families):
            return Dispatch(None, reason=Reason.NOT_ADMISSIBLE)
        kind = kind_of(batch, self._families)
        waiver = next((each for each in self._role.waivers if each.covers(batch, kind)), None)
        return Dispatch(None, reason=Reason.UNCOVERED if waiver is None else waiver.reason, waiver=waiver)

    def _find(self, batch: Batch) -> Entry | None:
        case = bisect_left(self._cases, batch.active_loras)
        if case == len(self._cases) or batch.active_loras < 0:
            return None
        loras, query_len = self._cases[case], batch.uniform_query_len
        fits: list[Entry | None] = []
        steps = draft_steps(self._role.role, batch.num_reqs, self._plan.speculative)
        if query_len is not None:
            fits.append(self._decode_fits(query_len, steps, loras).at(batch.num_reqs))
        longest = batch.decode_query_len
        if longest is not None:
            fits.append(self._varying_fits(longest, steps, loras).at(batch.num_reqs))
        level = bisect_left(self._levels, batch.num_reqs)
        bound = self._levels[level] if level < len(self._levels) else None
        fits.append(self._mixed_fits(bound, steps, loras).at(batch.num_tokens))
        return min((entry for entry in fits if entry), key=attrgetter("cost"), default=None)

    def _usable(self, steps: int | None, loras: int) -> Iterable[Entry]:
        """Return the entries for chains of ``steps`` and for ``loras`` adapters, the cheapest first."""
        return (each for each in self._by_cost if each.active_loras >= loras and each.draft_steps in (None, steps))

    def _decode_fit(self, query_len: int, steps: int | None, loras: int) -> _Fit:
        """Return the cheapest uniform entries, by requests."""
        return _Fit.of(
            (min(entry.num_reqs or entry.num_tokens, entry.num_tokens // query_len), entry)
            for entry in self._usable(steps, loras)
            if entry.query_len == query_len
        )

    def _varying_fit(self, longest: int, steps: int | None, loras: int) -> _Fit:
        """Return the cheapest entries for decodes of up to ``longest`` tokens each, by requests."""
        return _Fit.of(
            (entry.num_reqs or 0, entry)
            for entry in self._usable(steps, loras)
            if entry.max_query_len is not None and entry.max_query_len >= longest
        )

    def _mixed_fit(self, bound: int | None, steps: int | None, loras: int) -> _Fit:
        """Return the cheapest entries for any batch, by tokens, that have room for ``bound`` requests."""
        return _Fit.of(
            (entry.num_tokens, entry)
            for entry in self._usable(steps, loras)
            if entry.tokens_each is None
            and (_binding_reqs(entry) is None or (bound is not None and (entry.num_reqs or 0) >= bound))
        )


_PLAIN = (int, type(None))


def _refuse_counts(batch: Batch) -> None:
    """Raise ``DispatchError`` where counts of a batch are no whole numbers."""
    # Nearly all counts are plain integers, and names for the others take longer than an answer.
    if type(batch.num_reqs) is type(batch.num_tokens) is type(batch.active_loras) is int and (
        type(batch.query_len) in _PLAIN and type(batch.max_query_len) in _PLAIN
    ):
        return
    required, optional = ("num_reqs", "num_tokens", "active_loras"), ("query_len", "max_query_len")
    counts = {name: getattr(batch, name) for name in required}
    counts |= {name: value for name in optional if (value := getattr(batch, name)) is not None}
    wrong = [f"{name} is {value!r}" for name, value in counts.items() if not hasattr(value, "__index__")]
    if wrong:
        raise DispatchError(f"{' and '.join(wrong)}; expected whole numbers")


def _binding_reqs(entry: Entry) -> int | None:
    """Return an entry's bound on requests unless its tokens imply it (each request has a token)."""
    return None if entry.num_reqs is None or entry.num_reqs >= entry.num_tokens else entry.num_reqs


@attrs.frozen
class _Fit:
    """The cheapest entry for each count: ascending sizes, each with its entry."""

    sizes: tuple[int, ...]
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, sized: Iterable[tuple[int, Entry]]) -> _Fit:
        """Keep the ``(size, entry)`` pairs, cheapest first, that are larger than all before them."""
        sizes, entries = [0], []
        for size, entry in sized:
            # A graph that is no larger than a cheaper one is never the answer.
            if size > sizes[-1]:
                sizes.append(size)
                entries.append(entry)
        return cls(tuple(sizes[1:]), tuple(entries))

    def at(self, count: int) -> Entry | None:
        """Return the entry for a count, or None above the largest size."""
        index = bisect_left(self.sizes, count)
        return self.entries[index] if index < len(self.sizes) else None
