"""Rows: how files list graphs, answers and batches.

A file has at most 16,000 values, so a table is not a list of mappings. A row states once what its lines share, and
has a column for each thing that differs. A row is a record: ``column`` declares those of its fields that are lists,
and ``RowTable`` says which lines share a row. Reading and writing follow from the two declarations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from capture_planner.errors import InvalidValue, Problem
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import Amount, Count, NonNegative, Tally, field, grouped, record
from capture_planner.records.batch import Entry
from capture_planner.records.batch_space import split_when
from capture_planner.records.observation import BatchCount, DispatchRun, ObservedGraph
from capture_planner.records.plan import MAX_GRAPHS
from capture_planner.records.spec import QueryLength
from capture_planner.records.traffic import Steps, TrafficCount

MAX_TOKENS = 1 << 20

Values = dict[str, Any]
"""The attributes of a line by name."""

Times = tuple[Amount | None, ...]


@attrs.frozen
class _Column:
    of: str
    omitted: Any
    once: str
    follows: bool


def column(doc: str, of: str, *, omitted: Any = attrs.NOTHING, once: str = "", follows: bool = False) -> Any:
    """Declare a field of a row that is a list, with a cell for each line.

    :param of: attribute of a line that it has.
    :param omitted: cell of every line where the row has no such column; without it, every row has the column.
    :param once: field of the row that has the cell instead, where all lines have the same one.
    :param follows: whether the column is left out where every cell is requests times query length.
    """
    default: Any = attrs.NOTHING if omitted is attrs.NOTHING else None
    return attrs.field(metadata={"doc": doc, "column": _Column(of, omitted, once, follows)}, default=default)


def _columns(row: type) -> dict[str, _Column]:
    return {each.name: cells for each in attrs.fields(row) if (cells := each.metadata.get("column")) is not None}


def uneven_columns(row: Any) -> Iterator[Problem]:
    """Yield each column that has another length than the first that every row has."""
    columns = _columns(type(row))
    first = next(name for name, each in columns.items() if each.omitted is attrs.NOTHING)
    length = len(getattr(row, first))
    for name in columns:
        if (cells := getattr(row, name)) is not None and len(cells) != length:
            message = f"{len(cells)} values, and {first} has {length}"
            yield Problem(path=(name,), message=message, remedy="list one for each")


def _product(line: Values) -> int | None:
    """Return the tokens of requests of one query length, or of up to that many; None where one is not known."""
    each = line.get("max_query_len") if line["query_len"] is None else line["query_len"]
    return None if each is None or line["num_reqs"] is None else line["num_reqs"] * each


_attributes = functools.partial(attrs.asdict, recurse=False)


@attrs.frozen
class RowTable:
    """A table as rows of the record ``row``."""

    row: Any
    line: Callable[..., Any]
    """Makes a line of its attributes by name."""
    kind: Callable[[Values], object]
    """Returns what lines of one row have in common, besides the fields of the row that are no columns."""
    values: Callable[[Any], Values] = _attributes
    """Returns the attributes of a line."""
    apart: Callable[[Values, Values], bool] | None = None
    """Says whether a line cannot follow another in one row; None: lines share a row wherever they are in the table."""

    def lines(self, row: Any) -> Iterator[Any]:
        """Yield the lines of a row."""
        columns = _columns(self.row)
        shared = {name: value for name, value in _attributes(row).items() if name not in columns}
        given = {name: cells for name in columns if (cells := getattr(row, name)) is not None}
        length = len(next(iter(given.values())))
        cells = {
            each.of: given.get(name) or (shared[each.once] if each.once else each.omitted,) * length
            for name, each in columns.items()
        }
        computed = [each.of for name, each in columns.items() if each.follows and name not in given]
        for index in range(length):
            line = shared | {name: column[index] for name, column in cells.items()}
            line |= {name: _product(line) for name in computed}
            if "first" in shared:
                # The next range begins behind this one.
                shared["first"] = line["last"] + 1
            yield self.line(**line)

    def unpack(self, rows: Iterable[Any]) -> tuple[Any, ...]:
        """Return the lines of a file's rows."""
        return tuple(line for row in rows for line in self.lines(row))

    def pack(self, lines: Iterable[Any]) -> tuple[Any, ...]:
        """Return the rows of a table."""
        columns = _columns(self.row)
        apart = {*columns, "first", *(each.once for each in columns.values())}
        shared = [each.name for each in attrs.fields(self.row) if each.name not in apart]

        def key(line: Values) -> tuple[object, ...]:
            return *(line[name] for name in shared), self.kind(line)

        listed, is_apart = map(self.values, lines), self.apart
        if is_apart is None:
            return tuple(map(self._row, grouped(listed, key).values()))
        return tuple(map(self._row, split_when(lambda a, b: key(a) != key(b) or is_apart(a, b), listed)))

    def _row(self, run: list[Values]) -> Any:
        columns = _columns(self.row)
        row = {each.name: run[0][each.name] for each in attrs.fields(self.row) if each.name not in columns}
        for name, each in columns.items():
            cells: Any = tuple(line[each.of] for line in run)
            if each.once and len(set(cells)) == 1:
                row[each.once], cells = cells[0], None
            # A row has the column or the single value, never both.
            elif each.once:
                row[each.once] = None
            elif (each.follows and cells == tuple(map(_product, run))) or all(cell == each.omitted for cell in cells):
                cells = None
            row[name] = cells
        return self.row(**row)


@record
class EntryRow:
    """Graphs of one mode and query length, largest first.

    A row is compact and complete: decodes list requests, and tokens follow (T = R * q, the most where they vary); a row
    of uniform decodes whose tokens do not follow, as only a plan made by hand has, lists both, for the lint to find.
    """

    mode: GraphMode = field("PIECEWISE or FULL")
    query_len: QueryLength | None = field("tokens of each request in a uniform decode", default=None)
    max_query_len: QueryLength | None = field(
        "most tokens of a request in a varying decode: each has 1 to so many", default=None
    )
    draft_steps: Count | None = field("length of a fused draft chain", default=None)
    active_loras: tuple[NonNegative, ...] = field("each size is captured for each of these", default=(0,))
    num_reqs: tuple[Count, ...] | None = column(
        "padded requests of each graph; left out where PIECEWISE", "num_reqs", omitted=None
    )
    num_tokens: tuple[Count, ...] | None = column(
        "padded tokens of each graph; left out where they are num_reqs times query_len",
        "num_tokens",
        omitted=None,
        follows=True,
    )

    def _problems(self) -> Iterator[Problem]:
        tokens, reqs, varies = self.num_tokens, self.num_reqs, self.max_query_len is not None
        if self.mode not in (GraphMode.PIECEWISE, GraphMode.FULL):
            yield Problem(path=("mode",), message=f"a graph is PIECEWISE or FULL, not {self.mode.value}")
        # Tokens follow from requests here, so a slip of the keyboard could ask for a graph of any size.
        if max(reqs or (0,)) * (self.query_len or self.max_query_len or 0) > MAX_TOKENS:
            message = f"a graph of more than {MAX_TOKENS} tokens"
            yield Problem(path=("num_reqs",), message=message, remedy="check num_reqs")
        if varies and (self.query_len is not None or tokens is not None or reqs is None):
            message = "takes num_reqs, and neither query_len nor num_tokens"
            yield Problem(path=("max_query_len",), message=message, remedy="list num_reqs only")
        if varies and self.mode is not GraphMode.FULL:
            yield Problem(path=("mode",), message="a graph of varying decodes is FULL")
        if tokens is None and not varies and (self.query_len is None or reqs is None):
            yield Problem(path=("num_tokens",), message="needed unless both query_len and num_reqs are given")
        if tokens is not None and reqs is not None and len(reqs) != len(tokens):
            message = f"{len(reqs)} request counts for {len(tokens)} token counts"
            yield Problem(path=("num_reqs",), message=message, remedy="list one of each for every graph")

    @property
    def decodes(self) -> str:
        """The tokens of each request in words, ``4`` or ``up to 4``; empty where they are for any batch."""
        return f"up to {self.max_query_len}" if self.max_query_len else str(self.query_len or "")

    def entries(self) -> tuple[Entry, ...]:
        """Return the graphs of this row."""
        return tuple(
            Entry(**line | {"active_loras": loras}) for line in _SIZES.lines(self) for loras in self.active_loras
        )


_SIZES = RowTable(EntryRow, dict, values=dict, kind=lambda line: line["num_reqs"] is None)
"""Graphs of all adapter counts of one size as a line."""


@attrs.frozen
class _EntryRows(RowTable):
    """Entries as rows: those that differ in their adapter counts alone are one size of a row."""

    def unpack(self, rows: Iterable[EntryRow]) -> tuple[Entry, ...]:
        """Return the entries of a plan file's rows; raises ``InvalidValue`` where they are too many."""
        rows = tuple(rows)
        # Before any entry is made: a short row of sizes and adapters may stand for millions.
        total = sum(len(row.num_tokens or row.num_reqs or ()) * len(row.active_loras) for row in rows)
        if total > MAX_GRAPHS:
            raise InvalidValue([Problem(message=f"{total} graphs, and a plan has at most {MAX_GRAPHS}")])
        return tuple(entry for row in rows for entry in row.entries())

    def pack(self, entries: Iterable[Entry]) -> tuple[EntryRow, ...]:
        """Return the rows of a plan's entries."""
        # A plan has its entries in one order, so rows need not keep it.
        sizes = grouped(entries, lambda entry: attrs.evolve(entry, active_loras=0))
        cases = {
            size: tuple(sorted((entry.active_loras for entry in alike), reverse=True)) for size, alike in sizes.items()
        }
        return _SIZES.pack(_attributes(size) | {"active_loras": loras} for size, loras in cases.items())


@record
class GraphRow:
    """Graphs of one kind that were captured one after the other."""

    mode: GraphMode = field("PIECEWISE or FULL")
    query_len: NonNegative | None = field("tokens of each request in a uniform decode", default=None)
    query_lens: tuple[NonNegative, ...] | None = column(
        "query_len of each graph, where they differ", "query_len", omitted=None, once="query_len"
    )
    draft_steps: NonNegative | None = field("length of a fused draft chain", default=None)
    max_query_len: NonNegative | None = field(
        "most tokens of each request, where the graphs serve any mix of decodes", default=None
    )
    prompts_only: bool = field("decodes never run on them", default=False)
    num_tokens: tuple[Count, ...] = column("padded tokens of each graph, in capture order", "num_tokens")
    num_reqs: tuple[Count, ...] | None = column(
        "padded requests of each graph; left out where PIECEWISE", "num_reqs", omitted=None
    )
    active_loras: tuple[NonNegative, ...] | None = column(
        "most adapters of each graph; 0 where omitted", "active_loras", omitted=0
    )
    seconds: Times | None = column("time of each capture, in seconds", "seconds", omitted=None)
    mib: Times | None = column("memory of each capture, in MiB", "mib", omitted=None)
    milliseconds: Times | None = column("median time of a replay, in milliseconds", "milliseconds", omitted=None)
    half_milliseconds: Times | None = column(
        "the same with half of the tokens, where experts skip padding", "half_milliseconds", omitted=None
    )
    replays: tuple[Tally, ...] | None = column("steps that ran on each; 0 where omitted", "replays", omitted=0)

    def _problems(self) -> Iterator[Problem]:
        if self.mode not in (GraphMode.PIECEWISE, GraphMode.FULL):
            yield Problem(path=("mode",), message=f"a graph is PIECEWISE or FULL, not {self.mode.value}")
        yield from uneven_columns(self)


def _observed_graph(**values: Any) -> ObservedGraph:
    own = {name: values.pop(name) for name in attrs.fields_dict(ObservedGraph) if name != "entry"}
    return ObservedGraph(entry=Entry(**values), **own)


@record
class AnswerRow:
    """Answers to ranges of batches that follow each other: requests where they have a query length, else tokens."""

    query_len: NonNegative | None = field("tokens of each request; left out where requests differ", default=None)
    past_prompt: bool = field("every request is past its prompt", default=True)
    min_reqs: NonNegative = field("fewest requests, where requests differ", default=1)
    max_reqs: NonNegative | None = field("most requests, where requests differ; None: any number", default=None)
    min_loras: NonNegative = field("fewest active adapters", default=0)
    max_loras: NonNegative = field("most active adapters", default=0)
    first: NonNegative = field("beginning of the first range")
    last: tuple[NonNegative, ...] = column("end of each range; the next begins after it", "last")
    graph: tuple[NonNegative, ...] | None = column(
        "index of the graph of each range; omitted where eager", "graph", omitted=None
    )
    reason: Reason | None = field("reason for no graph", default=None)

    _problems = uneven_columns


@record
class BatchRow:
    """Batch shapes of one kind, each with how often it ran: the most frequent first."""

    query_len: NonNegative | None = field("tokens of each request; left out where requests differ", default=None)
    query_lens: tuple[NonNegative, ...] | None = column(
        "query_len of each shape, where they differ", "query_len", omitted=None, once="query_len"
    )
    past_prompt: bool = field("every request is past its prompt", default=True)
    active_loras: NonNegative = field("distinct adapters", default=0)
    reason: Reason | None = field("reason for no graph", default=None)
    num_reqs: tuple[NonNegative, ...] = column("requests of each shape", "num_reqs")
    num_tokens: tuple[NonNegative, ...] | None = column(
        "tokens of each shape; left out where they are num_reqs times query_len",
        "num_tokens",
        omitted=None,
        follows=True,
    )
    steps: tuple[Tally, ...] = column("number of steps of each", "steps")
    graph: tuple[NonNegative, ...] | None = column(
        "index of the graph of each; omitted where eager", "graph", omitted=None
    )
    milliseconds: Times | None = column(
        "median time of the steps that were timed, in milliseconds", "milliseconds", omitted=None
    )
    samples: tuple[Tally, ...] | None = column("number of steps that were timed; 0 where omitted", "samples", omitted=0)
    interval: Times | None = column("mean time until the next step, in milliseconds", "interval", omitted=None)
    intervals: tuple[Tally, ...] | None = column(
        "number of steps in that mean; 0 where omitted", "intervals", omitted=0
    )
    interval_error: Times | None = column(
        "standard error of that mean, in milliseconds", "interval_error", omitted=None
    )

    def _problems(self) -> Iterator[Problem]:
        if self.num_tokens is None and self.query_len is None and self.query_lens is None:
            yield Problem(path=("num_tokens",), message="needed unless query_len is given")
        yield from uneven_columns(self)


@record
class TrafficRow:
    """Batch shapes of one kind, each with how often it ran. A column that is omitted is not known."""

    role: Role = field("the role")
    query_len: Count | None = field(
        "tokens of each request, if all have the same number; omitted where they differ, and where it is not known",
        default=None,
    )
    query_lens: tuple[Count, ...] | None = column(
        "query_len of each shape, where they differ", "query_len", omitted=None, once="query_len"
    )
    past_prompt: bool | None = field(
        "true: decodes; false: prompts among the requests; omitted: not known", default=None
    )
    active_loras: NonNegative = field("distinct adapters", default=0)
    num_reqs: tuple[Count, ...] | None = column("requests of each shape", "num_reqs", omitted=None)
    num_tokens: tuple[Count, ...] | None = column(
        "tokens of each shape; also omitted where they are num_reqs times query_len",
        "num_tokens",
        omitted=None,
        follows=True,
    )
    counts: tuple[Steps, ...] = column("number of steps of each", "count")

    def _problems(self) -> Iterator[Problem]:
        # Products are compared only where columns have the same length.
        if uneven := list(uneven_columns(self)):
            yield from uneven
            return
        if self.num_reqs is None and self.num_tokens is None:
            yield Problem(path=("counts",), message="counts of no shape", remedy="give num_reqs or num_tokens")
        lengths = self.query_lens or (self.query_len,) * len(self.counts)
        shapes = zip(self.num_reqs or (), self.num_tokens or (), lengths, strict=False)
        for index, (reqs, tokens, each) in enumerate(shapes):
            if each is not None and reqs * each != tokens:
                message = f"{reqs} requests of {each} tokens are not {tokens} tokens"
                yield Problem(path=("num_tokens", index), message=message)


def _kind_of_batch(line: Values) -> tuple[object, ...]:
    # Decodes have few distinct query lengths; prompts have one per prompt length.
    query_len = line["query_len"] if line["past_prompt"] else line["query_len"] is None
    return query_len, *(line[name] is None for name in ("num_reqs", "num_tokens")), line.get("graph") is None


ENTRIES = _EntryRows(EntryRow, Entry, kind=lambda line: None)

ROWS: Mapping[Any, RowTable] = {
    tuple[Entry, ...]: ENTRIES,
    tuple[ObservedGraph, ...]: RowTable(
        GraphRow,
        _observed_graph,
        values=lambda graph: _attributes(graph.entry) | _attributes(graph),
        kind=lambda line: (line["query_len"] is None, line["num_reqs"] is None),
        # Graphs share a row with neighbours only, because a table is in the order of capture.
        apart=lambda one, other: False,
    ),
    tuple[DispatchRun, ...]: RowTable(
        AnswerRow,
        DispatchRun,
        kind=lambda line: line["graph"] is None,
        # A row states where its first range begins, and each other one follows the range before it.
        apart=lambda one, other: one["last"] + 1 != other["first"],
    ),
    tuple[BatchCount, ...]: RowTable(BatchRow, BatchCount, kind=_kind_of_batch),
    tuple[TrafficCount, ...]: RowTable(TrafficRow, TrafficCount, kind=_kind_of_batch),
}
"""The types of tables that files have as rows."""
