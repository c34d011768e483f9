"""Every batch that an engine's limits admit, with the engine's answer and the best graph it has.

The whole space is dispatched, batch by batch, through the engine's own rule: nothing is assumed about how
it finds a graph, so that a hole between two sizes is seen wherever it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import attrs

from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.emulation import CapturedGraph, Emulation, draft_steps_of
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry, Kind, Rejection
from capture_planner.records.batch_space import batches, most_loras, split_when
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class BatchAnswer:
    """One batch, the engine's answer, and the captured graph that would serve it best."""

    batch: Batch
    answer: Dispatch
    best: Entry | None
    """The cheapest compatible graph that is captured; None where no graph is compatible."""
    last: int
    """The extent up to which larger batches get the same answer; its own up to the largest graph."""

    @property
    def extent(self) -> int:
        """Requests of a decode, tokens of a mixed batch."""
        return self.batch.extent(self.batch.kind)

    @property
    def misses_graph(self) -> bool:
        """Whether a compatible graph is captured, and the batch runs eager, or PIECEWISE for a FULL one."""
        best, mode = self.best, self.answer.mode
        # Without a compatible graph eager is right.
        if best is None:
            return False
        return mode is GraphMode.NONE or (best.mode is GraphMode.FULL and mode is not GraphMode.FULL)


@attrs.frozen(kw_only=True)
class Run:
    """Consecutive batches of one role, kind, query length and adapter count."""

    batch: Batch
    """The first of them."""
    first: int
    last: int
    answers: tuple[BatchAnswer, ...]

    def sizes_between(self, unit: int) -> list[int]:
        """Return sizes that double up to the largest graph; ``unit``: the query length for sizes in tokens, else 1."""
        width = self.batch.query_len or 1
        padded = max(answer.batch.num_tokens + answer.answer.padded_tokens for answer in self.answers)
        sizes = [self.first * unit]
        while sizes[-1] * 2 * width < padded * unit:
            sizes.append(sizes[-1] * 2)
        return sizes

    def __str__(self) -> str:
        span = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        plural = "" if self.last == 1 else "s"
        if self.batch.kind is Kind.MIXED:
            text = f"mixed batches of {span} token{plural}"
        else:
            text = f"decodes of {span} request{plural}, query length {self.batch.query_len}"
        return text + (f", {self.batch.active_loras} active LoRA" if self.batch.active_loras else "")


def walk(emulation: Emulation) -> tuple[BatchAnswer, ...]:
    """Dispatch every admissible batch of every role; beyond the largest graph, one batch represents all larger ones."""
    answers = []
    for manager in emulation.managers:
        graphs, families = GraphRows(manager.graphs), emulation.families(manager.role)
        largest = max((graph.entry.num_tokens for graph in manager.graphs), default=0)
        # Beyond the largest graph nothing is captured, so all answers there are the same.
        for batch, last in batches(manager.role, emulation, families=families, upto=largest):
            best = graphs.best(batch, draft_steps_of(batch, families))
            answers.append(BatchAnswer(batch=batch, answer=manager.dispatch(batch), best=best, last=last))
    return tuple(answers)


class GraphRows:
    """Captured graphs in rows that differ in size only, so that few are compared with a batch."""

    def __init__(self, graphs: Iterable[CapturedGraph]) -> None:
        rows: dict[tuple[object, ...], list[CapturedGraph]] = {}
        for graph in graphs:
            entry = graph.entry
            kind = (entry.mode, entry.query_len, entry.active_loras, entry.draft_steps, graph.max_query_len)
            rows.setdefault(kind, []).append(graph)
        by_cost = (sorted(row, key=lambda graph: graph.entry.cost) for row in rows.values())
        self._rows = [([graph.entry.num_tokens for graph in row], row) for row in by_cost]

    def best(self, batch: Batch, steps: int | None) -> Entry | None:
        """Return the cheapest graph that serves the batch."""
        first = []
        for tokens, row in self._rows:
            for graph in row[bisect_left(tokens, batch.num_tokens) :]:
                rejection = graph.rejection(batch, steps)
                if rejection is None:
                    first.append(graph.entry)
                if rejection is not Rejection.REQUESTS:
                    break  # Larger graphs of a row are rejected for the same reason.
        return min(first, key=lambda entry: entry.cost, default=None)


def runs(answers: Iterable[BatchAnswer]) -> Iterator[Run]:
    """Group consecutive batches of one role, kind, query length and adapter count."""

    def place(answer: BatchAnswer) -> tuple[str, str, int, int, int]:
        batch = answer.batch
        return (batch.role, batch.kind.value, batch.query_len or 0, batch.active_loras, answer.extent)

    def apart(before: BatchAnswer, after: BatchAnswer) -> bool:
        return place(before)[:-1] != place(after)[:-1] or after.extent > before.last + 1

    for run in split_when(apart, sorted(answers, key=place)):
        yield Run(batch=run[0].batch, first=run[0].extent, last=run[-1].last, answers=tuple(run))


def why_inadmissible(batch: Batch, emulation: Emulation) -> str | None:
    """Return why the engine can never run a batch, or None; one reason: its tokens contradict its ``query_len``."""
    limits, reqs, tokens = emulation.limits, batch.num_reqs, batch.num_tokens
    loras, width = min(most_loras(batch.role, emulation), reqs), batch.query_len
    # In the order in which a person would check: the first broken rule is the most telling.
    if reqs < 1:
        return "a batch has at least one request"
    if reqs > limits.max_num_reqs:
        return f"{counted(reqs, 'request')}, and at most {limits.max_num_reqs} run together"
    if tokens < reqs:
        return f"{counted(reqs, 'request')} have at least {counted(reqs, 'token')}, not {tokens}"
    if tokens > limits.max_num_tokens and not (reqs == 1 and emulation.whole_prompts):
        return f"{counted(tokens, 'token')}, and a batch has at most {limits.max_num_tokens}"
    if width is not None and reqs * width != tokens:
        return f"{counted(reqs, 'request')} of {counted(width, 'token')} have {reqs * width}, not {tokens}"
    if batch.active_loras > loras:
        return f"{counted(batch.active_loras, 'active adapter')}, and such a batch has at most {loras}"
    if batch.role is not Role.DRAFT_DECODE:
        return None
    if batch.uniform_query_len is None:
        return "in a draft decode all requests have the same number of tokens and are past their prompt"
    if all(reqs not in family.requests for family in emulation.families(batch.role)):
        return f"no draft decode follows a batch of {counted(reqs, 'request')}"
    return None
