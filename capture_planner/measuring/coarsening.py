"""Counts steps by batch shape, and rounds rare shapes up until there are few enough for a bounded list."""

from __future__ import annotations

import math
from bisect import bisect_left
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


@attrs.frozen
class ShapeTally:
    """Steps of one shape, and mean and spread of the intervals until the next steps, without the intervals."""

    steps: int = 0
    rounded: int = 0
    """Steps that were of smaller shapes, and were rounded up."""
    timed: int = 0
    """Number of intervals."""
    mean: float = 0.0
    """Mean interval in milliseconds."""
    squares: float = 0.0
    """Sum of the squared distances from the mean."""

    def __add__(self, other: ShapeTally) -> ShapeTally:
        steps, rounded, timed = self.steps + other.steps, self.rounded + other.rounded, self.timed + other.timed
        # A tally without intervals has a mean of 0, which must not count.
        if not self.timed or not other.timed:
            one = self if self.timed else other
            return ShapeTally(steps, rounded, timed, one.mean, one.squares)
        apart = other.mean - self.mean
        # The pairwise formula of Chan et al.: no interval has to be kept.
        squares = self.squares + other.squares + apart * apart * self.timed * other.timed / timed
        return ShapeTally(steps, rounded, timed, self.mean + apart * other.timed / timed, squares)

    @property
    def error(self) -> float | None:
        """Standard error of the mean interval; None of fewer than two."""
        return math.sqrt(self.squares / (self.timed - 1) / self.timed) if self.timed > 1 else None


Tallies = dict[Outcome, ShapeTally]


def coarsened(tallies: Mapping[Outcome, ShapeTally], most: int, room: Room) -> tuple[Tallies, Tallies]:
    """Return tallies of at most ``most`` shapes, and those for which there was no room.

    The most frequent half stays as it is, and so do decodes. The others are rounded up as little as it takes,
    within the graph that served them: then the larger shape has the same graph. There is no room where decodes, or
    roles, graphs and reasons, are too many.
    """
    by_steps = sorted(tallies, key=lambda outcome: -tallies[outcome].steps)
    # The other half is left for what the rare shapes become.
    kept = dict.fromkeys(by_steps if len(by_steps) <= most else by_steps[: most // 2])

    def merged(grid: tuple[float, float]) -> Tallies:
        found = {outcome: tallies[outcome] for outcome in kept}
        for outcome in by_steps[len(kept) :]:
            place, tally = _rounded(outcome, *grid, room), tallies[outcome]
            # A shape that is on the grid already was not rounded.
            if place[1:3] != outcome[1:3]:
                tally = attrs.evolve(tally, rounded=tally.steps)
            found[place] = found[place] + tally if place in found else tally
        return found

    # A coarser grid never makes more shapes, so the finest that is enough is found by halving.
    finest = bisect_left(GRIDS, True, key=lambda grid: len(merged(grid)) <= most)
    found = merged(GRIDS[min(finest, len(GRIDS) - 1)])
    rest = sorted(found.keys() - kept.keys(), key=lambda outcome: -found[outcome].steps)
    return found, {outcome: found.pop(outcome) for outcome in rest[most - len(kept) :]}


def _rounded(outcome: Outcome, tokens: float, reqs: float, room: Room) -> Outcome:
    role, num_reqs, num_tokens, query_len, past_prompt, loras, graph, reason = outcome
    # Rounded, a uniform decode would have other tokens than its requests times its query length.
    if past_prompt and query_len is not None:
        return outcome
    # An engine may count in NumPy's integers.
    before_reqs, before_tokens = index(num_reqs), index(num_tokens)
    most_reqs, most_tokens = room(outcome)
    # Never beyond the graph, and never below what ran, should the graph be smaller.
    grown = max(min(rounded_up(before_tokens, tokens), most_tokens), before_tokens) if before_tokens else 0
    more = max(min(rounded_up(before_reqs, reqs), most_reqs, grown), before_reqs) if before_reqs else 0
    return role, more, grown, None, past_prompt, loras, graph, reason
