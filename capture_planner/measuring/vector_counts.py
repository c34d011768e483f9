"""Counts steps by what data-parallel ranks brought to them, in bounded memory."""

from __future__ import annotations

from collections import Counter

from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.observation import MAX_VECTORS, ObservedVector

MAX_KNOWN = 1 << 11
"""Most vectors that are counted apart; beyond it, steps of the rarer half are only counted."""

RankShare = tuple[int, int, int | None, bool, GraphMode]
"""Of one rank: requests, tokens, query length, whether past the prompt, and the graph that it would run by itself."""

Shared = tuple[Role, tuple[RankShare, ...], int | None, Reason | None]
"""The role, the share of each rank, and the observed rank's graph or its reason for none."""


class VectorCounts:
    """Steps by vector; not for several threads at once."""

    def __init__(self) -> None:
        self._steps: Counter[Shared] = Counter()
        self._forgotten: Counter[Role] = Counter()

    def add(self, shared: Shared, steps: int = 1) -> None:
        """Count so many steps of one vector."""
        self._steps[shared] += steps
        if len(self._steps) > MAX_KNOWN:
            kept = _chosen(self._steps, MAX_KNOWN // 2)
            for each, count in (self._steps - kept).items():
                self._forgotten[each[0]] += count
            self._steps = kept

    def vectors(self, role: Role, most: int = MAX_VECTORS) -> tuple[tuple[ObservedVector, ...], int]:
        """Return at most so many vectors of a role, and how many steps had others."""
        own = Counter({each: count for each, count in self._steps.items() if each[0] is role})
        chosen = _chosen(own, most)
        fields = ("num_reqs", "num_tokens", "query_len", "past_prompt", "modes")
        listed = tuple(
            ObservedVector(**dict(zip(fields, zip(*ranks, strict=True), strict=True)), steps=n, graph=graph, reason=why)
            for (_, ranks, graph, why), n in chosen.items()
        )
        return listed, self._forgotten[role] + own.total() - chosen.total()


def _chosen(steps: Counter[Shared], most: int) -> Counter[Shared]:
    """Return the most frequent vectors, half of them eager if there are so many: those are the ones to explain."""
    by_count = steps.most_common()
    eager = dict([(each, count) for each, count in by_count if each[2] is None][: most // 2])
    others = [(each, count) for each, count in by_count if each not in eager]
    return Counter(eager | dict(others[: most - len(eager)]))
