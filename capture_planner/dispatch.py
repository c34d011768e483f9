"""Dispatcher(plan).dispatch(...): which entry serves this batch, in constant time.

The rule is ``Entry.rejection``: of all entries of the role that do not reject the batch, the one of
least ``Entry.cost``. Nothing is searched when a batch arrives: next-fit tables are laid out per
query length and adapter case when a dispatcher is made, and an answer that was given once is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import attrs

from capture_planner.admissible import decode_families, draft_steps, is_admissible, kind_of
from capture_planner.entry import Batch, Entry
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.plan import Plan, RolePlan, Waiver


@attrs.frozen
class Dispatch:
    """The answer: an entry with its padding, or no entry with the reason."""

    entry: Entry | None
    padded_tokens: int = 0
    """Rows of padding on the token axis."""
    padded_reqs: int = 0
    """Rows of padding on the request axis; 0 for PIECEWISE, which does not pad requests."""
    reason: Reason | None = None
    """Why there is no entry; None where there is one."""
    waiver: Waiver | None = None
    """The waiver that the reason comes from, where it comes from one."""

    @property
    def mode(self) -> GraphMode:
        """How the batch runs: FULL, PIECEWISE or NONE."""
        return GraphMode.NONE if self.entry is None else self.entry.mode


_KEPT_ANSWERS = 1 << 16


class Dispatcher:
    """Answers for one plan. Pure: the same batch has the same answer for ever, on every rank."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._tables = {role.role: _RoleTables(role, plan) for role in plan.roles}
        # Answers given, where the next such batch looks first: uniform decodes by (role, query
        # length, adapters) and requests; batches whose requests do not matter by (role, adapters)
        # and tokens; all others as they are.
        self._decodes: dict[tuple[str, int, int], list[Dispatch | None]] = {}
        self._mixed: dict[tuple[str, int], list[Dispatch | None]] = {}
        self._others: dict[tuple[str, int, int, int], Dispatch] = {}

    def dispatch(
        self,
        role: Role | str,
        num_reqs: int,
        num_tokens: int,
        query_len: int | None = None,
        past_prompt: bool = True,
        active_loras: int = 0,
    ) -> Dispatch:
        """Return the cheapest entry that serves the batch, or NONE with a reason.

        All counts are real; ``Batch`` says what each means. Total for every batch; raises
        ``DispatchError`` only for a role that the plan does not have.
        """
        if query_len is not None and past_prompt and num_reqs * query_len == num_tokens:
            row = self._decodes.get((role, query_len, active_loras))
            if row is not None and 0 < num_reqs < len(row):
                answer = row[num_reqs]
                if answer is not None:
                    return answer
        else:
            row = self._mixed.get((role, active_loras))
            if row is not None and 0 < num_reqs <= num_tokens < len(row):
                answer = row[num_tokens]
            else:
                answer = self._others.get((role, num_reqs, num_tokens, active_loras))
            if answer is not None:
                return answer
        return self._first(
            Batch(
                role=self.plan.role(role).role,
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                query_len=query_len,
                past_prompt=past_prompt,
                active_loras=active_loras,
            )
        )

    def answer(self, batch: Batch) -> Dispatch:
        """Return the same answer as ``dispatch``, and keep nothing."""
        return self._tables[self.plan.role(batch.role).role].answer(batch)

    def _first(self, batch: Batch) -> Dispatch:
        """Answer from the tables, and keep the answer for the next batch like it."""
        tables = self._tables[batch.role]
        answer = tables.answer(batch)
        role, loras, most_reqs = batch.role, batch.active_loras, self.plan.limits.max_num_reqs
        if loras not in tables.lora_counts:
            return answer
        if batch.uniform_query_len is not None:
            if batch.query_len in tables.query_lens and 0 < batch.num_reqs <= most_reqs:
                row = self._decodes.setdefault(
                    (role, batch.uniform_query_len, loras), [None] * (most_reqs + 1)
                )
                row[batch.num_reqs] = answer
        elif tables.requests_matter or not 0 < batch.num_reqs <= batch.num_tokens <= tables.largest_mixed:
            if len(self._others) >= _KEPT_ANSWERS:
                self._others.clear()
            self._others[role, batch.num_reqs, batch.num_tokens, loras] = answer
        else:
            row = self._mixed.setdefault((role, loras), [None] * (tables.largest_mixed + 1))
            row[batch.num_tokens] = answer
        return answer


class _RoleTables:
    """Next-fit tables of one role, each made when it is first needed."""

    def __init__(self, role: RolePlan, plan: Plan) -> None:
        self._role, self._plan = role, plan
        self._families = decode_families(role.role, plan)
        self._cases = sorted({entry.active_loras for entry in role.entries})
        self._decode_fits: dict[tuple[int, int | None, int], list[Entry]] = {}
        self._mixed_fits: dict[tuple[GraphMode, int | None, int], list[Entry]] = {}
        mixed = [entry for entry in role.entries if entry.query_len is None]
        self._levels = sorted({bound for entry in mixed if (bound := _binding_reqs(entry)) is not None})
        self.query_lens = {e.query_len for e in role.entries} | {f.query_len for f in self._families}
        self.largest_mixed = max((entry.num_tokens for entry in mixed), default=0)
        self.requests_matter = bool(self._levels)
        self.lora_counts = range(1 if plan.lora is None else plan.lora.max_active + 2)

    def answer(self, batch: Batch) -> Dispatch:
        """Return the cheapest compatible entry with its padding, or the reason for none."""
        if self._role.role.is_drafter:
            batch = attrs.evolve(batch, active_loras=min(batch.active_loras, 0))
        entry = self._find(batch) if 0 < batch.num_reqs <= batch.num_tokens else None
        if entry is not None:
            return Dispatch(
                entry,
                entry.num_tokens - batch.num_tokens,
                0 if entry.num_reqs is None else entry.num_reqs - batch.num_reqs,
            )
        if not is_admissible(batch, self._plan):
            return Dispatch(None, reason=Reason.NOT_ADMISSIBLE)
        kind = kind_of(batch, self._families)
        for waiver in self._role.waivers:
            if waiver.covers(batch, kind):
                return Dispatch(None, reason=waiver.reason, waiver=waiver)
        return Dispatch(None, reason=Reason.UNCOVERED)

    def _find(self, batch: Batch) -> Entry | None:
        case = bisect_left(self._cases, batch.active_loras)
        if case == len(self._cases) or batch.active_loras < 0:
            return None
        loras, query_len = self._cases[case], batch.uniform_query_len
        found: list[Entry | None] = []
        if query_len in self.query_lens and query_len is not None:
            steps = draft_steps(self._role.role, batch.num_reqs, self._plan.speculative)
            found.append(_at(self._decode_fit(query_len, steps, loras), batch.num_reqs))
        level = bisect_left(self._levels, batch.num_reqs)
        bound = self._levels[level] if level < len(self._levels) else None
        for mode in (GraphMode.FULL, GraphMode.PIECEWISE):
            found.append(_at(self._mixed_fit(mode, bound, loras), batch.num_tokens))
        return min((entry for entry in found if entry), key=lambda entry: entry.cost, default=None)

    def _decode_fit(self, query_len: int, steps: int | None, loras: int) -> list[Entry]:
        """Return the cheapest uniform entry by requests."""
        key = (query_len, steps, loras)
        if key not in self._decode_fits:
            self._decode_fits[key] = _next_fit(
                (min(entry.num_reqs or entry.num_tokens, entry.num_tokens // query_len), entry)
                for entry in self._role.entries
                if entry.query_len == query_len
                and entry.active_loras >= loras
                and entry.draft_steps in (None, steps)
            )
        return self._decode_fits[key]

    def _mixed_fit(self, mode: GraphMode, bound: int | None, loras: int) -> list[Entry]:
        """Return the cheapest entry for any batch by tokens, among those for ``bound`` requests."""
        key = (mode, bound, loras)
        if key not in self._mixed_fits:
            self._mixed_fits[key] = _next_fit(
                (entry.num_tokens, entry)
                for entry in self._role.entries
                if entry.mode is mode
                and entry.query_len is None
                and entry.active_loras >= loras
                and (_binding_reqs(entry) is None or (bound is not None and (entry.num_reqs or 0) >= bound))
            )
        return self._mixed_fits[key]


def _binding_reqs(entry: Entry) -> int | None:
    """Return an entry's bound on requests where its tokens do not imply it (a request has a token)."""
    if entry.num_reqs is None or entry.num_reqs >= entry.num_tokens:
        return None
    return entry.num_reqs


def _next_fit(sized: Iterable[tuple[int, Entry]]) -> list[Entry]:
    """Return a list that has, at each count, the cheapest entry whose size holds that count."""
    descending = sorted(sized, key=lambda pair: (-pair[0], pair[1].cost))
    steps: list[tuple[int, Entry]] = []
    for size, entry in descending:
        if not steps or entry.cost < steps[-1][1].cost:
            steps.append((size, entry))
    fit: list[Entry] = []
    for size, entry in reversed(steps):
        fit += [entry] * (size + 1 - len(fit))
    return fit


def _at(fit: Sequence[Entry], count: int) -> Entry | None:
    return fit[count] if count < len(fit) else None
