"""Rounds rare batch shapes up until there are few enough: so a bounded list has the steps of all shapes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from operator import index

import attrs

from capture_planner.measuring.traffic.fitting import rounded_up
from capture_planner.modes import Reason, Role

Outcome = tuple[Role, int, int, int | None, bool, int, int | None, Reason | None]
"""Role, requests, tokens, query length, whether past the prompt, adapters: as in ``Batch``. Then the index of its graph
into those of the role, or None; and the reason for none, or None."""

GRIDS = (
    *((0.01, 0.01), (0.02, 0.05), (0.02, 0.25), (0.02, 1.0), (0.05, 1.0), (0.05, 3.0)),
    *((0.1, 3.0), (0.15, 3.0), (0.25, 3.0), (0.5, 3.0), (1.0, 3.0)),
)
"""How far tokens and requests of rare shapes are rounded up, as shares of each: the first that is enough is taken."""

Room = Callable[[Outcome], tuple[int, int]]
"""The most requests and tokens that a shape may be rounded up to: those of its graph, or the limits."""


@attrs.frozen(kw_only=True)
class CoarseSteps:
    """Steps by shape, some of which stand for rarer ones."""

    steps: Counter[Outcome]
    rounded: Counter[Outcome]
    """Steps of shapes that were rounded up; part of ``steps``."""
    lost: Counter[Outcome]
    """Steps of shapes for which there was no room, because they are decodes or of many roles, graphs and reasons."""
    larger: Mapping[Outcome, Outcome]
    """The shape that each shape was rounded up to, where that is another."""


def coarsened(steps: Mapping[Outcome, int], most: int, room: Room) -> CoarseSteps:
    """Return steps of at most ``most`` shapes.

    The most frequent half stays as it is, and so do decodes. The others are rounded up as little as it takes,
    within the graph that served them: then the larger shape has the same graph.
    """
    if len(steps) <= most:
        return CoarseSteps(steps=Counter(steps), rounded=Counter(), lost=Counter(), larger={})
    by_count = Counter(steps).most_common()
    kept, rare = Counter(dict(by_count[: most // 2])), by_count[most // 2 :]
    exact = Counter({outcome: count for outcome, count in rare if _is_decode(outcome)})
    uneven = {outcome: count for outcome, count in rare if not _is_decode(outcome)}
    merged: Counter[Outcome] = Counter()
    rounded: Counter[Outcome] = Counter()
    larger: dict[Outcome, Outcome] = {}

    def fits(grid: tuple[float, float]) -> bool:
        for found in (merged, rounded, larger):
            found.clear()
        for outcome, count in uneven.items():
            place = _rounded(outcome, *grid, room)
            merged[place] += count
            rounded[place] += count * (place[1:3] != outcome[1:3])
            if place != outcome:
                larger[outcome] = place
        return len(kept) + len(exact) + len(merged.keys() - kept.keys()) <= most

    finest = bisect_left(GRIDS, True, key=fits)
    fits(GRIDS[min(finest, len(GRIDS) - 1)])
    own = [(outcome, count) for outcome, count in (exact + merged).most_common() if outcome not in kept]
    lost = Counter(dict(own[most - len(kept) :]))
    return CoarseSteps(steps=kept + exact + merged - lost, rounded=rounded - lost, lost=lost, larger=larger)


def _is_decode(outcome: Outcome) -> bool:
    _, _, _, query_len, past_prompt, *_ = outcome
    return past_prompt and query_len is not None


def _rounded(outcome: Outcome, tokens: float, reqs: float, room: Room) -> Outcome:
    role, num_reqs, num_tokens, _, past_prompt, loras, graph, reason = outcome
    # An engine may count in NumPy's integers.
    before_reqs, before_tokens = index(num_reqs), index(num_tokens)
    most_reqs, most_tokens = room(outcome)
    grown = max(min(rounded_up(before_tokens, tokens), most_tokens), before_tokens) if before_tokens else 0
    more = max(min(rounded_up(before_reqs, reqs), most_reqs, grown), before_reqs) if before_reqs else 0
    return role, more, grown, None, past_prompt, loras, graph, reason
