"""Teams: ladders with one choice of sizes, what their counts weigh in a traffic, and what sizes cost, or none.

The target's batches are the draft prefill's too, and engines run it on the target's padded shape (vLLM 0.33,
``v1/worker/gpu/spec_decode``). So ladders of the two with the same counts are one team.

Counts are smoothed by kind of pass, whatever the sizes will be, so each table is judged by the same weights. Raw
histograms overfit: sizes that are best at one load waste up to several times the time at another. So part of the weight
goes to a kernel over half to one and a half times each count, and three quarters of that part to all doublings of the
count alike. The part falls with the number of steps, and never to nothing: loads change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from math import log

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs, Curve
from capture_planner.planning.measured.steps import Steps, passes_of, weights_of
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.program import TAIL, LadderProblem, Value
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import Deployment, Domain

NANO = 1_000_000
"""Nanoseconds of a millisecond."""

FINE = 64
"""Tokens up to which every size of mixed batches is tried; beyond it 32 sizes in each doubling, 3 % apart at most."""

UNKNOWN: Value = TAIL << 104
"""Cost of a kind of batch that would run eager, if the profile has no eager times of it."""

PRIOR_STEPS = 1000
"""Steps that weigh as much as the prior."""

LEAST_PRIOR = Fraction(3, 10)
"""The prior's part however many steps there are: loads change. By ``benchmarks/traces_held_out.py``."""

FLAT = Fraction(3, 4)
"""Part of the prior that has every doubling of the count alike; the rest is the kernel."""

RARE = 100
"""With fewer than one decode per so many mixed batches, decodes get part of their prior: the fewer, the more."""

SCALE = 1 << 40
"""The weight of a pass in every step."""


@attrs.frozen(kw_only=True)
class Team:
    """Ladders with one choice of sizes, and the passes that they serve."""

    ladders: tuple[Ladder, ...]
    weights: tuple[int, ...]
    """Weight of each count from 0 up. The target's batches decide for a draft prefill that shares its sizes."""
    passes: int
    """Passes of the traffic that it serves."""

    @property
    def kind(self) -> Kind:
        return self.ladders[0].kind

    @property
    def unit(self) -> int:
        """Tokens of a count."""
        return self.ladders[0].unit

    @property
    def chain(self) -> int:
        """Number of draft decodes in a graph."""
        return self.ladders[0].draft_steps or 1

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(ladder.role for ladder in self.ladders)


class Demand:
    """The passes of a traffic by ladder."""

    def __init__(self, steps: Steps, deployment: Deployment, ladders: Sequence[Ladder], objective: str) -> None:
        """Count passes; ``objective`` says what a step weighs."""
        self.weights = weights_of(steps.counts, objective)
        """Weight of the steps of each batch."""
        self.total = sum(self.weights.values())
        """Weight of all steps."""
        self.unserved: list[tuple[Batch, int, int]] = []
        """Passes that no ladder serves: the batch, how often it runs in a step, and what those steps weigh."""
        self._deployment = deployment
        self._by_role = {role: [ladder for ladder in ladders if ladder.role is role] for role in Role}
        self._observed: dict[Ladder, Counter[int]] = {ladder: Counter() for ladder in ladders}
        self.passes: Counter[Ladder] = Counter()
        """Passes of the traffic by the ladder that serves them."""
        self._tail: dict[Ladder, Counter[int]] = {ladder: Counter() for ladder in ladders}
        for batch, count in steps.counts.items():
            weight = self.weights[batch]
            for each, passes, ladder in self._served(batch):
                if ladder is None:
                    self.unserved.append((each, passes, weight))
                else:
                    self._observed[ladder][each.extent(ladder.kind)] += weight * passes
                    self.passes[ladder] += count * passes

    def add_tail(self, batch: Batch) -> None:
        """Let the passes of a batch weigh more than all others together."""
        for each, passes, ladder in self._served(batch):
            if ladder is not None:
                self._tail[ladder][each.extent(ladder.kind)] += passes * TAIL

    def team(self, ladders: tuple[Ladder, ...]) -> Team:
        """Return ladders with one choice of sizes, and the weight of each count."""
        # All ladders of a team have the same counts; of a target's and a draft prefill's, the first is the target's.
        first = ladders[0]
        weights = smoothed(self._observed[first], first.last, self.total, self.passes[first], given=self._given(first))
        for count, weight in self._tail[first].items():
            weights[count] += weight
        return Team(ladders=ladders, weights=tuple(weights), passes=self.passes[first])

    def _given(self, ladder: Ladder) -> float:
        """Return what to add to the flat part of the prior: decodes get that of mixed batches if next to none ran."""
        decodes, mixed = ([each for each in self._by_role[ladder.role] if each.kind is kind] for kind in Kind)
        decoded, others = (sum(self.passes[each] for each in some) for some in (decodes, mixed))
        # Loads change: one that falls has decodes of a few requests.
        if not decodes or RARE * decoded >= others:
            return 0.0
        part = FLAT * (1 - RARE * Fraction(decoded, others))
        flat = {each: part * prior_share(self.passes[each]) * self._observed[each].total() for each in mixed}
        return float(sum(flat.values()) / len(decodes) if ladder in decodes else -flat[ladder])

    def _served(self, batch: Batch) -> Iterator[tuple[Batch, int, Ladder | None]]:
        """Yield the passes of a step, each with how often it runs and the ladder that serves it."""
        for each, repeats in passes_of(batch, self._deployment):
            ladder = _serving(each, repeats, self._by_role[each.role])
            # One graph of a chain runs all of its passes.
            yield each, repeats if ladder is None or ladder.draft_steps is None else 1, ladder


def _serving(batch: Batch, repeats: int, ladders: Sequence[Ladder]) -> Ladder | None:
    """Return the ladder whose graphs serve a batch, whatever its sizes will be; None: none does."""
    query_len = batch.uniform_query_len
    decodes = [
        ladder
        for ladder in ladders
        if ladder.kind is Kind.DECODE
        and ladder.query_len == query_len
        and ladder.draft_steps in (None, repeats)
        and batch.num_reqs <= ladder.last
    ]
    if decodes:  # of chains of several lengths, the one that the schedule has for these requests
        return min(decodes, key=lambda ladder: batch.num_reqs not in ladder.domain)
    for ladder in ladders:
        # PIECEWISE graphs run attention outside, so they hold any number of requests.
        fits = ladder.mode is GraphMode.PIECEWISE or batch.num_reqs <= ladder.max_num_reqs
        if ladder.kind is Kind.MIXED and batch.num_tokens <= ladder.last and fits:
            return ladder
    return None


def prior_share(steps: int) -> Fraction:
    """Return the part of the weight that the prior has, with so many steps observed."""
    return max(LEAST_PRIOR, Fraction(PRIOR_STEPS, PRIOR_STEPS + steps))


def smoothed(
    observed: Mapping[int, int], last: int, steps: int, number: int | None = None, given: float = 0
) -> list[int]:
    """Return the weight of each count from 0 to ``last``; those of a pass that each step runs sum to about ``SCALE``.

    A ladder of which nothing was observed weighs like one step, or like ``given``. The prior has every doubling of the
    count alike, so a load that falls to a few requests finds sizes for them.

    :param observed: passes by count, each from 1 to ``last``; or as often as requests waited for them.
    :param steps: steps in all, of which these passes are a part; or as often as requests waited for them.
    :param number: how many passes there were, where ``observed`` has more of each.
    :param given: passes to add to the flat part of the prior; negative: to take from it.
    """
    passes = sum(observed.values())
    total = max(steps, 1)
    prior = [log((count + 1) / count) / log(last + 1) for count in range(1, last + 1)]
    if not passes:
        # At least 1: sizes are needed here all the same, as loads change.
        return [0, *(max(round(SCALE / total * max(given, 1.0) * part), 1) for part in prior)]
    share = prior_share(passes if number is None else number)
    flat, kernel = float(share * FLAT) * passes + given, float(share * (1 - FLAT))
    # Each count is spread over half to one and a half times itself: where that begins its part is added, where it ends
    # subtracted, and the running sum is what all counts give to each.
    changes = [0.0] * (last + 2)
    for count, weight in observed.items():
        low, high = -(-count // 2), min(count * 3 // 2, last)
        changes[low] += weight / (high - low + 1)
        changes[high + 1] -= weight / (high - low + 1)
    kernels = list(accumulate(changes))
    unit = SCALE / total
    pairs = zip((0.0, *prior), kernels, strict=False)
    # Floating-point sums may end just below 0.
    weights = [round(unit * (flat * part + kernel * max(spread, 0.0))) for part, spread in pairs]
    for count, weight in observed.items():
        weights[count] += round(unit * float(1 - share) * weight)
    # No batch has 0 requests or 0 tokens.
    weights[0] = 0
    return weights


def serves(team: Team, decodes: Team) -> bool:
    """Say whether the graphs of a team serve decodes that have none of their own: mixed, or single steps of a chain."""
    single = decodes.chain > 1 and team.kind is Kind.DECODE and team.chain == 1
    return decodes.kind is Kind.DECODE and (single or team.kind is Kind.MIXED) and team.roles <= decodes.roles


def on_grid(domain: Domain, count: int, fine: int) -> int:
    """Return the least size that holds ``count`` and is tried: each up to ``fine``, and fewer above it."""
    size = domain.round_up(count)
    # As many sizes in each doubling: thousands that differ by a token cost the same and take minutes to choose from.
    if size > fine:
        apart = 1 << max(size.bit_length() - 6, 0)
        size = min(domain.round_up(-(-size // apart) * apart), domain.ceiling)
    return size


def problem_of(
    team: Team, costs: Costs, decodes: Iterable[Team] = (), *, base: int = 0, every_top: bool = False
) -> LadderProblem:
    """Return what the sizes of a team cost.

    :param decodes: teams that have no graphs, and whose passes those of ``team`` serve if large enough.
    :param base: nanoseconds of a step besides, for ratios.
    :param every_top: whether sizes of equal times are kept, as the largest one takes of the memory.
    """
    first = team.ladders[0]
    domain, unit = first.domain, team.unit
    # The smallest and the largest count that need each size.
    least: dict[int, int] = {}
    largest: dict[int, int] = {}
    fine = FINE if team.kind is Kind.MIXED else domain.ceiling
    anchors = [anchor for anchor in first.anchors if domain.round_up(anchor) <= domain.ceiling]
    counts = (count for start, last in domain.intervals for count in range(start, last + 1))
    for size, count in ((on_grid(domain, count, fine), count) for count in (*counts, *anchors)):
        least.setdefault(size, count)
        largest[size] = max(largest.get(size, 0), count)
    sizes = sorted(largest)
    sums, above = [0] * len(sizes), [0] * len(sizes)
    for each in (team, *decodes):
        curves = [eager_of(ladder, costs) for ladder in each.ladders if ladder.role in team.roles]
        for count, weight in enumerate(each.weights):
            # Counts that the schedule never gives may occur in a traffic of another schedule: a larger size serves.
            index = bisect_left(sizes, count * each.unit // unit)
            if weight and index < len(sizes):
                sums[index] += weight * (1 if each is team else each.chain)
                above[index] += weight * _total(curves, count * each.unit)
    graphs = [costs.graph(ladder.family) for ladder in team.ladders]
    eager = [eager_of(ladder, costs) for ladder in team.ladders]
    ceiling, reach = sizes[-1], min(curve.reach for curve in graphs) // unit
    times = [_total(graphs, size * unit) for size in sizes]
    own = [_total(graphs, domain.round_up(least[size]) * unit) for size in sizes]
    alone = [
        max(Fraction(1), Fraction(_total(eager, least[size] * unit) + base, max(time + base, 1)))
        for size, time in zip(sizes, own, strict=True)
    ]
    for each in decodes:
        for count, (milliseconds, ratio) in _by_count(each, team.roles, costs, base).items():
            index = bisect_left(sizes, count * each.unit // unit)
            if index < len(sizes):
                # Of a chain that single steps serve, a step has its part of the time besides.
                own[index] = min(own[index], (milliseconds + base) // each.chain - base)
                alone[index] = max(alone[index], ratio)
    return LadderProblem.of(
        sizes,
        times,
        sums,
        [_total(eager, largest[size] * unit) for size in sizes],
        # Decodes are covered up to their largest count; mixed batches end where graphs gain nothing, not below anchors.
        ceiling if team.kind is Kind.DECODE else min(max((1, *first.anchors)), ceiling),
        above,
        own=own,
        alone=alone,
        base=base,
        # Beyond what was measured times are assumed, so no batch that fits a measured graph depends on them.
        known=max((size for size in sizes if size <= reach), default=None) if reach < ceiling else None,
        every_top=every_top,
    )


def ratio_alone(team: Team, others: Sequence[Team], costs: Costs, base: int, *, least: bool = False) -> Fraction:
    """Return the largest ratio of an eager pass of a team to one in a graph of its own size.

    :param others: teams that serve some of its passes: those count in their problems.
    :param least: whether to count those too, with the least ratio that they may have.
    """
    worst = Fraction(1)
    served = [each for each in others if team.roles & each.roles]
    # Passes of two roles that are not served alike have no ratio above that of either.
    parts = [team.roles] if not served or served[0].roles >= team.roles else [frozenset({r}) for r in team.roles]
    for roles in parts:
        serving = next((each for each in served if roles <= each.roles), None)
        last = 0 if serving is None else serving.ladders[0].domain.ceiling
        for count, (own, ratio) in _by_count(team, roles, costs, base).items():
            tokens = count * team.unit
            if serving is None or tokens > last * serving.unit:
                worst = max(worst, ratio)
            elif least:
                graphs = [each for each in serving.ladders if each.role in roles]
                size = graphs[0].domain.round_up(tokens // serving.unit)
                time = _total([costs.graph(each.family) for each in graphs], size * serving.unit)
                chain = team.chain if serving.kind is Kind.DECODE else 1
                worst = max(worst, min(ratio, Fraction(time * chain + base, max(own + base, 1))))
    return worst


def _by_count(team: Team, roles: frozenset[Role], costs: Costs, base: int) -> dict[int, tuple[int, Fraction]]:
    """Return the nanoseconds on a graph of its own size, and the ratio of an eager pass to that, of each count."""
    ladders = [ladder for ladder in team.ladders if ladder.role in roles]
    graphs = [costs.graph(ladder.family) for ladder in ladders]
    eager = [eager_of(ladder, costs) for ladder in ladders]
    domain, found = ladders[0].domain, {}
    for start, last in domain.intervals:
        for count in range(start, last + 1):
            own = _total(graphs, domain.round_up(count) * team.unit)
            alone = UNKNOWN if None in eager else _total(eager, count * team.unit) + base
            found[count] = own, Fraction(alone, max(own + base, 1))
    return found


def waived(team: Team, others: Sequence[Team], costs: Costs, *, least: bool = False) -> Value:
    """Return what the passes of a team cost eager that has no graphs, without those that other teams may serve.

    :param others: teams whose sizes are priced for its passes.
    :param least: whether to add what the others cost at least, rather than to leave them out.
    """
    total = 0
    for ladder in team.ladders:
        own = next((each for each in others if ladder.role in each.roles), None)
        eager = eager_of(ladder, costs)
        # More than any table costs: chosen only where no bound leaves room for these graphs.
        if eager is None:
            return UNKNOWN
        graph = next(each for each in own.ladders if each.role is ladder.role) if least and own is not None else None
        curve = None if graph is None else costs.graph(graph.family)
        last = 0 if own is None else own.ladders[0].domain.ceiling
        for count, weight in enumerate(team.weights):
            tokens = count * team.unit
            # No size of what serves the others is as large, so these run eager whatever is chosen.
            if weight and tokens > last:
                total += weight * _total([eager], tokens)
            elif weight and graph is not None:
                replay = _total([curve], graph.domain.round_up(tokens)) * team.chain
                total += weight * min(replay, _total([eager], tokens))
    return total


def eager_of(ladder: Ladder, costs: Costs) -> Curve | None:
    """Return what passes take that no graph of a ladder serves; None: the profile has no such times of decodes."""
    if ladder.kind is Kind.MIXED:
        return costs.eager(ladder.role, ladder.query_len)
    # Engines that never run decodes eager have none: vLLM's draft decodes (``profile --from OBSERVATION``).
    return costs.known((ladder.role, GraphMode.NONE, ladder.query_len, ladder.draft_steps))


def _total(curves: Iterable[Curve | None], tokens: int) -> int:
    """Return the nanoseconds of a pass of each curve; an unknown one decides nothing where it counts."""
    return sum(round(curve(tokens) * NANO) for curve in curves if curve is not None)
