"""Intervals: the times by which steps put off the next, with stalls told from the usual ones of their kind."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator

from capture_planner.measuring.coarsening import Outcome
from capture_planner.modes import Role

STALL = 10
"""A step is a stall where it takes so many times the median of its kind, by tokens where it has more than those."""

SETTLED = 32
"""Steps of a kind before which none is judged: the first ones may be those that compile kernels."""

MEMORY = 255
"""Latest steps of a kind that the median is of."""

Kind = tuple[Role, bool, bool]
"""Role, whether eager, and whether a decode."""

Judged = Iterator[tuple[Outcome, float, bool]]
"""Steps with their milliseconds, and whether each is a stall."""


class Intervals:
    """Holds the intervals of steps until there are enough of their kind; not by several threads at once."""

    def __init__(self) -> None:
        self._waiting: dict[Kind, list[tuple[Outcome, float]]] = {}
        self._latest: dict[Kind, deque[tuple[float, int]]] = {}

    def add(self, outcome: Outcome, milliseconds: float) -> None:
        """Add one step."""
        role, _, tokens, query_len, past_prompt, _, graph, _ = outcome
        kind = (role, graph is None, past_prompt and query_len is not None)
        self._waiting.setdefault(kind, []).append((outcome, milliseconds))
        self._latest.setdefault(kind, deque(maxlen=MEMORY)).append((milliseconds, tokens))

    def taken(self, least: int = SETTLED) -> Judged:
        """Take the steps of kinds of which ``least`` were added so far."""
        for kind in [kind for kind in self._waiting if len(self._latest[kind]) >= least]:
            yield from self._judged(kind, self._waiting.pop(kind))

    def waiting(self) -> Judged:
        """Yield the steps that were not taken, judged by what was added so far."""
        for kind, steps in self._waiting.items():
            yield from self._judged(kind, steps)

    def _judged(self, kind: Kind, steps: list[tuple[Outcome, float]]) -> Judged:
        usual, tokens = (statistics.median(column) for column in zip(*self._latest[kind], strict=True))
        for outcome, milliseconds in steps:
            yield outcome, milliseconds, milliseconds > STALL * usual * max(1.0, outcome[2] / max(tokens, 1))
