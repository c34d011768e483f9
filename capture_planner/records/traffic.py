"""Traffic: how often each batch shape ran, by role, as logs, metrics, observations or traces show it.

Its table of batches is compact in files: rows of columns (``codec.traffic_rows``). What a source does not say is
None, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import attrs

from capture_planner.errors import Problem
from capture_planner.modes import Role
from capture_planner.records._base import AtLeast, Interval, field, raise_any, record
from capture_planner.records.spec import SCHEMA_VERSION, SchemaVersion

Amount = Annotated[float, AtLeast(0)]
Tally = Annotated[int, Interval(0)]


@attrs.frozen(kw_only=True)
class TrafficCount:
    """How often batches of one shape ran. None: the source does not say."""

    role: Role
    num_reqs: int | None = None
    num_tokens: int | None = None
    query_len: int | None = None
    """Tokens of each request, where all have the same number; None also where they differ."""
    past_prompt: bool | None = None
    """Whether every request is past its prompt: True is a decode, False has prompts in it."""
    active_loras: int = 0
    count: int
    """How many steps."""


@record
class Traffic:
    """The batches that an engine ran, or would have run, over a time."""

    version: SchemaVersion = field("version of this file's schema", default=SCHEMA_VERSION)
    sources: tuple[str, ...] = field("what it was read from: names of files, each with its format")
    seconds: Amount | None = field("time that the counts cover; None: the source does not say", default=None)
    batches: tuple[TrafficCount, ...] = field("batch shapes with their counts, by role")
    skipped: Tally = field("lines of the sources that could not be read", default=0)
    drafted: tuple[Tally, ...] = field("drafts proposed, by position", default=())
    accepted: tuple[Tally, ...] = field("drafts accepted, by position", default=())
    notes: tuple[str, ...] = field("what the sources do not say, in sentences", default=())

    def __attrs_post_init__(self) -> None:
        raise_any(self._impossible())

    def _impossible(self) -> Iterator[Problem]:
        """Yield what no batch can be: counts below 1, and tokens that are not requests times query length."""
        for index, batch in enumerate(self.batches):
            numbers = (batch.num_reqs, batch.num_tokens, batch.query_len, batch.count)
            if any(number is not None and number < 1 for number in numbers):
                yield Problem(path=("batches", index), message="numbers of a batch are at least 1")
            elif None not in numbers and batch.num_reqs * batch.query_len != batch.num_tokens:  # type: ignore[operator]
                message = f"{batch.num_reqs} requests of {batch.query_len} tokens are not {batch.num_tokens} tokens"
                yield Problem(path=("batches", index), message=message)

    @property
    def steps(self) -> int:
        """How many steps it counts, over all roles."""
        return sum(batch.count for batch in self.batches)
