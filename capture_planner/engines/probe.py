"""Ask an engine's own dispatcher what it answers, and compress the answers to ranges.

This is what makes an observation the truth for any release: nothing is assumed about how the engine finds a graph.
Asked are, for every number of active adapters at which answers can change:

- batches in which every request has as many tokens as a decode or a graph may have, for each number of requests,
  past their prompts and not;
- batches whose requests differ, past their prompts and not, for each number of tokens up to the largest graph, and
  for each number of requests at which answers can change.

Between two numbers of requests, or of adapters, with the same answers, the answers are taken to be the same too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs

from capture_planner.modes import Reason, Role
from capture_planner.records._base import grouped
from capture_planner.records.batch import Batch
from capture_planner.records.batch_space import DecodeFamily, Deployment, decode_families, most_loras, split_at
from capture_planner.records.observation import DispatchRun, ObservedGraph

Answer = tuple[int | None, Reason | None]
"""The index of a graph, or None and the reason."""

Asked = Callable[[Batch], Answer]
T = TypeVar("T")

MAX_WIDTH = 16
"""Up to this longest decode, uniform batches of every length are asked about; above it, of those that graphs have."""


def answers(
    role: Role,
    deployment: Deployment,
    graphs: Sequence[ObservedGraph],
    dispatch: Asked,
    *,
    families: Iterable[DecodeFamily] | None = None,
    request_counts: Collection[int] = (),
    token_counts: Collection[int] = (),
    lora_counts: Collection[int] = (),
) -> tuple[DispatchRun, ...]:
    """Return what a dispatcher answers, compressed.

    :param graphs: the graphs of the role, which answers name by index.
    :param dispatch: asks the engine's own dispatcher; an engine that gives no reason needs one that was worked out.
    :param families: the role's decodes; None: ``decode_families``.
    :param request_counts: after which answers to mixed batches may change, besides the graphs' ``num_reqs``.
    :param token_counts: the same for tokens above the largest graph, where otherwise both ends alone are asked about.
    :param lora_counts: the same for active adapters, besides those of the graphs.
    """
    decodes = tuple(decode_families(role, deployment) if families is None else families)
    probe = _DispatcherProbe(role, deployment, graphs, dispatch, decodes, request_counts, token_counts, lora_counts)
    return tuple(probe.all())


_Range = tuple[int, int, Answer]
"""First and last count, and their answer."""


def _merged(pieces: Iterable[_Range]) -> tuple[_Range, ...]:
    ranges: list[_Range] = []
    for first, last, answer in pieces:
        # Only neighbours: a gap has no answer.
        if ranges and ranges[-1][2] == answer and ranges[-1][1] + 1 == first:
            ranges[-1] = (ranges[-1][0], last, answer)
        else:
            ranges.append((first, last, answer))
    return tuple(ranges)


def _runs(ranges: Iterable[_Range], **shape: Any) -> Iterator[DispatchRun]:
    """Yield the ranges as answers to batches of one shape."""
    for first, last, (graph, reason) in ranges:
        yield DispatchRun(first=first, last=last, graph=graph, reason=reason, **shape)


def _from(ranges: Iterable[_Range], least: int) -> tuple[_Range, ...]:
    return tuple((max(first, least), last, answer) for first, last, answer in ranges if last >= least)


def _bands(
    points: Sequence[int], table: Callable[[int], T], from_count: Callable[[T, int], T]
) -> Iterator[tuple[int, int, T]]:
    """Yield ``(first, last, table)`` of each band of counts whose tables are alike, as far as ``points`` tell.

    :param from_count: what of a table is about batches of so many; only that is compared.
    """
    start = previous = points[0]
    current = table(start)
    for point in points[1:]:
        while table(point) != from_count(current, point):
            low, high = previous, point  # The tables change between: that of low is alike, and that of high is not.
            while low + 1 < high:
                middle = (low + high) // 2
                low, high = (middle, high) if table(middle) == from_count(current, middle) else (low, middle)
            yield start, low, current
            start = previous = high
            current = table(start)
        previous = point
    yield start, points[-1], current


@attrs.frozen
class _DispatcherProbe:
    role: Role
    deployment: Deployment
    graphs: Sequence[ObservedGraph]
    dispatch: Asked
    families: tuple[DecodeFamily, ...]
    request_counts: Collection[int]
    token_counts: Collection[int]
    lora_counts: Collection[int]

    def all(self) -> Iterator[DispatchRun]:
        """Yield the answers, with the numbers of adapters that are answered alike together."""
        for first, last, runs in _bands(self._lora_points(), self._with_loras, _with_at_least):
            yield from (attrs.evolve(run, min_loras=first, max_loras=last) for run in self._needed(runs, first))

    def _needed(self, runs: Sequence[DispatchRun], loras: int) -> Sequence[DispatchRun]:
        """Leave out forms of batches that are answered as ``Answers`` answers without them."""
        for form in sorted({form_of(run) for run in runs}, key=lambda form: form[0] or 0):
            own = [run for run in runs if form_of(run) == form]
            rest = [run for run in runs if form_of(run) != form]
            # Past their prompts or not makes no difference to many engines; then one table says both.
            if form == (None, True):
                past = (attrs.evolve(run, past_prompt=False) for run in own)
                repeats = list(past) == [run for run in rest if form_of(run) == (None, False)]
            else:
                others = Answers(attrs.evolve(run, max_loras=loras) for run in rest)
                repeats = form != (None, False) and all(
                    (answer := others.find(self._batch(count, count * (run.query_len or 1), *form, loras))) is not None
                    and (answer.graph, answer.reason) == (run.graph, run.reason)
                    for run in own
                    for count in range(run.first, run.last + 1)
                )
            # Draft decodes have one form, which is all there is to answer by.
            if repeats and self.role is not Role.DRAFT_DECODE:
                runs = rest
        return runs

    def _lora_points(self) -> list[int]:
        limits = self.deployment.limits
        most = min(most_loras(self.role, self.deployment), limits.max_num_reqs, limits.max_num_tokens)
        stops = {*(graph.entry.active_loras for graph in self.graphs), *self.lora_counts}
        # Graphs for so many adapters end there, so the next number is asked about too.
        cases = {stop + more for stop in stops for more in (0, 1)}
        return sorted({0, min(1, most), most} | {case for case in cases if 0 <= case <= most})

    def _with_loras(self, loras: int) -> tuple[DispatchRun, ...]:
        """Return the answers to batches with so many adapters, in a fixed order."""
        runs: list[DispatchRun] = []
        for past_prompt in (True, False):
            if self.role is Role.DRAFT_DECODE and not past_prompt:
                continue  # Draft decodes are always past the prompt, and uniform.
            for query_len in self._widths():
                replies = (
                    (count, count, self.dispatch(self._batch(count, count * query_len, query_len, past_prompt, loras)))
                    for count in self._request_counts(query_len)
                    if count >= loras
                )
                runs += _runs(_merged(replies), query_len=query_len, past_prompt=past_prompt)
            if self.role is not Role.DRAFT_DECODE:
                runs += self._mixed(past_prompt, loras)
        return tuple(runs)

    def _widths(self) -> list[int]:
        widths = {family.query_len for family in self.families}
        if self.role is not Role.DRAFT_DECODE:
            widths |= {width for g in self.graphs if (width := g.entry.query_len or g.max_query_len)}
            widths |= set(range(1, max(widths, default=1) + 1)) if max(widths, default=1) <= MAX_WIDTH else {1}
        return sorted(widths)

    def _request_counts(self, query_len: int) -> Iterable[int]:
        limits = self.deployment.limits
        if self.role is not Role.DRAFT_DECODE:
            return range(1, min(limits.max_num_reqs, limits.max_num_tokens // query_len) + 1)
        domains = [family.requests for family in self.families if family.query_len == query_len]
        return sorted({count for domain in domains for count, _ in domain.counts()})

    def _mixed(self, past_prompt: bool, loras: int) -> Iterator[DispatchRun]:
        """Yield the answers to batches whose requests differ, in bands of requests that are answered alike."""
        by_tokens = partial(self._by_tokens, past_prompt=past_prompt, loras=loras)
        for min_reqs, max_reqs, ranges in _bands(self._mixed_points(max(loras, 1)), by_tokens, _from):
            yield from _runs(ranges, past_prompt=past_prompt, min_reqs=min_reqs, max_reqs=max_reqs)

    def _mixed_points(self, least: int) -> list[int]:
        limits = self.deployment.limits
        most = min(limits.max_num_reqs, limits.max_num_tokens)
        rooms = {graph.entry.num_reqs or 0 for graph in self.graphs if graph.entry.query_len is None}
        rooms |= set(self.request_counts)
        # Graphs for so many requests end there, so the next number is asked about too.
        rooms |= {room + 1 for room in rooms}
        # An engine may have rules of its own, which no graph shows; few counts find them.
        powers = {1 << bit for bit in range(most.bit_length())}
        return sorted({least, most} | {n for n in rooms | powers if least <= n <= most})

    def _by_tokens(self, num_reqs: int, past_prompt: bool, loras: int) -> tuple[_Range, ...]:
        """Return the answers to batches of so many requests, by tokens."""
        most = self.deployment.limits.max_num_tokens
        largest = min(most, max((graph.entry.num_tokens for graph in self.graphs), default=0))

        def at(tokens: int) -> Answer:
            return self.dispatch(self._batch(num_reqs, tokens, None, past_prompt, loras))

        pieces = [(tokens, tokens, at(tokens)) for tokens in range(num_reqs, largest + 1)]
        above = max(largest + 1, num_reqs)
        for first, last in split_at(above, most, self.token_counts) if above <= most else ():
            # Both ends alike stand for what is between; if not, each number is asked about.
            if at(first) == at(last):
                pieces.append((first, last, at(first)))
            else:
                pieces += [(tokens, tokens, at(tokens)) for tokens in range(first, last + 1)]
        return _merged(pieces)

    def _batch(self, num_reqs: int, num_tokens: int, query_len: int | None, past_prompt: bool, loras: int) -> Batch:
        return Batch(
            role=self.role,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            query_len=query_len,
            past_prompt=past_prompt,
            active_loras=loras,
        )


def _with_at_least(runs: Iterable[DispatchRun], loras: int) -> tuple[DispatchRun, ...]:
    """Return the answers to batches that can have so many adapters: none has more of them than requests."""
    return tuple(
        attrs.evolve(
            run, first=max(run.first, loras), min_reqs=max(run.min_reqs, loras if run.query_len is None else 1)
        )
        for run in runs
        if run.last >= loras and (run.max_reqs is None or run.max_reqs >= loras)
    )


BatchForm = tuple[int | None, bool]
"""Query length, None where requests differ, and whether every request is past its prompt."""


def form_of(run: DispatchRun) -> BatchForm:
    """Return the form of the batches that an answer is about."""
    return run.query_len, run.past_prompt


@attrs.frozen
class _Table:
    """The answers to batches of one form, of some numbers of requests and adapters: ascending ranges."""

    requests: range
    loras: range
    firsts: list[int]
    runs: list[DispatchRun]


class Answers:
    """Finds the answer that is about a batch.

    Batches of a form without answers are answered as those whose requests differ, past their prompts or else not:
    a probe leaves out what would be the same.
    """

    def __init__(self, runs: Iterable[DispatchRun]) -> None:
        alike = grouped(runs, lambda run: (form_of(run), run.min_reqs, run.max_reqs, run.min_loras, run.max_loras))
        self._tables: dict[BatchForm, list[_Table]] = {}
        for ranges in alike.values():
            ranges.sort(key=lambda run: run.first)
            one = ranges[0]
            table = _Table(
                # No upper end: larger than any number of requests.
                requests=range(one.min_reqs, (one.max_reqs or 1 << 62) + 1),
                loras=range(one.min_loras, one.max_loras + 1),
                firsts=[run.first for run in ranges],
                runs=ranges,
            )
            self._tables.setdefault(form_of(one), []).append(table)

    def find(self, batch: Batch) -> DispatchRun | None:
        """Return the answer that is about a batch; None where the dispatcher was not asked."""
        width = batch.query_len if batch.num_reqs * (batch.query_len or 0) == batch.num_tokens else None
        for form in dict.fromkeys(((width, batch.past_prompt), (None, batch.past_prompt), (None, False))):
            for table in self._tables.get(form, ()):
                run = _found(table, batch, form)
                if run is not None:
                    return run
        return None


def _found(table: _Table, batch: Batch, form: BatchForm) -> DispatchRun | None:
    if batch.active_loras not in table.loras or (form[0] is None and batch.num_reqs not in table.requests):
        return None
    count = batch.num_tokens if form[0] is None else batch.num_reqs
    index = bisect_right(table.firsts, count) - 1
    return table.runs[index] if index >= 0 and count <= table.runs[index].last else None
