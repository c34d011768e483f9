"""Fits traffic into a file: where it has too many shapes, the rarest that are near each other become one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from capture_planner import codec
from capture_planner.codec.documents import MAX_NODES, num_nodes
from capture_planner.modes import Role
from capture_planner.records._base import replace
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount

Shape = tuple[Role, bool | None, int | None, int, int | None, int | None]

GRIDS = ((0.01, 0.01), (0.02, 0.02), (0.02, 0.05), (0.02, 0.1), (0.02, 0.25), (0.02, 1.0), (0.1, 1.0), (1.0, 1.0))
"""How far tokens and requests of rare shapes are rounded up, as shares of each: the first that fits is taken."""


def rounded_up(number: int, share: float) -> int:
    """Return the least number of a grid that is not below ``number``; the grid has steps of at most ``share``."""
    # Powers of two, so that coarser grids have no numbers that finer ones lack.
    step = 1 << max(0, int(math.log2(number * share))) if number * share >= 1 else 1
    return -(-number // step) * step


def fitting(traffic: Traffic) -> Traffic:
    """Return traffic that a file can have: 16,000 values. What was rounded is in its notes.

    Only batches with prompts, and decodes whose requests differ, are rounded: the rarest, tokens by at most 2 %
    unless that is not enough, and never above the largest batch. Counts stay exact.
    """
    # A batch has at least one node, so that those of many batches need not be counted.
    if len(traffic.batches) < MAX_NODES and num_nodes(codec.to_data(traffic)) <= MAX_NODES:
        return traffic
    by_count = sorted(traffic.batches, key=lambda batch: -batch.count)
    exact = [batch for batch in by_count if batch.query_len is not None or batch.num_tokens is None]
    uneven = [batch for batch in by_count if batch.query_len is None and batch.num_tokens is not None]
    # A batch has about three nodes, and half of the file is for rounded ones.
    frequent = max(0, (MAX_NODES // 2 - 3 * len(exact)) // 3)
    kept, rare = exact + uneven[:frequent], uneven[frequent:]
    for tokens, reqs in GRIDS:
        merged, moved = _merged(rare, tokens, reqs)
        if len(kept) + len(merged) > MAX_NODES // 2:  # each has at least its count and one number
            continue
        note = (
            f"{counted(len(rare), 'rare shape')} of {len(traffic.batches)} became {len(merged)}: tokens rounded up by "
            f"{moved:.2%} on average and at most {tokens:.0%}, requests by at most {reqs:.0%}; counts are exact"
        )
        result = replace(traffic, batches=(*kept, *batches_of_shapes(merged)), notes=(*traffic.notes, note))
        if num_nodes(codec.to_data(result)) <= MAX_NODES:
            return result
    raise AssertionError("the coarsest grid has a few hundred shapes")


def batches_of_shapes(shapes: Mapping[Shape, int]) -> tuple[TrafficCount, ...]:
    """Return shapes, as ``TrafficCount.shape`` has them, with their counts."""
    return tuple(
        TrafficCount(
            role=role,
            past_prompt=past_prompt,
            query_len=query_len,
            active_loras=loras,
            num_reqs=reqs,
            num_tokens=tokens,
            count=count,
        )
        for (role, past_prompt, query_len, loras, reqs, tokens), count in shapes.items()
    )


def summed(batches: Iterable[TrafficCount]) -> tuple[TrafficCount, ...]:
    """Return the batches with each shape once."""
    counts: Counter[Shape] = Counter()
    for batch in batches:
        counts[batch.shape] += batch.count
    return batches_of_shapes(counts)


def _merged(rare: list[TrafficCount], tokens: float, reqs: float) -> tuple[Counter[Shape], float]:
    """Return the shapes on a grid, none above the largest, and by which share their tokens grew."""
    most_reqs, most_tokens = (
        max(each or 0 for each in column) for column in zip(*((b.num_reqs, b.num_tokens) for b in rare), strict=True)
    )
    rounded: Counter[Shape] = Counter()
    before = after = 0
    for batch in rare:
        *kind, num_reqs, num_tokens = batch.shape
        assert num_tokens is not None
        grown = min(rounded_up(num_tokens, tokens), most_tokens)
        before, after = before + num_tokens * batch.count, after + grown * batch.count
        # A batch has no more requests than tokens.
        room = num_reqs and min(rounded_up(num_reqs, reqs), most_reqs, grown)
        rounded[(*kind, room, grown)] += batch.count  # type: ignore[index]
    return rounded, after / before - 1
