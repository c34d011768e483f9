"""Rows: the table of a traffic file, columns of what differs from one batch shape to the next."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.codec.columns import cells_of, column_of, query_len_columns, refuse_uneven
from capture_planner.errors import Problem
from capture_planner.modes import Role
from capture_planner.records._base import Count, NonNegative, field, grouped, raise_any, record
from capture_planner.records.traffic import Steps, TrafficCount


@record
class TrafficRow:
    """Batch shapes of one kind, each with how often it ran. A column that is omitted is not known."""

    role: Role = field("the role")
    query_len: Count | None = field(
        "tokens of each request, if all have the same number; omitted where they differ, and where it is not known",
        default=None,
    )
    query_lens: tuple[Count, ...] | None = field("query_len of each shape, where they differ", default=None)
    past_prompt: bool | None = field(
        "true: decodes; false: prompts among the requests; omitted: not known", default=None
    )
    active_loras: NonNegative = field("distinct adapters", default=0)
    num_reqs: tuple[Count, ...] | None = field("requests of each shape", default=None)
    num_tokens: tuple[Count, ...] | None = field(
        "tokens of each shape; also omitted where they are num_reqs times query_len", default=None
    )
    counts: tuple[Steps, ...] = field("how many steps ran each")

    def __attrs_post_init__(self) -> None:
        refuse_uneven(self, "counts", "num_reqs", "num_tokens", "query_lens")
        if self.num_reqs is None and self.num_tokens is None:
            raise_any([Problem(path=("counts",), message="counts of no shape", remedy="give num_reqs or num_tokens")])
        raise_any(self._uneven_products())

    def _uneven_products(self) -> Iterator[Problem]:
        """Yield each shape whose tokens are not requests times query length."""
        lengths = cells_of(self.query_lens, len(self.counts), self.query_len)
        for index, (reqs, tokens, each) in enumerate(
            zip(self.num_reqs or (), self.num_tokens or (), lengths, strict=False)
        ):
            if each is not None and reqs * each != tokens:
                message = f"{reqs} requests of {each} tokens are not {tokens} tokens"
                yield Problem(path=("num_tokens", index), message=message)

    def lines(self) -> Iterator[TrafficCount]:
        """Yield the shapes of this row."""
        length = len(self.counts)
        columns = cells_of(self.num_reqs, length), cells_of(self.num_tokens, length)
        lengths = cells_of(self.query_lens, length, self.query_len)
        for reqs, tokens, query_len, count in zip(*columns, lengths, self.counts, strict=True):
            follows = tokens is None and reqs is not None and query_len is not None
            yield TrafficCount(
                role=self.role,
                num_reqs=reqs,
                num_tokens=reqs * query_len if follows else tokens,
                query_len=query_len,
                past_prompt=self.past_prompt,
                active_loras=self.active_loras,
                count=count,
            )

    @classmethod
    def pack(cls, counts: tuple[TrafficCount, ...]) -> tuple[TrafficRow, ...]:
        """Return the rows of a table of batches."""

        def kind(count: TrafficCount) -> tuple[object, ...]:
            # Decodes have few query lengths, and prompts as many as there are lengths of prompts.
            query_len = count.query_len if count.past_prompt else count.query_len is None
            missing = count.num_reqs is None, count.num_tokens is None
            return count.role, query_len, count.past_prompt, count.active_loras, *missing

        return tuple(map(cls._row, grouped(counts, kind).values()))

    @classmethod
    def _row(cls, run: list[TrafficCount]) -> TrafficRow:
        first = run[0]
        follows = None not in (first.num_reqs, first.query_len)
        return cls(
            role=first.role,
            **query_len_columns([each.query_len for each in run]),
            past_prompt=first.past_prompt,
            active_loras=first.active_loras,
            num_reqs=column_of(each.num_reqs for each in run),
            num_tokens=None if follows else column_of(each.num_tokens for each in run),
            counts=tuple(each.count for each in run),
        )
