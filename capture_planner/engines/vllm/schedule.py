"""vLLM's dynamic speculation: how many tokens are drafted at each batch size."""

from __future__ import annotations

import bisect
from typing import Any

from capture_planner.errors import FlagError, Problem

Tier = tuple[int, int, int]
"""First and last batch size, in requests, and the draft tokens between them."""

FLAG = ("--speculative-config", "num_speculative_tokens_per_batch_size")


def normalized(schedule: Any) -> tuple[Tier, ...]:
    """Return the schedule by batch size, as vLLM reads it from JSON; raises ``FlagError``.

    Every number goes through ``int``, as in the engine, so that ``2.9`` counts as 2.
    """
    if not isinstance(schedule, list):
        raise _refused("not a list of [first, last, draft tokens]")
    if not schedule:
        raise _refused("the schedule is empty")
    tiers = sorted((_tier(index, entry) for index, entry in enumerate(schedule)), key=lambda tier: tier[0])
    previous = 0
    for first, last, _ in tiers:
        if first <= previous:
            raise _refused(
                f"the range {first} to {last} overlaps the one before it, which ends at {previous}"
            )
        previous = last
    if tiers[0][0] != 1:
        raise _refused(f"the first range starts at {tiers[0][0]}, and must start at 1")
    return tuple(tiers)


def draft_tokens(tiers: tuple[Tier, ...], *, max_num_reqs: int, num_speculative: int) -> tuple[int, ...]:
    """Return the draft tokens of each batch size; index 0 is unused and 0.

    ``tiers`` are normalized; without any, every batch size drafts ``num_speculative`` tokens. Gaps and
    the tail keep the number before them, and none is larger than ``num_speculative``.
    """
    if not tiers:
        return (0, *(num_speculative,) * max_num_reqs)
    firsts = [first for first, _, _ in tiers]
    return (
        0,
        *(
            min(tiers[bisect.bisect_right(firsts, reqs) - 1][2], num_speculative)
            for reqs in range(1, max_num_reqs + 1)
        ),
    )


def query_lens(tiers: tuple[Tier, ...], *, max_num_reqs: int, num_speculative: int) -> tuple[int, ...]:
    """Return the query lengths that decodes can have, ascending: 1 + k for each scheduled k."""
    lookup = draft_tokens(tiers, max_num_reqs=max_num_reqs, num_speculative=num_speculative)
    return tuple(sorted({1 + k for k in lookup[1:]}))


def _tier(index: int, entry: Any) -> Tier:
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        raise _refused("not [first, last, draft tokens]", index)
    try:
        first, last, k = (int(number) for number in entry)
    except (TypeError, ValueError) as error:
        raise _refused("not three whole numbers", index) from error
    if first <= 0 or last <= 0:
        raise _refused(f"the range {first} to {last} is not positive", index)
    if first > last:
        raise _refused(f"the range {first} to {last} is empty", index)
    if k < 0:
        raise _refused(f"{k} draft tokens", index)
    return first, last, k


def _refused(message: str, *path: int) -> FlagError:
    remedy = "give ranges of batch sizes from 1 on, without overlap, as in [[1, 16, 3], [17, 256, 1]]"
    return FlagError([Problem(path=(*FLAG, *path), message=message, remedy=remedy)])
