"""Which ladder each pass of a traffic needs, and what its counts weigh and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.bounds import family_of
from capture_planner.planning.costs import Costs, Curve
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.program import LadderProblem
from capture_planner.planning.sizing.smoothing import smoothed
from capture_planner.planning.steps import Steps, passes_of
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import Deployment

NANO = 1_000_000
"""Nanoseconds of a millisecond."""

TAIL = 1 << 20
"""How much more a percentile weighs than the mean, which decides between ladders of the same percentile."""


class Demand:
    """The passes of a traffic by ladder."""

    def __init__(self, steps: Steps, deployment: Deployment, ladders: Sequence[Ladder]) -> None:
        self.steps = steps.total
        self._observed: dict[Ladder, Counter[int]] = {ladder: Counter() for ladder in ladders}
        by_role = {role: [ladder for ladder in ladders if ladder.role is role] for role in Role}
        for batch, count in steps.counts.items():
            for each, repeats in passes_of(batch, deployment):
                ladder = _serving(each, repeats, by_role[each.role])
                if ladder is not None:
                    passes = count * (repeats if ladder.draft_steps is None else 1)
                    self._observed[ladder][each.extent(ladder.kind)] += passes

    def passes(self, ladder: Ladder) -> int:
        """Return how many passes of the traffic a ladder serves."""
        return self._observed[ladder].total()

    def observed(self, ladder: Ladder) -> Mapping[int, int]:
        """Return the passes of a ladder by count: requests of decodes, tokens of mixed batches."""
        return self._observed[ladder]

    def weights(self, ladder: Ladder, percent: float | None = None) -> list[int]:
        """Return the weight of each count of a ladder, from 0 to the largest.

        :param percent: a percentile to weigh almost alone; None: the mean.
        """
        weights = smoothed(self._observed[ladder], _last(ladder), self.steps)
        if percent is not None:
            total = sum(weights)
            tail, left = 0, total * percent / 100
            for count, weight in enumerate(weights):
                left -= weight
                tail = count
                if left <= 0:
                    break
            weights[tail] += total * TAIL
        return weights


def _serving(batch: Batch, repeats: int, ladders: Sequence[Ladder]) -> Ladder | None:
    """Return the ladder whose graphs serve a batch, whatever its sizes will be; None: none does."""
    query_len = batch.uniform_query_len
    decodes = [
        ladder
        for ladder in ladders
        if ladder.kind is Kind.DECODE
        and ladder.query_len == query_len
        and ladder.draft_steps in (None, repeats)
        and batch.num_reqs <= _last(ladder)
    ]
    if decodes:  # of chains of several lengths, the one that the schedule has for these requests
        return min(decodes, key=lambda ladder: batch.num_reqs not in ladder.domain)
    for ladder in ladders:
        fits = ladder.mode is GraphMode.PIECEWISE or batch.num_reqs <= ladder.max_num_reqs
        if ladder.kind is Kind.MIXED and batch.num_tokens <= _last(ladder) and fits:
            return ladder
    return None


def _last(ladder: Ladder) -> int:
    return ladder.domain.intervals[-1][1]


def problem_of(ladders: Sequence[Ladder], weights: Sequence[int], costs: Costs) -> LadderProblem:
    """Return what the sizes of ladders cost that have one choice of sizes; all have the domain of the first.

    :param weights: of each count from 0 up.
    """
    domain, unit = ladders[0].domain, ladders[0].query_len or 1
    largest: dict[int, int] = {}
    """The largest count that needs each size."""
    for first, last in domain.intervals:
        largest |= {domain.round_up(count): count for count in range(first, last + 1)}
    sizes, reals = list(largest), list(largest.values())
    # Counts that the schedule never gives may occur in a traffic of another schedule: the next size serves them.
    upto = [0, *accumulate(weights[1:])]
    sums = [upto[real] - upto[before] for before, real in zip((0, *reals), reals, strict=False)]
    graphs = [costs.graph(family_of(ladder)) for ladder in ladders]
    eager = [_above(ladder, costs) for ladder in ladders]
    ceiling = sizes[-1]
    return LadderProblem.of(
        sizes,
        [sum(round(curve(size * unit) * NANO) for curve in graphs) for size in sizes],
        sums,
        [sum(round(curve(count * unit) * NANO) for curve in eager) for count in reals],
        ceiling if ladders[0].kind is Kind.DECODE else min(max((1, *ladders[0].anchors)), ceiling),
    )


def _above(ladder: Ladder, costs: Costs) -> Curve:
    """Return what passes take that no size of a ladder serves.

    The ceiling of decodes is always a size, so their eager times decide nothing, and engines that never run them
    eager have none: vLLM's draft decodes (``profile --from OBSERVATION``).
    """
    family = (ladder.role, GraphMode.NONE, ladder.query_len, ladder.draft_steps)
    known = costs.known(family) if ladder.kind is Kind.DECODE else costs.eager(ladder.role, ladder.query_len)
    return known or costs.graph(family_of(ladder))
