"""Rows: entries as a plan file lists them, one row per mode and query length.

A row is compact and complete: decodes list requests, and tokens follow (T = R * q, the most where they vary); a row
of uniform decodes whose tokens do not follow, as only a plan made by hand has, lists both, for the lint to find.
"""

from capture_planner.errors import InvalidValue, Problem
from capture_planner.modes import GraphMode
from capture_planner.records._base import Count, NonNegative, field, raise_any, record
from capture_planner.records.batch import Entry
from capture_planner.records.plan import MAX_GRAPHS
from capture_planner.records.spec import QueryLength

MAX_TOKENS = 1 << 20


_GraphKind = tuple[GraphMode, int | None, int | None, int | None]
"""Mode, query length, the most of varying ones, and draft steps of a graph."""

_Extents = tuple[int, int | None]
"""Padded tokens and requests of a graph."""


@record
class EntryRow:
    """Graphs of one mode and query length, largest first."""

    mode: GraphMode = field("PIECEWISE or FULL")
    query_len: QueryLength | None = field("tokens of each request in a uniform decode", default=None)
    max_query_len: QueryLength | None = field(
        "most tokens of a request in a varying decode: each has 1 to so many", default=None
    )
    draft_steps: Count | None = field("length of a fused draft chain", default=None)
    active_loras: tuple[NonNegative, ...] = field("each size is captured for each of these", default=(0,))
    num_reqs: tuple[Count, ...] | None = field("padded requests of each graph; left out where PIECEWISE", default=None)
    num_tokens: tuple[Count, ...] | None = field(
        "padded tokens of each graph; left out where they are num_reqs times query_len", default=None
    )

    def __attrs_post_init__(self) -> None:
        tokens, reqs = self.num_tokens, self.num_reqs
        counts = len(reqs or ()), len(tokens or ())
        is_large = max(reqs or (0,)) * (self.query_len or self.max_query_len or 0) > MAX_TOKENS
        problems = []

        def require(holds: bool, key: str, message: str, remedy: str = "") -> None:
            if not holds:
                problems.append(Problem(path=(key,), message=message, remedy=remedy))

        is_graph = self.mode in (GraphMode.PIECEWISE, GraphMode.FULL)
        require(is_graph, "mode", f"a graph is PIECEWISE or FULL, not {self.mode.value}")
        require(not is_large, "num_reqs", f"a graph of more than {MAX_TOKENS} tokens", "check num_reqs")
        varies = self.max_query_len is not None
        is_alone = not varies or (self.query_len is None and tokens is None and reqs is not None)
        require(is_alone, "max_query_len", "takes num_reqs, and neither query_len nor num_tokens", "list num_reqs only")
        require(not varies or self.mode is GraphMode.FULL, "mode", "a graph of varying decodes is FULL")
        follows = self.query_len is not None and reqs is not None
        follows = follows or varies
        require(tokens is not None or follows, "num_tokens", "needed unless both query_len and num_reqs are given")
        message = f"{counts[0]} request counts for {counts[1]} token counts"
        is_paired = tokens is None or reqs is None or counts[0] == counts[1]
        require(is_paired, "num_reqs", message, "list one of each for every graph")
        raise_any(problems)

    @property
    def num_graphs(self) -> int:
        """How many graphs the row stands for."""
        return len(self.num_tokens or self.num_reqs or ()) * len(self.active_loras)

    @property
    def decodes(self) -> str:
        """The tokens of each request in words, ``4`` or ``up to 4``; empty where they are for any batch."""
        return f"up to {self.max_query_len}" if self.max_query_len else str(self.query_len or "")

    def entries(self) -> tuple[Entry, ...]:
        """Return the graphs of this row."""
        tokens, reqs, each = self.num_tokens, self.num_reqs, self.query_len or self.max_query_len
        if tokens is None:
            assert reqs is not None and each is not None
            tokens = tuple(count * each for count in reqs)
        return tuple(
            Entry(
                mode=self.mode,
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                query_len=self.query_len,
                active_loras=loras,
                draft_steps=self.draft_steps,
                max_query_len=self.max_query_len,
            )
            for num_tokens, num_reqs in zip(tokens, (None,) * len(tokens) if reqs is None else reqs, strict=True)
            for loras in self.active_loras
        )


def pack(entries: tuple[Entry, ...]) -> tuple[EntryRow, ...]:
    """Return the rows of a plan's entries: sizes of one kind and the same adapter cases share one."""
    cases: dict[tuple[_GraphKind, _Extents], list[int]] = {}
    for entry in entries:
        kind = (entry.mode, entry.query_len, entry.max_query_len, entry.draft_steps)
        cases.setdefault((kind, (entry.num_tokens, entry.num_reqs)), []).append(entry.active_loras)
    shapes: dict[tuple[_GraphKind, bool, tuple[int, ...]], list[_Extents]] = {}
    for (kind, shape), loras in cases.items():
        alike = (kind, shape[1] is None, tuple(sorted(loras, reverse=True)))
        shapes.setdefault(alike, []).append(shape)
    return tuple(_row(kind, unpadded, loras, alike) for (kind, unpadded, loras), alike in shapes.items())


def _row(kind: _GraphKind, unpadded: bool, loras: tuple[int, ...], shapes: list[_Extents]) -> EntryRow:
    mode, query_len, max_query_len, draft_steps = kind
    each = max_query_len if query_len is None else query_len
    follows = each is not None and all(tokens == (reqs or 0) * each for tokens, reqs in shapes)
    return EntryRow(
        mode=mode,
        query_len=query_len,
        max_query_len=max_query_len,
        draft_steps=draft_steps,
        active_loras=loras,
        num_reqs=None if unpadded else tuple(reqs for _, reqs in shapes if reqs is not None),
        num_tokens=None if follows else tuple(tokens for tokens, _ in shapes),
    )


def unpack(rows: tuple[EntryRow, ...]) -> tuple[Entry, ...]:
    """Return the entries of a plan file's rows; raises ``InvalidValue`` where they are too many."""
    total = sum(row.num_graphs for row in rows)
    if total > MAX_GRAPHS:
        raise InvalidValue([Problem(message=f"{total} graphs, and a plan has at most {MAX_GRAPHS}")])
    return tuple(entry for row in rows for entry in row.entries())
