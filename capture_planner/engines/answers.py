"""Answers of a dispatcher, found by batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import attrs

from capture_planner.records.batch import Batch
from capture_planner.records.observation import DispatchRun

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
        alike: dict[tuple[object, ...], list[DispatchRun]] = {}
        for run in runs:
            bounds = (run.min_reqs, run.max_reqs, run.min_loras, run.max_loras)
            alike.setdefault((*form_of(run), *bounds), []).append(run)
        self._tables: dict[BatchForm, list[_Table]] = {}
        for ranges in alike.values():
            ranges.sort(key=lambda run: run.first)
            one = ranges[0]
            table = _Table(
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
