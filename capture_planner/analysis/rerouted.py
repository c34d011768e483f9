"""Which batches run otherwise under another plan: in another mode, with other padding, or not at all.

Both plans are walked in cells of batches with one answer (``coverage``). Where two cells overlap, all batches of the
overlap have one answer before and one after.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter

import attrs

from capture_planner.analysis.coverage import Cell, coverage
from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import grouped
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import query_len_of, union
from capture_planner.records.plan import Plan
from capture_planner.records.text import query_len_text, spans

Span = tuple[int, int]


@attrs.frozen(kw_only=True)
class _Overlap:
    """Batches of one kind with one answer before and one after; None: not admitted."""

    span: Span
    """Requests of decodes, tokens of mixed batches."""
    loras: Span
    before: Dispatch | None
    after: Dispatch | None
    width: int
    by_loras: bool = False
    """True where one plan admits them for its number of adapters alone."""

    @property
    def change(self) -> tuple[object, ...] | None:
        """What the message of a change has in common for all its batches; None where nothing changes."""
        old, new = (None if each is None else (each.mode, each.reason) for each in (self.before, self.after))
        if old != new:
            return old, new, self.by_loras
        before, after = _tokens(self.before), _tokens(self.after)
        return None if before == after else (old, new, after > before)

    def worst(self, answer: Dispatch | None) -> float:
        """Return the most padding of a batch, as a share of its own tokens; -1 without a graph."""
        return _tokens(answer) / (self.span[0] * self.width) - 1


def _tokens(answer: Dispatch | None) -> int:
    return 0 if answer is None or answer.entry is None else answer.entry.num_tokens


@attrs.frozen(kw_only=True)
class BatchChange:
    """Batches of one role that all run otherwise in one way, in words."""

    role: Role
    kind: Kind
    query_len: int | None
    ranges: tuple[Span, ...]
    """Requests of decodes, tokens of mixed batches: ascending."""
    message: str


def rerouted(old: Plan, new: Plan) -> Iterator[BatchChange]:
    """Yield the batches that run otherwise under ``new``, of the roles that both plans have.

    Mixed batches are told apart by their tokens: those that only have more requests than before are not new.
    """
    vary = frozenset(_varying(old)) & frozenset(_varying(new))
    before, after = (grouped(_compared(plan, vary), lambda cell: _key(cell, vary)) for plan in (old, new))
    keys = {**before, **after}
    for key in sorted(keys, key=lambda each: (list(Role).index(each[0]), each[1].value, each[2] or 0, each[3])):
        role, kind, query_len, varies = key
        if role in old.planned and role in new.planned:
            length = query_len_text(query_len, varies=varies)
            overlaps = _overlaps(before.get(key, []), after.get(key, []), query_len or 1)
            changes = grouped((each for each in overlaps if each.change is not None), lambda each: each.change)
            for alike in changes.values():
                ranges = union(each.span for each in alike)
                message = f"{role}: {_batches(alike, kind, length, ranges)}: {_change(alike, before.get(key, []))}"
                yield BatchChange(role=role, kind=kind, query_len=query_len, ranges=tuple(ranges), message=message)


def _varying(plan: Plan) -> tuple[Role, ...]:
    return () if plan.speculative is None else plan.speculative.varying_decodes


def _compared(plan: Plan, vary: Collection[Role]) -> Iterator[Cell]:
    """Yield the cells of a plan; for decodes that vary in this plan alone, only those with the most tokens."""
    alone = frozenset(_varying(plan)) - frozenset(vary)
    for cell in coverage(plan).cells:
        of_all = cell.role not in alone or cell.kind is Kind.MIXED
        if of_all or cell.query_len == query_len_of(cell.role, plan, cell.first):
            yield cell


def _key(cell: Cell, vary: Collection[Role]) -> tuple[Role, Kind, int | None, bool]:
    """Return what cells that are compared have in common; ``vary``: roles whose decodes vary in both plans."""
    return cell.role, cell.kind, cell.query_len, cell.varies and cell.role in vary


def _overlaps(old: Sequence[Cell], new: Sequence[Cell], width: int) -> Iterator[_Overlap]:
    """Yield the overlaps of cells, and what only one of the plans admits."""
    ordered = sorted(new, key=lambda cell: (cell.first, cell.last))
    lasts = [cell.last for cell in ordered]
    for mine in old:
        for theirs in ordered[bisect_left(lasts, mine.first) :]:
            if theirs.first > mine.last:
                break
            loras = max(mine.min_loras, theirs.min_loras), min(mine.max_loras, theirs.max_loras)
            # A batch has as many tokens as requests, at least, and as many requests as adapters.
            least = max(mine.first, theirs.first, mine.min_reqs, theirs.min_reqs, loras[0])
            span = least, min(mine.last, theirs.last)
            by_requests = mine.min_reqs <= theirs.max_reqs and theirs.min_reqs <= mine.max_reqs
            if span[0] <= span[1] and loras[0] <= loras[1] and by_requests:
                yield _Overlap(span=span, loras=loras, before=mine.answer, after=theirs.answer, width=width)
    for cells, others, is_new in ((old, new, False), (new, old, True)):
        admitted = union((cell.first, cell.last) for cell in others)
        most = max(map(_most_loras, others), default=0)
        for cell in cells:
            before, after = (None, cell.answer) if is_new else (cell.answer, None)
            pieces = _outside((cell.first, cell.last), admitted)
            for span in pieces:
                loras = cell.min_loras, cell.max_loras
                yield _Overlap(span=span, loras=loras, before=before, after=after, width=width)
            for first, last in _outside((cell.first, cell.last), pieces) if _most_loras(cell) > most else ():
                loras = max(cell.min_loras, most + 1), _most_loras(cell)
                span = max(first, loras[0]), last
                if span[0] <= last:
                    yield _Overlap(span=span, loras=loras, before=before, after=after, width=width, by_loras=True)


def _most_loras(cell: Cell) -> int:
    """Return the most adapters of a batch, which has as many requests at least."""
    return min(cell.max_loras, cell.max_reqs)


def _outside(span: Span, admitted: Sequence[Span]) -> list[Span]:
    """Return the parts of a range that no admitted range has."""
    parts, (first, last) = [], span
    for low, high in admitted:
        if high >= first and low <= last:
            parts.append((first, low - 1))
            first = high + 1
    return [(low, high) for low, high in (*parts, (first, last)) if low <= high]


def _batches(alike: Sequence[_Overlap], kind: Kind, length: str, ranges: Sequence[Span]) -> str:
    least, most = min(each.loras[0] for each in alike), max(each.loras[1] for each in alike)
    if kind is Kind.MIXED:
        text = f"mixed batches of {spans(ranges, 'token')}"
    else:
        text = f"decodes of {spans(ranges, 'request')}" + (f", query length {length}" if length != "1" else "")
    return text + (f", {spans([(least, most)], 'active adapter')}" if least else "")


def _change(alike: Sequence[_Overlap], before: Sequence[Cell]) -> str:
    """Say what changes for batches that all change in one way; ``before``: the cells of their kind until now."""
    one, start = alike[0], min(each.span[0] for each in alike)
    old, new = (_mode(each) for each in (one.before, one.after))
    was, now = (_padding(each.worst(side(each)) for each in alike) for side in (_BEFORE, _AFTER))
    if one.after is None:
        return f"no longer admitted; they ran {old} {was}".rstrip()
    if one.before is None:
        smaller = [cell for cell in before if cell.last < start and cell.min_loras <= one.loras[0]]
        largest = max(smaller, key=lambda cell: cell.last, default=None)
        other = largest is not None and not one.by_loras and _mode(largest.answer) != new
        ran = f"; {largest.last}, the most until now, run {_mode(largest.answer)}" if largest and other else ""
        return f"new, run {new} {now}".rstrip() + ran
    if old == new:
        return f"still {new}, {now} instead of {was.removeprefix('padded by up to ') if 'up' in now else was}"
    return f"{old} {was}".rstrip() + f" became {new} {now}".rstrip()


_BEFORE, _AFTER = attrgetter("before"), attrgetter("after")


def _mode(answer: Dispatch | None) -> str:
    if answer is None:
        return ""
    return f"eager ({answer.reason})" if answer.mode is GraphMode.NONE else answer.mode.value


def _padding(worst: Iterable[float]) -> str:
    """Write the most padding, as a share of the batch's own tokens; nothing where no graph pads."""
    most = max(worst)
    return "" if most < 0 else f"padded by up to {most:.0%}" if most else "unpadded"
