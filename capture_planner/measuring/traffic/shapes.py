"""From the numbers of a step to the shape of its batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from capture_planner.measuring.traffic.lines import DECODE, PROMPTS, Shape
from capture_planner.modes import Role
from capture_planner.records.traffic import TrafficCount


def decodes(shapes: Counter[Shape], kind: str = DECODE) -> Iterator[TrafficCount]:
    """Yield the decodes: uniform where the tokens divide by the requests."""
    for (each, reqs, tokens), count in shapes.items():
        if each == kind:
            query_len = tokens // reqs if tokens % reqs == 0 else None
            yield _target(reqs, tokens, query_len, True, count)


def prompts(shapes: Counter[Shape], kind: str = PROMPTS) -> Iterator[TrafficCount]:
    """Yield the batches with prompts among their requests."""
    for (each, reqs, tokens), count in shapes.items():
        if each == kind:
            yield _target(reqs or None, tokens, None, False, count)


def _target(
    num_reqs: int | None, num_tokens: int | None, query_len: int | None, past_prompt: bool | None, count: int
) -> TrafficCount:
    return TrafficCount(
        role=Role.TARGET,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        query_len=query_len,
        past_prompt=past_prompt,
        count=count,
    )


def uniform_note(batches: Iterable[TrafficCount]) -> Iterator[str]:
    """Say for how many decodes the query length is inferred: tokens that divide by requests prove nothing below the
    longest query.
    """
    listed = [(batch.query_len, batch.count) for batch in batches if batch.query_len is not None]
    longest = max((query_len for query_len, _ in listed), default=1)
    unsure = sum(count for query_len, count in listed if 1 < query_len < longest)
    if unsure:
        yield (
            f"the query length of {unsure} decodes is inferred, because their tokens divide by their requests; it is "
            f"below the longest, {longest}, so requests may differ"
        )
