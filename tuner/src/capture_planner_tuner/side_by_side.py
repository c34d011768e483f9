"""Two deployments side by side: what each captures, what it serves, and where only one runs eager.

Each is a plan or the emulation of an engine: a plan answers by our dispatcher, an emulation as the engine
does. Every admissible batch is dispatched, or every batch of a trace. For what changes where one plan replaces
another, see ``capture_planner.analysis.diff``.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping

import attrs

from capture_planner.analysis.arrivals import for_role
from capture_planner.dispatch.dispatcher import Dispatch
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.emulation import Emulation
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import batches, extra_slots, kind_of
from capture_planner.records.plan import Plan


@attrs.frozen(kw_only=True)
class BatchClass:
    """One kind of batch of a role: decodes of one query length, or mixed batches."""

    role: Role
    kind: Kind
    query_len: int | None = None
    """None for mixed."""


@attrs.frozen(kw_only=True)
class Service:
    """One side's service of the batches of one family. Of a trace, a batch counts as often as it runs."""

    batches: int
    full: int
    """Batches with a full graph."""
    piecewise: int
    worst: float
    """The largest ratio of tokens computed to real ones, over batches with a graph; 1 without one."""
    mean: float
    """The mean of that ratio."""

    @property
    def graphed(self) -> int:
        """Batches with a graph."""
        return self.full + self.piecewise

    @property
    def coverage(self) -> float:
        """The share of batches with a graph."""
        return self.graphed / self.batches


@attrs.frozen(kw_only=True)
class Pair:
    """One family on both sides; None on a side that never meets it."""

    family: BatchClass
    a: Service | None
    b: Service | None


@attrs.frozen(kw_only=True)
class GraphCounts:
    """The graphs of one role and mode."""

    role: Role
    mode: GraphMode
    """FULL or PIECEWISE."""
    a: int
    b: int


@attrs.frozen(kw_only=True)
class Modes:
    """The resolved mode of a role; None on a side that does not run it."""

    role: Role
    a: GraphMode | None
    b: GraphMode | None


@attrs.frozen(kw_only=True)
class Hole:
    """Batches that both sides admit, of which one runs them eager and the other does not."""

    family: BatchClass
    eager: str
    """``a`` or ``b``."""
    first: int
    """Requests of decodes, tokens of mixed batches: all from ``first`` to ``last`` that were asked about."""
    last: int
    active_loras: int
    batches: int
    """Number of batches; of traffic, how often the side that runs them eager meets them."""
    reason: Reason | None
    """Reason why the one has no graph."""
    mode: GraphMode
    """Mode in which the other runs them."""


@attrs.frozen(kw_only=True)
class SideBySide:
    """Two deployments, compared."""

    a: str
    """Name of the first."""
    b: str
    from_traffic: bool
    """Whether batches come from traffic; else all admissible ones."""
    modes: tuple[Modes, ...]
    graphs: tuple[GraphCounts, ...]
    families: tuple[Pair, ...]
    holes: tuple[Hole, ...]
    unknown: int = 0
    """Batches that an observation has no answer to, on both sides; they are not counted."""


def compare(
    a: Plan | Emulation,
    b: Plan | Emulation,
    steps: tuple[Mapping[Batch, int], Mapping[Batch, int]] | None = None,
    *,
    names: tuple[str, str] = ("A", "B"),
) -> SideBySide:
    """Compare two deployments over all batches that each admits, or over those of traffic.

    Figures of a side are over its own batches: those are what it meets. Holes are over the batches of both.

    :param steps: how often each batch of the target runs, on each side; None: all batches count once.
    :param names: what the sides are called.
    """
    left, right = _Side(a), _Side(b)
    for side, counts in zip((left, right), steps or (None, None), strict=True):
        side.dispatch(counts, {role: _largest((left, right), role) for role in Role})
    families = sorted(
        {*left.answers, *right.answers},
        key=lambda family: (list(Role).index(family.role), family.kind.value, family.query_len or 0),
    )
    a_graphs, b_graphs = (Counter((g.role, g.entry.mode) for g in side.emulation.graphs) for side in (left, right))
    return SideBySide(
        a=names[0],
        b=names[1],
        from_traffic=steps is not None,
        modes=tuple(
            Modes(role=role, a=left.emulation.modes.get(role), b=right.emulation.modes.get(role))
            for role in Role
            if role in left.emulation.modes or role in right.emulation.modes
        ),
        graphs=tuple(
            GraphCounts(role=role, mode=mode, a=a_graphs[role, mode], b=b_graphs[role, mode])
            for role in Role
            for mode in (GraphMode.FULL, GraphMode.PIECEWISE)
            if a_graphs[role, mode] or b_graphs[role, mode]
        ),
        families=tuple(Pair(family=family, a=_service(left, family), b=_service(right, family)) for family in families),
        holes=tuple(
            hole
            for role, kind in dict.fromkeys((family.role, family.kind) for family in families)
            for hole in _holes(left, right, role, kind)
        ),
        unknown=left.unknown + right.unknown,
    )


@attrs.frozen
class _Answer:
    batch: Batch
    times: int
    dispatch: Dispatch


# What makes two batches of two sides the same one: extent and adapters, and of a mixed one of traffic all the rest.
_Key = tuple[int, int, Batch | None]


class _Side:
    """One deployment with all its answers, by class of batches."""

    def __init__(self, deployment: Plan | Emulation) -> None:
        self.emulation = emulation_of(deployment)
        self.answers: dict[BatchClass, dict[_Key, _Answer]] = {}
        self.unknown = 0

    def dispatch(self, counts: Mapping[Batch, int] | None, largest: Mapping[Role, int]) -> None:
        """Answer batches that are counted, or all admissible ones: above ``largest`` one represents all."""
        slots = extra_slots(self.emulation)
        for role in self.emulation.modes:
            families = self.emulation.families(role)
            if counts is None:
                for batch, last in batches(role, self.emulation, families=families, upto=largest[role]):
                    self._answer(batch, batch.kind, 1 + last - batch.extent(batch.kind))
            else:
                # A drafter runs what follows from the target's steps, on each side by its own schedule.
                for batch, times in for_role(Counter(counts), role, families, slots=slots).items():
                    kind = kind_of(batch, families)
                    self._answer(batch, kind, times, None if kind is Kind.DECODE else batch)

    def of(self, role: Role, kind: Kind) -> dict[_Key, _Answer]:
        """Return the answers to all decodes, or to all mixed batches, of a role."""
        selected = (answers for each, answers in self.answers.items() if (each.role, each.kind) == (role, kind))
        return {key: answer for answers in selected for key, answer in answers.items()}

    def _answer(self, batch: Batch, kind: Kind, times: int, whole: Batch | None = None) -> None:
        answer = self.emulation.dispatch(batch)
        # Counting it as eager would blame the engine for a question that was not asked.
        if answer.reason is Reason.UNKNOWN:
            self.unknown += times
            return
        query_len = batch.query_len if kind is Kind.DECODE else None
        batch_class = BatchClass(role=batch.role, kind=kind, query_len=query_len)
        key = (batch.extent(kind), batch.active_loras, whole)
        self.answers.setdefault(batch_class, {})[key] = _Answer(batch, times, answer)


def _service(side: _Side, family: BatchClass) -> Service | None:
    answers = side.answers.get(family)
    if answers is None:
        return None
    times: Counter[GraphMode] = Counter()
    worst, total = 1.0, 0.0
    for answer in answers.values():
        times[answer.dispatch.mode] += answer.times
        # Padding is a matter of graphs: eager batches run as they are.
        if answer.dispatch.entry is not None:
            ratio = answer.dispatch.entry.num_tokens / answer.batch.num_tokens
            worst, total = max(worst, ratio), total + ratio * answer.times
    graphed = times[GraphMode.FULL] + times[GraphMode.PIECEWISE]
    return Service(
        batches=sum(times.values()),
        full=times[GraphMode.FULL],
        piecewise=times[GraphMode.PIECEWISE],
        worst=worst,
        mean=total / graphed if graphed else 1.0,
    )


def _largest(sides: tuple[_Side, _Side], role: Role) -> int:
    """Return the tokens above which no batch has a graph, nor one of as many requests on the other side."""
    both = [side.emulation for side in sides if role in side.emulation.modes]
    tokens = (graph.entry.num_tokens for each in both for graph in each.graphs if graph.role is role)
    # The same number of requests may have more tokens on the other side.
    widths = (family.query_len for each in both for family in each.families(role))
    return max(tokens, default=0) * max(widths, default=1)


def _holes(left: _Side, right: _Side, role: Role, kind: Kind) -> Iterator[Hole]:
    """Yield where one side alone runs eager, neighbours as one; decodes match by requests, whatever is drafted."""
    a, b = left.of(role, kind), right.of(role, kind)
    shared = a.keys() & b.keys()
    found: defaultdict[tuple[str, int | None, int, Reason | None, GraphMode], Counter[int]] = defaultdict(Counter)
    for key in shared:
        extent, loras, _ = key
        for side, eager, other in (("a", a[key], b[key]), ("b", b[key], a[key])):
            # Eager on both sides, or on none, is no difference in service.
            if eager.dispatch.entry is None and other.dispatch.entry is not None:
                query_len = eager.batch.query_len if kind is Kind.DECODE else None
                found[side, query_len, loras, eager.dispatch.reason, other.dispatch.mode][extent] += eager.times
    holes = [
        Hole(
            family=BatchClass(role=role, kind=kind, query_len=query_len),
            eager=side,
            first=first,
            last=last,
            active_loras=loras,
            batches=sum(times for extent, times in extents.items() if first <= extent <= last),
            reason=reason,
            mode=mode,
        )
        for (side, query_len, loras, reason, mode), extents in found.items()
        # Neighbours among the extents that both have: one that traffic never had does not split a hole.
        for first, last in _runs(extents, sorted({key[0] for key in shared if key[1] == loras}))
    ]
    yield from sorted(holes, key=lambda hole: (hole.eager, hole.active_loras, hole.first, hole.mode.value))


def _runs(extents: Container[int], asked: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of extents that follow each other among those asked about."""
    for included, group in itertools.groupby(asked, lambda count: count in extents):
        if included:
            run = list(group)
            yield run[0], run[-1]
