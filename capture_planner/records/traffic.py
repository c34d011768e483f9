"""Traffic: how often each batch shape ran, by role, as logs, metrics, observations or traces show it.

Its table of batches is compact in files: rows of columns (``codec.rows``). What a source does not say is
None, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import attrs

from capture_planner.errors import Problem
from capture_planner.modes import Role
from capture_planner.records._base import Interval, Sum, Tally, field, record
from capture_planner.records.spec import SCHEMA_VERSION, SchemaVersion

Steps = Annotated[int, Interval(1)]


@attrs.frozen(kw_only=True)
class TrafficCount:
    """Number of steps of one batch shape. None: the source does not say."""

    role: Role
    num_reqs: int | None = None
    num_tokens: int | None = None
    query_len: int | None = None
    """Tokens of each request of a decode, where all have the same number; None also where they differ."""
    past_prompt: bool | None = None
    """True: a decode, every request past its prompt; False: prompts among the requests."""
    active_loras: int = 0
    count: int
    """Number of steps."""

    @property
    def shape(self) -> tuple[Role, bool | None, int | None, int, int | None, int | None]:
        """All but the count: role, past_prompt, query_len, active_loras, num_reqs, num_tokens."""
        return self.role, self.past_prompt, self.query_len, self.active_loras, self.num_reqs, self.num_tokens


def _place(count: TrafficCount) -> tuple[int, ...]:
    """Return where a shape stands in the table: by role, decodes first, then by its numbers."""
    role, past_prompt, *numbers = count.shape
    kind = (True, False, None).index(past_prompt)
    # None does not compare with numbers.
    return list(Role).index(role), kind, *(-1 if number is None else number for number in numbers), count.count


def accepted_problems(drafted: Sequence[int], accepted: Sequence[int]) -> Iterator[Problem]:
    """Yield each position where more drafts were accepted than drafted, at its place in ``accepted``."""
    if len(accepted) != len(drafted):
        yield Problem(path=("accepted",), message=f"{len(accepted)} positions, drafted has {len(drafted)}")
    for place, (held, proposed) in enumerate(zip(accepted, drafted, strict=False)):
        if held > proposed:
            yield Problem(path=("accepted", place), message=f"expected at most {proposed}, as drafted, got {held}")


@record
class Traffic:
    """The batches that an engine ran, or would have run, over a time."""

    version: SchemaVersion = field("version of this file's schema", default=SCHEMA_VERSION)
    sources: tuple[str, ...] = field("names of the files that it was read from, each with its format")
    seconds: Sum | None = field("time that the counts cover; None: unknown", default=None)
    batches: tuple[TrafficCount, ...] = field(
        "batch shapes with their counts, by role", converter=lambda counts: tuple(sorted(counts, key=_place))
    )
    lines: Tally | None = field(
        "observations that the target's steps rest on, where a log shows one of several; None: each step is one",
        default=None,
    )
    skipped: Tally = field("lines of the sources that could not be read", default=0)
    drafted: tuple[Tally, ...] = field("drafts proposed, by position", default=())
    accepted: tuple[Tally, ...] = field("drafts accepted, by position", default=())
    notes: tuple[str, ...] = field("sentences about facts that the sources lack", default=())

    def _problems(self) -> Iterator[Problem]:
        """Yield what no batch can be, and what could be said in two ways, one of which a file has."""
        for index, batch in enumerate(self.batches):
            path = ("batches", index)
            reqs, tokens, each = batch.num_reqs, batch.num_tokens, batch.query_len
            if any(number is not None and number < 1 for number in (reqs, tokens, each, batch.count)):
                yield Problem(path=path, message="numbers of a batch are at least 1")
            elif reqs is None and tokens is None:
                yield Problem(path=path, message="a batch without requests and tokens", remedy="give one of them")
            # Tokens are stated also where they follow, so that a shape has one form.
            elif reqs is not None and each is not None and reqs * each != tokens:
                yield Problem(path=path, message=f"{reqs} requests of {each} tokens are not {tokens} tokens")
        yield from accepted_problems(self.drafted, self.accepted)

    @property
    def steps(self) -> int:
        """How many steps it counts, over all roles."""
        return sum(batch.count for batch in self.batches)

    @property
    def has_prompts(self) -> bool:
        """Whether some batch of the target has prompts, or may have some; without, it says nothing of mixed batches."""
        # None is not False: the source does not say, and there may be prompts.
        return any(batch.role is Role.TARGET and batch.past_prompt is not True for batch in self.batches)
