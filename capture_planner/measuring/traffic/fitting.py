"""Fits traffic into a file: where it has too many shapes, the rarest that are near each other become one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import attrs

from capture_planner import codec
from capture_planner.codec.documents import MAX_NODES, num_nodes
from capture_planner.records._base import replace
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic, TrafficCount

GRIDS = ((0.01, 0.01), (0.02, 0.02), (0.02, 0.05), (0.02, 0.1), (0.02, 0.25), (0.02, 1.0), (0.1, 1.0), (1.0, 1.0))
"""How far tokens and requests of rare shapes are rounded up, as shares of each: the first that fits is taken."""


def rounded_up(number: int, share: float) -> int:
    """Return the least number of a grid that is not below ``number``; the grid has steps of at most ``share``."""
    step = 1 << max(0, int(math.log2(number * share))) if number * share >= 1 else 1
    return -(-number // step) * step


def fitting(traffic: Traffic) -> Traffic:
    """Return traffic that a file can have: 16,000 values. What was rounded is in its notes.

    Only batches with prompts, and decodes whose requests differ, are rounded: the rarest, tokens by at most 2 %
    unless that is not enough, and never above the largest batch. Counts stay exact.
    """
    if num_nodes(codec.to_data(traffic)) <= MAX_NODES:
        return traffic
    by_count = sorted(traffic.batches, key=lambda batch: -batch.count)
    exact = [batch for batch in by_count if batch.query_len is not None or batch.num_tokens is None]
    uneven = [batch for batch in by_count if batch.query_len is None and batch.num_tokens is not None]
    frequent = max(0, (MAX_NODES // 2 - 3 * len(exact)) // 3)
    kept, rare = exact + uneven[:frequent], uneven[frequent:]
    for tokens, reqs in GRIDS:
        merged, moved = _merged(rare, tokens, reqs)
        note = (
            f"{counted(len(rare), 'rare shape')} of {len(traffic.batches)} became {len(merged)}: tokens rounded up by "
            f"{moved:.2%} on average and at most {tokens:.0%}, requests by at most {reqs:.0%}; counts are exact"
        )
        result = replace(traffic, batches=summed([*kept, *merged]), notes=(*traffic.notes, note))
        if num_nodes(codec.to_data(result)) <= MAX_NODES:
            break
    return result


def summed(batches: Iterable[TrafficCount]) -> tuple[TrafficCount, ...]:
    """Return the batches with each shape once."""
    counts: Counter[TrafficCount] = Counter()
    for batch in batches:
        counts[attrs.evolve(batch, count=1)] += batch.count
    return tuple(attrs.evolve(batch, count=count) for batch, count in counts.items())


def _merged(rare: list[TrafficCount], tokens: float, reqs: float) -> tuple[tuple[TrafficCount, ...], float]:
    """Return the shapes on a grid, and by which share their tokens grew."""
    top_tokens = max(batch.num_tokens or 0 for batch in rare)
    top_reqs = max(batch.num_reqs or 0 for batch in rare)
    rounded = []
    before = after = 0
    for batch in rare:
        assert batch.num_tokens is not None
        num_tokens = min(rounded_up(batch.num_tokens, tokens), top_tokens)
        num_reqs = batch.num_reqs and min(rounded_up(batch.num_reqs, reqs), top_reqs, num_tokens)
        before, after = before + batch.num_tokens * batch.count, after + num_tokens * batch.count
        rounded.append(attrs.evolve(batch, num_reqs=num_reqs, num_tokens=num_tokens))
    return summed(rounded), after / before - 1
