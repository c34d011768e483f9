"""What an engine writes about its batches, as ``Engine.logs`` declares it: lines of its log, and its metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from capture_planner.measuring.traffic.source import SourceCounts, SourceOptions
from capture_planner.modes import Role
from capture_planner.records.traffic import TrafficCount

Key = tuple[Any, ...]
"""What a line says of its step, as the format's own pattern has it."""

Shape = tuple[Any, int, int]
"""Kind of a step, its requests and its tokens; 0 where the line does not say."""

DECODE, PROMPTS = "decode", "prompts"
"""Kinds that formats share; each may have others, and a tuple with PROMPTS in it is rounded where it is rare."""

Labels = tuple[tuple[str, str], ...]
Samples = Mapping[tuple[str, Labels], float]
"""Last value of each metric, by its name and its labels."""


@attrs.frozen(kw_only=True)
class LineFormat:
    """One format of lines that a log may have among others."""

    name: str
    engine: str
    """Formats of one engine show the same steps; of those in one source, the richest counts."""
    detail: int
    """Rank by how much its lines say; formats of equal detail show different steps."""
    markers: tuple[bytes, ...]
    """Texts, one of which is in each of its lines, once."""
    example: str
    find: Callable[[bytes], list[Key]]
    """Return the keys of all lines in a block of text that are of this format."""
    milliseconds: int | None = None
    """Index of the step's duration in a key, where lines have one; the first item then names engine or rank."""
    shape: Callable[[Key], Shape]
    """Return the shape of a key, without the duration."""
    times: Callable[[Key], int] = lambda key: 1
    """Return how many steps a key stands for."""
    count: Callable[[Counter[Shape], SourceOptions], SourceCounts]
    """Return the batches of counted shapes."""
    repeats: Callable[[Counter[Shape]], frozenset[Any]] = lambda shapes: frozenset()
    """Return the kinds whose lines show the same steps as others, by all lines of a source."""
    clock: re.Pattern[bytes] | None = None
    """Matches month, day and time of a line: ``11-22 05:51:30``."""


@attrs.frozen(kw_only=True)
class MetricFormat:
    """The metrics of an engine."""

    prefix: str
    """Beginning of their names: ``vllm:``."""
    example: str = ""
    """Line with batch shapes; empty: the engine has none."""
    count: Callable[[Samples], SourceCounts]
    """Returns the batches of a scrape; raises ``InvalidValue`` where it has none, with what to do."""

    def is_in(self, head: bytes) -> bool:
        """Say whether a text that begins with ``head`` has metrics of this engine."""
        name = re.escape(self.prefix).encode()
        # The head of a long scrape may end within the comments on its first metric.
        return re.search(rb"(?m)^(?:# (?:HELP|TYPE) )?" + name + rb"\w+[ {]", head) is not None


@attrs.frozen(kw_only=True)
class LogFormats:
    """All that one engine writes about its batches."""

    lines: tuple[LineFormat, ...] = ()
    metrics: MetricFormat | None = None


def decodes(shapes: Counter[Shape], kind: str = DECODE) -> Iterator[TrafficCount]:
    """Yield the decodes: uniform where the tokens divide by the requests."""
    for (each, reqs, tokens), count in shapes.items():
        if each == kind:
            query_len = tokens // reqs if tokens % reqs == 0 else None
            yield TrafficCount(
                role=Role.TARGET, num_reqs=reqs, num_tokens=tokens, query_len=query_len, past_prompt=True, count=count
            )


def prompts(shapes: Counter[Shape], kind: str = PROMPTS) -> Iterator[TrafficCount]:
    """Yield the batches with prompts among their requests."""
    for (each, reqs, tokens), count in shapes.items():
        if each == kind:
            yield TrafficCount(
                role=Role.TARGET, num_reqs=reqs or None, num_tokens=tokens, past_prompt=False, count=count
            )


def uniform_note(batches: Iterable[TrafficCount]) -> Iterator[str]:
    """Say for how many decodes the query length is inferred: below the longest, tokens that divide prove nothing."""
    listed = [(batch.query_len, batch.count) for batch in batches if batch.query_len is not None]
    longest = max((query_len for query_len, _ in listed), default=1)
    unsure = sum(count for query_len, count in listed if 1 < query_len < longest)
    if unsure:
        yield (
            f"the query length of {unsure} decodes is inferred, because their tokens divide by their requests; it is "
            f"below the longest, {longest}, so requests may differ"
        )
