"""vLLM's dynamic speculation: how many tokens are drafted at each batch size."""

from __future__ import annotations

import bisect
from typing import Any

from capture_planner.engines.parsing import refusal
from capture_planner.errors import FlagError

Tier = tuple[int, int, int]
"""First and last batch size, in requests, and the draft tokens between them."""

FLAG = ("--speculative-config", "num_speculative_tokens_per_batch_size")
_ALL = "give ranges of batch sizes from 1 on, without overlap, as in [[1, 16, 3], [17, 256, 1]]"


def normalized(schedule: Any) -> tuple[Tier, ...]:
    """Return tiers by batch size, as vLLM's ``build_dynamic_sd_schedule_lookup`` reads them; raises ``FlagError``."""
    if not isinstance(schedule, list):
        raise _refused("not a list of [first, last, draft tokens]", _ALL)
    if not schedule:
        raise _refused("the schedule is empty", "give one range, or leave the schedule out")
    tiers = sorted(enumerate(map(_tier, range(len(schedule)), schedule)), key=lambda item: item[1][0])
    previous = 0
    for index, (first, last, k) in tiers:
        if previous == 0 and first != 1:
            raise _refused(f"the first range starts at {first}", "start it at 1", index)
        if first <= previous:
            reason = f"the range [{first}, {last}, {k}] overlaps the one before it, which ends at {previous}"
            raise _refused(reason, f"start it at {previous + 1}", index)
        previous = last
    return tuple(tier for _, tier in tiers)


def draft_tokens(tiers: tuple[Tier, ...], *, max_num_reqs: int, num_speculative: int) -> tuple[int, ...]:
    """Return the draft tokens of each batch size; index 0 is unused and 0.

    ``tiers`` are normalized; without any, every batch size drafts ``num_speculative`` tokens. Gaps and
    the tail keep the number before them, and none is larger than ``num_speculative``.
    """
    if not tiers:
        return (0, *(num_speculative,) * max_num_reqs)
    firsts = [first for first, _, _ in tiers]
    tier_of = [bisect.bisect_right(firsts, reqs) - 1 for reqs in range(1, max_num_reqs + 1)]
    return (0, *(min(tiers[index][2], num_speculative) for index in tier_of))


def query_lens(drafted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the query lengths that decodes can have, ascending: 1 + k for each k of ``draft_tokens``."""
    return tuple(sorted({1 + k for k in drafted[1:]}))


def _tier(index: int, entry: Any) -> Tier:
    if not isinstance(entry, list | tuple) or len(entry) != 3:
        raise _refused("not [first, last, draft tokens]", _ALL, index)
    try:
        first, last, k = (int(number) for number in entry)
    except (TypeError, ValueError) as error:
        raise _refused("not three whole numbers", _ALL, index) from error
    written = f"the range [{first}, {last}, {k}]"
    if first <= 0 or last <= 0:
        raise _refused(f"{written} is not positive", "start the first range at 1", index)
    if first > last:
        reason = f"{written} is reversed: it ends at {last}, before its start"
        raise _refused(reason, f"write [{last}, {first}, {k}]", index)
    if k < 0:
        raise _refused(f"{written} drafts {k} tokens", "draft 0 or more", index)
    return first, last, k


def _refused(reason: str, remedy: str, *path: int) -> FlagError:
    return refusal(FLAG[0], f"vLLM does not accept the schedule: {reason}", remedy, FLAG[1], *path)
