"""Rows: the tables of an observation as its file has them, columns of what differs from one line to the next.

A file has at most 16,000 values. Each row states once what its lines share; a column that would have the same
default for every line is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.codec.columns import cells_of, column_of, query_len_columns, refuse_uneven
from capture_planner.errors import Problem
from capture_planner.modes import GraphMode, Reason
from capture_planner.records._base import Count, NonNegative, field, raise_any, record
from capture_planner.records.batch import Entry
from capture_planner.records.batch_space import split_when
from capture_planner.records.observation import Amount, BatchCount, DispatchRun, ObservedGraph, Tally

Times = tuple[Amount | None, ...]


@record
class GraphRow:
    """Graphs of one kind that were captured one after the other."""

    mode: GraphMode = field("PIECEWISE or FULL")
    query_len: NonNegative | None = field("tokens of each request in a uniform decode", default=None)
    query_lens: tuple[NonNegative, ...] | None = field("query_len of each graph, where they differ", default=None)
    draft_steps: NonNegative | None = field("length of a fused draft chain", default=None)
    max_query_len: NonNegative | None = field("serves any mix of decodes up to so many tokens each", default=None)
    prompts_only: bool = field("whether decodes never run on them", default=False)
    num_tokens: tuple[Count, ...] = field("padded tokens of each graph, in capture order")
    num_reqs: tuple[Count, ...] | None = field("padded requests of each graph; left out where PIECEWISE", default=None)
    active_loras: tuple[NonNegative, ...] | None = field("most adapters of each graph; 0 where omitted", default=None)
    seconds: Times | None = field("time of each capture", default=None)
    mib: Times | None = field("memory of each capture, in MiB", default=None)
    milliseconds: Times | None = field("median time of a replay", default=None)
    replays: tuple[Tally, ...] | None = field("steps that ran on each; 0 where omitted", default=None)

    def __attrs_post_init__(self) -> None:
        message = f"a graph is PIECEWISE or FULL, not {self.mode.value}"
        if self.mode not in (GraphMode.PIECEWISE, GraphMode.FULL):
            raise_any([Problem(path=("mode",), message=message)])
        refuse_uneven(
            self, "num_tokens", "query_lens", "num_reqs", "active_loras", "seconds", "mib", "milliseconds", "replays"
        )

    def lines(self) -> Iterator[ObservedGraph]:
        """Yield the graphs of this row."""
        length = len(self.num_tokens)
        loras, replays = cells_of(self.active_loras, length, 0), cells_of(self.replays, length, 0)
        query_lens = cells_of(self.query_lens, length, self.query_len)
        columns = (cells_of(each, length) for each in (self.num_reqs, self.seconds, self.mib, self.milliseconds))
        for tokens, query_len, active, replayed, reqs, seconds, mib, milliseconds in zip(
            self.num_tokens, query_lens, loras, replays, *columns, strict=True
        ):
            entry = Entry(
                mode=self.mode,
                num_tokens=tokens,
                num_reqs=reqs,
                query_len=query_len,
                active_loras=active,
                draft_steps=self.draft_steps,
            )
            yield ObservedGraph(
                entry=entry,
                max_query_len=self.max_query_len,
                prompts_only=self.prompts_only,
                seconds=seconds,
                mib=mib,
                milliseconds=milliseconds,
                replays=replayed,
            )

    @classmethod
    def pack(cls, graphs: tuple[ObservedGraph, ...]) -> tuple[GraphRow, ...]:
        """Return the rows of a role's graphs."""

        def shared(graph: ObservedGraph) -> tuple[object, ...]:
            entry = graph.entry
            kind = (entry.mode, entry.query_len is None, entry.draft_steps, entry.num_reqs is None)
            return (*kind, graph.max_query_len, graph.prompts_only)

        def row(run: list[ObservedGraph]) -> GraphRow:
            first = run[0]
            return cls(
                mode=first.entry.mode,
                **query_len_columns([graph.entry.query_len for graph in run]),
                draft_steps=first.entry.draft_steps,
                max_query_len=first.max_query_len,
                prompts_only=first.prompts_only,
                num_tokens=tuple(graph.entry.num_tokens for graph in run),
                num_reqs=column_of(graph.entry.num_reqs for graph in run),
                active_loras=column_of((graph.entry.active_loras for graph in run), 0),
                seconds=column_of(graph.seconds for graph in run),
                mib=column_of(graph.mib for graph in run),
                milliseconds=column_of(graph.milliseconds for graph in run),
                replays=column_of((graph.replays for graph in run), 0),
            )

        return tuple(map(row, split_when(lambda a, b: shared(a) != shared(b), graphs)))


@record
class AnswerRow:
    """Answers to ranges of batches that follow each other: requests where they have a query length, else tokens."""

    query_len: NonNegative | None = field("tokens of each request; left out where requests differ", default=None)
    past_prompt: bool = field("whether every request is past its prompt", default=True)
    min_reqs: NonNegative = field("fewest requests, where requests differ", default=1)
    max_reqs: NonNegative | None = field("most requests, where requests differ; None: any number", default=None)
    min_loras: NonNegative = field("fewest active adapters", default=0)
    max_loras: NonNegative = field("most active adapters", default=0)
    first: NonNegative = field("where the first range begins")
    last: tuple[NonNegative, ...] = field("where each range ends; the next begins after it")
    graph: tuple[NonNegative, ...] | None = field("index of the graph of each range; omitted where eager", default=None)
    reason: Reason | None = field("why these batches have no graph", default=None)

    def __attrs_post_init__(self) -> None:
        refuse_uneven(self, "last", "graph")

    def lines(self) -> Iterator[DispatchRun]:
        """Yield the ranges of this row."""
        first = self.first
        for last, graph in zip(self.last, cells_of(self.graph, len(self.last)), strict=True):
            yield DispatchRun(
                query_len=self.query_len,
                past_prompt=self.past_prompt,
                min_reqs=self.min_reqs,
                max_reqs=self.max_reqs,
                min_loras=self.min_loras,
                max_loras=self.max_loras,
                first=first,
                last=last,
                graph=graph,
                reason=self.reason,
            )
            first = last + 1

    @classmethod
    def pack(cls, runs: tuple[DispatchRun, ...]) -> tuple[AnswerRow, ...]:
        """Return the rows of a role's answers."""

        def shared(run: DispatchRun) -> tuple[object, ...]:
            batch = (run.query_len, run.past_prompt, run.min_reqs, run.max_reqs, run.min_loras, run.max_loras)
            return (*batch, run.graph is None, run.reason)

        def apart(a: DispatchRun, b: DispatchRun) -> bool:
            return shared(a) != shared(b) or a.last + 1 != b.first

        def row(run: list[DispatchRun]) -> AnswerRow:
            first = run[0]
            return cls(
                query_len=first.query_len,
                past_prompt=first.past_prompt,
                min_reqs=first.min_reqs,
                max_reqs=first.max_reqs,
                min_loras=first.min_loras,
                max_loras=first.max_loras,
                first=first.first,
                last=tuple(each.last for each in run),
                graph=column_of(each.graph for each in run),
                reason=first.reason,
            )

        return tuple(map(row, split_when(apart, runs)))


@record
class BatchRow:
    """Batch shapes of one kind, each with how often it ran: the most frequent first."""

    query_len: NonNegative | None = field("tokens of each request; left out where requests differ", default=None)
    query_lens: tuple[NonNegative, ...] | None = field("query_len of each shape, where they differ", default=None)
    past_prompt: bool = field("whether every request is past its prompt", default=True)
    active_loras: NonNegative = field("distinct adapters", default=0)
    reason: Reason | None = field("why these batches had no graph", default=None)
    num_reqs: tuple[NonNegative, ...] = field("requests of each shape")
    num_tokens: tuple[NonNegative, ...] | None = field(
        "tokens of each shape; left out where they are num_reqs times query_len", default=None
    )
    steps: tuple[Tally, ...] = field("how often each ran")
    graph: tuple[NonNegative, ...] | None = field("index of the graph of each; omitted where eager", default=None)
    milliseconds: Times | None = field("median time of the steps that were timed", default=None)
    samples: tuple[Tally, ...] | None = field("how many steps were timed; 0 where omitted", default=None)
    interval: Times | None = field("median time from the start of such a step to the start of the next", default=None)

    def __attrs_post_init__(self) -> None:
        if self.num_tokens is None and self.query_len is None and self.query_lens is None:
            raise_any([Problem(path=("num_tokens",), message="needed unless query_len is given")])
        figures = ("milliseconds", "samples", "interval")
        refuse_uneven(self, "num_reqs", "query_lens", "num_tokens", "steps", "graph", *figures)

    def lines(self) -> Iterator[BatchCount]:
        """Yield the shapes of this row."""
        length = len(self.num_reqs)
        query_lens, samples = cells_of(self.query_lens, length, self.query_len), cells_of(self.samples, length, 0)
        tokens = self.num_tokens or [reqs * each for reqs, each in zip(self.num_reqs, query_lens, strict=True)]
        columns = (cells_of(each, length) for each in (self.graph, self.milliseconds, self.interval))
        for reqs, count, query_len, steps, timed, graph, milliseconds, interval in zip(
            self.num_reqs, tokens, query_lens, self.steps, samples, *columns, strict=True
        ):
            yield BatchCount(
                num_reqs=reqs,
                num_tokens=count,
                query_len=query_len,
                past_prompt=self.past_prompt,
                active_loras=self.active_loras,
                steps=steps,
                graph=graph,
                reason=self.reason,
                milliseconds=milliseconds,
                samples=timed,
                interval=interval,
            )

    @classmethod
    def pack(cls, counts: tuple[BatchCount, ...]) -> tuple[BatchRow, ...]:
        """Return the rows of a role's batches."""
        alike: dict[tuple[object, ...], list[BatchCount]] = {}
        for count in counts:
            # Decodes have few query lengths, and single prompts as many as there are lengths of prompts.
            query_len = count.query_len if count.past_prompt else count.query_len is None
            kind = (query_len, count.past_prompt, count.active_loras, count.graph is None, count.reason)
            alike.setdefault(kind, []).append(count)
        return tuple(map(cls._row, alike.values()))

    @classmethod
    def _row(cls, run: list[BatchCount]) -> BatchRow:
        first = run[0]
        follows = all(each.num_tokens == each.num_reqs * (each.query_len or 0) for each in run)
        return cls(
            **query_len_columns([each.query_len for each in run]),
            past_prompt=first.past_prompt,
            active_loras=first.active_loras,
            reason=first.reason,
            num_reqs=tuple(each.num_reqs for each in run),
            num_tokens=None if follows else tuple(each.num_tokens for each in run),
            steps=tuple(each.steps for each in run),
            graph=column_of(each.graph for each in run),
            milliseconds=column_of(each.milliseconds for each in run),
            samples=column_of((each.samples for each in run), 0),
            interval=column_of(each.interval for each in run),
        )
