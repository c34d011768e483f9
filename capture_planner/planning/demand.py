"""Which ladder each pass of a traffic needs, and what its counts weigh and cost.

Counts are smoothed by kind of pass, whatever sizes will be. So each table has the same batches, with the same weights.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.bounds import family_of
from capture_planner.planning.costs import Costs, Curve
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.program import TAIL, LadderProblem, Value
from capture_planner.planning.sizing.smoothing import smoothed
from capture_planner.planning.steps import Steps, passes_of
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import Deployment

NANO = 1_000_000
"""Nanoseconds of a millisecond."""

UNKNOWN: Value = TAIL << 104
"""What a kind of batch costs that would run eager, and of which the profile has no eager times."""


@attrs.frozen(kw_only=True)
class Team:
    """Ladders with one choice of sizes, and the passes that they serve: the target's with the draft prefill's."""

    ladders: tuple[Ladder, ...]
    weights: tuple[int, ...]
    """Of each count from 0 up. The target's batches decide for a draft prefill that shares its sizes."""
    passes: int
    """How many passes of the traffic it serves."""

    @property
    def kind(self) -> Kind:
        return self.ladders[0].kind

    @property
    def unit(self) -> int:
        """Tokens of a count."""
        return self.ladders[0].query_len or 1

    @property
    def chain(self) -> int:
        """How many draft decodes a graph runs."""
        return self.ladders[0].draft_steps or 1

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(ladder.role for ladder in self.ladders)


class Demand:
    """The passes of a traffic by ladder."""

    def __init__(self, steps: Steps, deployment: Deployment, ladders: Sequence[Ladder]) -> None:
        self.steps = steps.total
        self.unserved: list[tuple[Batch, int, int]] = []
        """Passes that no ladder serves: the batch, how often it runs in a step, and in how many steps."""
        self._deployment = deployment
        self._by_role = {role: [ladder for ladder in ladders if ladder.role is role] for role in Role}
        self._observed: dict[Ladder, Counter[int]] = {ladder: Counter() for ladder in ladders}
        self._tail: dict[Ladder, Counter[int]] = {}
        for batch, count in steps.counts.items():
            for each, repeats, ladder in self._served(batch):
                if ladder is None:
                    self.unserved.append((each, repeats, count))
                else:
                    passes = count * (repeats if ladder.draft_steps is None else 1)
                    self._observed[ladder][each.extent(ladder.kind)] += passes

    def add_tail(self, batch: Batch) -> None:
        """Let the passes of a batch weigh more than all others together."""
        for each, repeats, ladder in self._served(batch):
            if ladder is not None:
                passes = repeats if ladder.draft_steps is None else 1
                self._tail.setdefault(ladder, Counter())[each.extent(ladder.kind)] += passes * TAIL

    def passes(self, ladder: Ladder) -> int:
        """Return how many passes of the traffic a ladder serves."""
        return self._observed[ladder].total()

    def team(self, ladders: tuple[Ladder, ...]) -> Team:
        """Return ladders with one choice of sizes, and the weight of each count."""
        weights = smoothed(self._observed[ladders[0]], _last(ladders[0]), self.steps)
        for count, weight in self._tail.get(ladders[0], {}).items():
            weights[count] += weight
        return Team(ladders=ladders, weights=tuple(weights), passes=self.passes(ladders[0]))

    def _served(self, batch: Batch) -> Iterator[tuple[Batch, int, Ladder | None]]:
        for each, repeats in passes_of(batch, self._deployment):
            yield each, repeats, _serving(each, repeats, self._by_role[each.role])


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


def serves(team: Team, decodes: Team) -> bool:
    """Say whether the graphs of a team serve decodes that have none of their own: mixed, or single steps of a chain."""
    single = decodes.chain > 1 and team.kind is Kind.DECODE and team.chain == 1
    return decodes.kind is Kind.DECODE and (single or team.kind is Kind.MIXED) and team.roles <= decodes.roles


def problem_of(team: Team, costs: Costs, decodes: Iterable[Team] = ()) -> LadderProblem:
    """Return what the sizes of a team cost.

    :param decodes: teams that have no graphs, and whose passes those of ``team`` serve if large enough.
    """
    first = team.ladders[0]
    domain, unit = first.domain, team.unit
    largest: dict[int, int] = {}
    """The largest count that needs each size."""
    for start, last in domain.intervals:
        largest |= {domain.round_up(count): count for count in range(start, last + 1)}
    sizes = list(largest)
    sums, above = [0] * len(sizes), [0] * len(sizes)
    for each in (team, *decodes):
        curves = [eager_of(ladder, costs) for ladder in each.ladders if ladder.role in team.roles]
        for count, weight in enumerate(each.weights):
            # Counts that the schedule never gives may occur in a traffic of another schedule: a larger size serves.
            index = bisect_left(sizes, count * each.unit // unit)
            if weight and index < len(sizes):
                sums[index] += weight * (1 if each is team else each.chain)
                above[index] += weight * _total(curves, count * each.unit)
    graphs = [costs.graph(family_of(ladder)) for ladder in team.ladders]
    eager = [eager_of(ladder, costs) for ladder in team.ladders]
    ceiling = sizes[-1]
    return LadderProblem.of(
        sizes,
        [sum(round(curve(size * unit) * NANO) for curve in graphs) for size in sizes],
        sums,
        [_total(eager, count * unit) for count in largest.values()],
        ceiling if team.kind is Kind.DECODE else min(max((1, *first.anchors)), ceiling),
        above,
    )


def waived(team: Team, others: Sequence[Team], costs: Costs, *, least: bool = False) -> Value:
    """Return what the passes of a team cost eager that has no graphs, without those that other teams may serve.

    :param others: teams whose sizes are priced for its passes.
    :param least: whether to add what the others cost at least, rather than to leave them out.
    """
    total = 0
    for ladder in team.ladders:
        own = next((each for each in others if ladder.role in each.roles), None)
        eager = eager_of(ladder, costs)
        if eager is None:
            return UNKNOWN
        last = 0 if own is None else own.ladders[0].domain.ceiling
        for count, weight in enumerate(team.weights):
            tokens = count * team.unit
            if weight and tokens > last:
                total += weight * _total([eager], tokens)
            elif weight and least and own is not None:
                graph = next(each for each in own.ladders if each.role is ladder.role)
                replay = round(costs.graph(family_of(graph))(graph.domain.round_up(tokens)) * NANO) * team.chain
                total += weight * min(replay, _total([eager], tokens))
    return total


def eager_of(ladder: Ladder, costs: Costs) -> Curve | None:
    """Return what passes take that no graph of a ladder serves; None: the profile has no such times of decodes.

    Engines that never run decodes eager have none: vLLM's draft decodes (``profile --from OBSERVATION``).
    """
    if ladder.kind is Kind.MIXED:
        return costs.eager(ladder.role, ladder.query_len)
    return costs.known((ladder.role, GraphMode.NONE, ladder.query_len, ladder.draft_steps))


def _total(curves: Iterable[Curve | None], tokens: int) -> int:
    """Return the nanoseconds of a pass of each curve; an unknown one decides nothing where it counts."""
    return sum(round(curve(tokens) * NANO) for curve in curves if curve is not None)
