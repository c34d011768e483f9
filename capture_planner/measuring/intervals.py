"""Intervals: the mean time by which steps of each shape put off the next, stalls apart."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping

import attrs

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


@attrs.frozen
class Spread:
    """Mean and spread of numbers, without the numbers."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def and_(self, other: Spread) -> Spread:
        """Return those of both together."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart * apart * self.count * other.count / count
        return Spread(count, self.mean + apart * other.count / count, squares)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None of fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else None


class Intervals:
    """Collects the intervals of steps by what a recorder counts; not by several threads at once."""

    def __init__(self) -> None:
        self._known: dict[Outcome, Spread] = {}
        self._stalls: Counter[Role] = Counter()
        self._waiting: dict[Kind, list[tuple[Outcome, float]]] = {}
        self._latest: dict[Kind, deque[tuple[float, int]]] = {}

    def add(self, timed: Iterable[tuple[Outcome, float]]) -> None:
        """Add steps with their milliseconds."""
        for outcome, milliseconds in timed:
            role, _, tokens, query_len, past_prompt, _, graph, _ = outcome
            kind = (role, graph is None, past_prompt and query_len is not None)
            self._waiting.setdefault(kind, []).append((outcome, milliseconds))
            self._latest.setdefault(kind, deque(maxlen=MEMORY)).append((milliseconds, tokens))
        for kind in [kind for kind in self._waiting if len(self._latest[kind]) >= SETTLED]:
            self._count(kind, self._waiting.pop(kind), self._known, self._stalls)

    def _count(
        self, kind: Kind, steps: list[tuple[Outcome, float]], known: dict[Outcome, Spread], stalls: Counter[Role]
    ) -> None:
        usual, tokens = (statistics.median(column) for column in zip(*self._latest[kind], strict=True))
        for outcome, milliseconds in steps:
            if milliseconds > STALL * usual * max(1.0, outcome[2] / max(tokens, 1)):
                stalls[outcome[0]] += 1
            else:
                known[outcome] = known.get(outcome, Spread()).and_(Spread(1, milliseconds))

    def read(self) -> tuple[dict[Outcome, Spread], Counter[Role]]:
        """Return the intervals by outcome, and the stalls by role."""
        known, stalls = dict(self._known), self._stalls.copy()
        for kind, steps in self._waiting.items():
            self._count(kind, steps, known, stalls)
        return known, stalls

    def round(self, larger: Mapping[Outcome, Outcome], kept: Iterable[Outcome]) -> None:
        """Count those of rare shapes as of larger ones, and forget those that are not ``kept``."""
        known, self._stalls = self.read()
        self._waiting.clear()
        self._known = rounded(known, larger)
        for outcome in self._known.keys() - set(kept):
            del self._known[outcome]

    def clear(self) -> None:
        """Forget all."""
        for counts in (self._known, self._stalls, self._waiting, self._latest):
            counts.clear()


def rounded(known: Mapping[Outcome, Spread], larger: Mapping[Outcome, Outcome]) -> dict[Outcome, Spread]:
    """Return intervals with those of rare shapes as of larger ones."""
    found: dict[Outcome, Spread] = {}
    for outcome, spread in known.items():
        place = larger.get(outcome, outcome)
        found[place] = found.get(place, Spread()).and_(spread)
    return found
