"""Fits: from measured captures to what a graph of each family costs, and what a plan will cost that was never captured.

A graph's memory is two things. Its intermediates live in the allocator's pool, which graphs share, since they never
run at once: captured largest first, the largest takes nearly all, and those that follow find room. And the driver
keeps each executable graph, whatever its size. PIECEWISE graphs come first, and FULL ones end in logits, which are
larger than any block that pieces leave: so the two kinds add up, and within a kind the largest counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, combinations

import attrs

from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.records._base import grouped
from capture_planner.records.batch import Entry
from capture_planner.records.plan import Plan
from capture_planner.records.profile import CostCurve, GraphCost, Profile, family_name


@attrs.frozen
class Line:
    """``intercept + slope * x``: least squares, and never negative."""

    intercept: float
    slope: float
    error: float
    """Root mean square of how far each point is from the line of all others."""

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Fit points, of which there is one at least; a single point says nothing about its own error."""
        intercept, slope = _fit(points)
        # A line is closer to the points that it was fitted to than to others, so each is left out in turn.
        left_out = [
            y - (a + b * x)
            for index, (x, y) in enumerate(points)
            for a, b in [_fit([*points[:index], *points[index + 1 :]])]
        ]
        return cls(intercept, slope, math.sqrt(statistics.fmean(error * error for error in left_out)))

    @classmethod
    def robust(cls, points: Sequence[tuple[float, float]]) -> Line:
        """Fit points of which up to a quarter are far off; the error is their median distance, 0 without points."""
        if not points:
            return cls(0.0, 0.0, 0.0)
        # Theil and Sen: the median of all slopes between two points.
        slopes = [(d - b) / (c - a) for (a, b), (c, d) in combinations(points, 2) if a != c]
        slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
        intercept = statistics.median([y - slope * x for x, y in points])
        # Noise: a graph of no tokens does not cost less than nothing.
        if intercept < 0:
            intercept, slope = 0.0, max(0.0, statistics.median([y / x for x, y in points]))
        return cls(intercept, slope, statistics.median([abs(y - intercept - slope * x) for x, y in points]))

    def __call__(self, x: float) -> float:
        return self.intercept + self.slope * x


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of the line with the least squares among those that are not negative."""
    if not points:
        return 0.0, 0.0
    xs, ys = zip(*points, strict=True)
    mean = statistics.fmean(ys)
    # Points of one size have no slope, and linear_regression refuses them.
    if len(set(xs)) == 1:
        return mean, 0.0
    slope, intercept = statistics.linear_regression(xs, ys)
    # Noise: a larger graph does not cost less.
    if slope < 0:
        return mean, 0.0
    if intercept < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x in xs)
    return intercept, slope


@attrs.frozen(kw_only=True)
class GraphSample:
    """One graph that was captured."""

    family: Family
    tokens: int
    seconds: float
    mib: float
    """MiB by which its pool grew."""
    alone_mib: float | None = None
    """MiB in a pool of its own; None: not known."""
    driver_mib: float = 0.0


@attrs.frozen(kw_only=True)
class Fit:
    """Fitted costs of graphs."""

    graphs: tuple[GraphCost, ...]
    base_mib: float
    base_seconds: float


def curves_of(times: Mapping[Family, Mapping[int, float]]) -> tuple[CostCurve, ...]:
    """Return a curve for each family that has times; no size takes less than a smaller one (a running maximum).

    :param times: milliseconds by family, eager passes among them, and by padded tokens.
    """
    return tuple(
        CostCurve(
            role=role,
            mode=mode,
            query_len=query_len,
            draft_steps=draft_steps,
            tokens=tuple(sorted(sizes)),
            milliseconds=tuple(accumulate((round(sizes[tokens], 6) for tokens in sorted(sizes)), max)),
        )
        for (role, mode, query_len, draft_steps), sizes in sorted(times.items(), key=lambda each: family_name(*each[0]))
        if sizes
    )


def entry_family(role: Role, entry: Entry) -> Family:
    """Return the family of a graph of a role."""
    return role, entry.mode, entry.query_len, entry.draft_steps


def fit_graphs(captures: Sequence[Sequence[GraphSample]], alone: Sequence[GraphSample] = ()) -> Fit:
    """Fit the costs of graphs by family.

    The first graph of a family takes longer, as it loads kernels; by how much is in ``base_seconds``. What its first
    capture allocates once, and the pool's, is in ``base_mib``.

    :param captures: graphs in capture order, each capture into one pool that was empty before.
    :param alone: graphs that were captured later, each into a pool of its own, of families in ``captures``: ``mib`` is
        what they took, the driver's included.
    """
    samples = [sample for capture in captures for sample in capture]
    known = all(sample.alone_mib is not None for sample in samples)
    firsts = {id(sample) for capture in captures for sample in _growing(capture)}
    by_family = grouped(samples, lambda sample: sample.family)
    costs = tuple(
        _family_cost(
            family,
            by_family[family],
            firsts,
            _driver_mib(family, captures),
            [sample for sample in alone if sample.family == family],
            known=known,
        )
        for family in sorted(by_family, key=lambda family: family_name(*family))
    )
    by_key: Mapping[Family, GraphCost] = {cost.key: cost for cost in costs}
    rests = [
        sum(each.mib for each in capture)
        - _pool_mib([(by_key[each.family], each.family[1], each.tokens) for each in capture])
        for capture in captures
        if capture
    ]
    base = max(0.0, statistics.median(rests)) if rests else 0.0
    # What the first graph of each family took beyond its fit.
    cold = sum(
        max(0.0, by_family[cost.key][0].seconds - cost.seconds - cost.seconds_per_token * by_family[cost.key][0].tokens)
        for cost in costs
    )
    return Fit(graphs=costs, base_mib=round(base, 6), base_seconds=round(cold, 6))


def _growing(capture: Sequence[GraphSample]) -> Iterator[GraphSample]:
    """Yield the graphs that need more than all of their mode before them: the first, and larger ones of other roles.

    Where what they need is not known, the first of each family, which also loads what the family runs.
    """
    most: dict[GraphMode, float] = {}
    met: set[Family] = set()
    for sample in capture:
        mode, alone = sample.family[1], sample.alone_mib
        # The pool grows only for a graph that needs more than all before it.
        if sample.family not in met if alone is None else alone > most.get(mode, -1.0):
            most[mode] = max(alone or 0.0, most.get(mode, 0.0))
            yield sample
        met.add(sample.family)


def _driver_mib(family: Family, captures: Sequence[Sequence[GraphSample]]) -> float:
    """Return what the driver takes for a graph: the mean over the first capture that has the family.

    A driver keeps the memory of released graphs for those that follow, so later captures show less. It takes memory
    for several graphs at once, so one graph by itself shows nothing.
    """
    capture = next(capture for capture in captures if any(sample.family == family for sample in capture))
    return max(0.0, statistics.fmean(sample.driver_mib for sample in capture if sample.family == family))


def _family_cost(
    family: Family,
    samples: Sequence[GraphSample],
    firsts: set[int],
    driver_mib: float,
    alone: Sequence[GraphSample],
    *,
    known: bool,
) -> GraphCost:
    """Fit one family; where ``known``, by what each graph takes alone, and else by how pools grew.

    Without that, only graphs that came first in a pool show what a graph takes: those after them shared it.
    """
    role, mode, query_len, draft_steps = family
    later = [sample.mib for sample in samples if id(sample) not in firsts]
    each = statistics.fmean(later) if later else 0.0  # the driver takes memory for several graphs at once
    if known:
        points = [(float(sample.tokens), sample.alone_mib or 0.0) for sample in samples]
    elif alone:
        points = [(float(sample.tokens), max(0.0, sample.mib - each)) for sample in alone]
    else:
        points = [(float(s.tokens), max(0.0, s.mib - each)) for s in samples if id(s) in firsts] or [(1.0, 0.0)]
        # One pool shows one size of a family; intermediates are in proportion to tokens.
    memory = Line.of(points if len(points) > 1 else [*points, (0.0, 0.0)])
    # Sizes at which a library loads another kernel take several times as long, in the first capture of a process.
    most = max(sample.tokens for sample in samples)
    rest = [*(samples[1:] or samples), *(sample for sample in alone if sample.tokens > most)]
    sizes = [sample.tokens for sample in rest]
    # Sizes near each other say nothing about a slope, which larger ones would multiply.
    has_slope = 2 * (max(sizes) - min(sizes)) >= most
    seconds = Line.robust([(float(sample.tokens * has_slope), sample.seconds) for sample in rest])
    figures = {
        "mib": each,
        "driver_mib": driver_mib,
        "largest_mib": memory.intercept,
        "mib_per_token": memory.slope,
        "mib_error": memory.error if known or alone else (statistics.pstdev(later) if later else 0.0),
        "seconds": seconds.intercept,
        "seconds_per_token": seconds.slope,
        "seconds_error": seconds.error,
    }
    rounded = {name: round(figure, 9) for name, figure in figures.items()}
    return GraphCost(role=role, mode=mode, query_len=query_len, draft_steps=draft_steps, **rounded)


def _pool_mib(graphs: Sequence[tuple[GraphCost, GraphMode, int]]) -> float:
    """Return the MiB of one pool after ``graphs``, each with its costs, mode and tokens, were captured into it."""
    # Intermediates are shared per mode of the graphs; the costs may be borrowed from another mode.
    largest = dict.fromkeys(GraphMode, 0.0)
    for cost, mode, tokens in graphs:
        largest[mode] = max(largest[mode], cost.largest_mib + cost.mib_per_token * tokens)
    return sum(largest.values()) + sum(cost.mib for cost, *_ in graphs)


@attrs.frozen(kw_only=True)
class Prediction:
    """Expected costs of capturing a plan, with their errors."""

    memory_mib: float
    memory_error_mib: float
    seconds: float
    seconds_error: float
    assumptions: tuple[str, ...] = ()
    """Sentences about costs that are taken from another family."""


def predict(profile: Profile, plan: Plan) -> Prediction:
    """Predict the capture of a plan, as ``predict_graphs``."""
    return predict_graphs(profile, [(role.role, entry) for role in plan.roles for entry in role.entries], plan.pool)


def predict_graphs(profile: Profile, work: Sequence[tuple[Role, Entry]], sharing: Pool = Pool.SHARED) -> Prediction:
    """Predict memory and time of a capture; raises ``PlanningError`` where a role has no costs in the profile."""
    costs = Costs(profile)
    # Without a graph not even a pool is made.
    if not work:
        return Prediction(memory_mib=0.0, memory_error_mib=0.0, seconds=0.0, seconds_error=0.0)
    families = {family: costs.of_graph(family) for family in (entry_family(role, entry) for role, entry in work)}
    each = [(families[entry_family(role, entry)], entry.mode, entry.num_tokens) for role, entry in work]
    pools: dict[Role | None, list[tuple[GraphCost, GraphMode, int]]] = {}
    for (role, _), graph in zip(work, each, strict=True):
        # Costs of separate pools say nothing about a shared one, so such a profile decides too.
        pools.setdefault(role if Pool.PER_ROLE in (sharing, profile.pool) else None, []).append(graph)
    pooled = sum(map(_pool_mib, pools.values()))
    used = {cost.key: cost for cost in families.values()}.values()
    return Prediction(
        memory_mib=len(pools) * profile.base_mib + pooled + sum(cost.driver_mib for cost, *_ in each),
        memory_error_mib=len(pools) * sum(cost.mib_error for cost in used),
        seconds=profile.base_seconds + sum(cost.seconds + cost.seconds_per_token * tokens for cost, _, tokens in each),
        seconds_error=math.sqrt(sum(cost.seconds_error**2 for cost, *_ in each)),
        assumptions=tuple(
            f"costs of {family_name(*family)} are taken from {family_name(*cost.key)}, which the profile has"
            for family, cost in families.items()
            if cost.key != family
        ),
    )
