"""Two deployments side by side: what each captures, what it serves, and where one alone runs eager.

Each can be a plan of ours or the emulation of an engine; a plan answers by its dispatcher, an
emulation as the engine does. Every admissible batch is asked about, or those of a trace.
``capture_planner.analysis.diff`` is another thing: what changes where one plan replaces another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs

from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.traffic import Arrival, batches_of, for_role
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import DecodeFamily, batches, decode_families, kind_of
from capture_planner.records.plan import Plan


@attrs.frozen(kw_only=True)
class Family:
    """One kind of batch of a role: decodes of one query length, or mixed batches."""

    role: Role
    kind: Kind
    query_len: int | None = None
    """None for mixed."""

    def data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"role": self.role.value, "kind": self.kind.value, "query_len": self.query_len}


@attrs.frozen(kw_only=True)
class Served:
    """What one side does with the batches of one family. Of a trace, a batch counts as often as it runs."""

    batches: int
    full: int
    """Batches with a full graph."""
    piecewise: int
    worst: float
    """The largest ratio of tokens computed to real ones, over batches with a graph; 1 where there is none."""
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

    def data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return attrs.asdict(self) | {"coverage": self.coverage}


@attrs.frozen(kw_only=True)
class Pair:
    """One family on both sides; None on a side that never meets it."""

    family: Family
    a: Served | None
    b: Served | None

    def data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        sides = {"a": self.a, "b": self.b}
        return self.family.data() | {side: each and each.data() for side, each in sides.items()}


@attrs.frozen(kw_only=True)
class Captured:
    """The graphs of one role and mode."""

    role: Role
    mode: GraphMode
    """FULL or PIECEWISE."""
    a: int
    b: int

    def data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"role": self.role.value, "mode": self.mode.value, "a": self.a, "b": self.b}


@attrs.frozen(kw_only=True)
class Modes:
    """The resolved mode of a role; None on a side that does not run it."""

    role: Role
    a: GraphMode | None
    b: GraphMode | None

    def data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        sides = {"a": self.a, "b": self.b}
        return {"role": self.role.value} | {side: each and each.value for side, each in sides.items()}


@attrs.frozen(kw_only=True)
class Hole:
    """Batches that both sides admit, of which one runs them eager and the other does not."""

    family: Family
    eager: str
    """``a`` or ``b``."""
    first: int
    """Requests of decodes, tokens of mixed batches: all from ``first`` to ``last`` that were asked about."""
    last: int
    active_loras: int
    batches: int
    """How many they are; of a trace, how often the side that runs them eager meets them."""
    reason: Reason | None
    """Why the one has no graph."""
    mode: GraphMode
    """How the other runs them."""

    def data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return self.family.data() | {
            "eager": self.eager,
            "first": self.first,
            "last": self.last,
            "active_loras": self.active_loras,
            "batches": self.batches,
            "reason": None if self.reason is None else self.reason.value,
            "mode": self.mode.value,
        }


@attrs.frozen(kw_only=True)
class SideBySide:
    """Two deployments, compared."""

    a: str
    """What the first is called."""
    b: str
    from_traffic: bool
    """Whether batches are those of a trace; else all that are admissible."""
    modes: tuple[Modes, ...]
    graphs: tuple[Captured, ...]
    families: tuple[Pair, ...]
    holes: tuple[Hole, ...]

    def data(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {
            "a": self.a,
            "b": self.b,
            "batches": "traffic" if self.from_traffic else "admissible",
            "modes": [modes.data() for modes in self.modes],
            "graphs": [captured.data() for captured in self.graphs],
            "families": [pair.data() for pair in self.families],
            "holes": [hole.data() for hole in self.holes],
        }


def compare(
    a: Plan | Emulation,
    b: Plan | Emulation,
    traffic: Iterable[Arrival] | None = None,
    *,
    names: tuple[str, str] | None = None,
) -> SideBySide:
    """Compare two deployments over all batches that each admits, or over those of a trace.

    Figures of a side are over its own batches: those are what it meets. Holes are over the batches of
    both. ``names`` is what the sides are called, where not as they call themselves.
    """
    requests = None if traffic is None else tuple(traffic)
    left, right = _Side(a), _Side(b)
    largest = {role: _beyond(role, (left, right)) for role in Role}
    for side in (left, right):
        side.ask(requests, largest)
    families = sorted({*left.answers, *right.answers}, key=_order)
    called = (left.name, right.name) if names is None else names
    return SideBySide(
        a=called[0],
        b=called[1],
        from_traffic=requests is not None,
        modes=tuple(
            Modes(role=role, a=left.modes.get(role), b=right.modes.get(role))
            for role in Role
            if role in left.modes or role in right.modes
        ),
        graphs=tuple(_captured(left, right)),
        families=tuple(
            Pair(family=family, a=_served(left, family), b=_served(right, family)) for family in families
        ),
        holes=tuple(
            hole
            for role, kind in dict.fromkeys((family.role, family.kind) for family in families)
            for hole in _holes(left, right, role, kind)
        ),
    )


def _order(family: Family) -> tuple[int, str, int]:
    return (list(Role).index(family.role), family.kind.value, family.query_len or 0)


@attrs.frozen
class _Answer:
    """One batch, how often it runs, and its answer."""

    batch: Batch
    times: int
    dispatch: Dispatch

    @property
    def ratio(self) -> float:
        entry = self.dispatch.entry
        return 1.0 if entry is None else entry.num_tokens / self.batch.num_tokens


# What makes two batches of two sides the same one: extent and adapters, and of a mixed one of a trace all the rest.
_Key = tuple[int, int, Batch | None]


class _Side:
    """One deployment with all its answers, by family."""

    def __init__(self, given: Plan | Emulation) -> None:
        self.deployment = given
        self.dispatch: Callable[[Batch], Dispatch]
        self.families: Callable[[Role], tuple[DecodeFamily, ...]]
        self.entries: Mapping[Role, tuple[Entry, ...]]
        if isinstance(given, Plan):
            self.name = f"{given.model.name} on {given.environment.name}"
            self.modes = {role.role: role.mode for role in given.roles}
            self.entries = {role.role: role.entries for role in given.roles}
            self.dispatch = Dispatcher(given).dispatch
            self.families = partial(decode_families, deployment=given)
        else:
            self.name = f"{given.engine} {given.version}"
            self.modes = dict(given.modes)
            self.entries = {m.role: tuple(graph.entry for graph in m.graphs) for m in given.managers}
            self.dispatch = given.dispatch
            self.families = given.families
        self.answers: dict[Family, dict[_Key, _Answer]] = {}

    def largest(self, role: Role) -> int:
        """Return the tokens of the role's largest graph."""
        return max((entry.num_tokens for entry in self.entries.get(role, ())), default=0)

    def ask(self, requests: tuple[Arrival, ...] | None, largest: Mapping[Role, int]) -> None:
        """Answer the batches of a trace, or all there are: above ``largest`` one stands for all."""
        met = None if requests is None else batches_of(requests, self.deployment)
        for role in self.modes:
            families = self.families(role)
            if met is None:
                every = batches(role, self.deployment, families=families, upto=largest[role])
                for batch, last in every:
                    kind = batch.kind
                    self._answer(batch, kind, 1 + last - batch.extent(kind))
            else:
                for batch, times in for_role(met, role, families).items():
                    kind = kind_of(batch, families)
                    self._answer(batch, kind, times, None if kind is Kind.DECODE else batch)

    def of(self, role: Role, kind: Kind) -> dict[_Key, _Answer]:
        """Return the answers to all decodes, or to all mixed batches, of a role."""
        found = (
            answers for family, answers in self.answers.items() if (family.role, family.kind) == (role, kind)
        )
        return {key: answer for answers in found for key, answer in answers.items()}

    def _answer(self, batch: Batch, kind: Kind, times: int, whole: Batch | None = None) -> None:
        query_len = batch.query_len if kind is Kind.DECODE else None
        family = Family(role=batch.role, kind=kind, query_len=query_len)
        key = (batch.extent(kind), batch.active_loras, whole)
        self.answers.setdefault(family, {})[key] = _Answer(batch, times, self.dispatch(batch))


def _captured(left: _Side, right: _Side) -> Iterator[Captured]:
    counts = [
        Counter((role, entry.mode) for role, entries in side.entries.items() for entry in entries)
        for side in (left, right)
    ]
    for role in Role:
        for mode in (GraphMode.FULL, GraphMode.PIECEWISE):
            a, b = (count[role, mode] for count in counts)
            if a or b:
                yield Captured(role=role, mode=mode, a=a, b=b)


def _served(side: _Side, family: Family) -> Served | None:
    answers = side.answers.get(family)
    if answers is None:
        return None
    times: Counter[GraphMode] = Counter()
    worst, total = 1.0, 0.0
    for answer in answers.values():
        times[answer.dispatch.mode] += answer.times
        if answer.dispatch.entry is not None:
            worst = max(worst, answer.ratio)
            total += answer.ratio * answer.times
    graphed = times[GraphMode.FULL] + times[GraphMode.PIECEWISE]
    return Served(
        batches=sum(times.values()),
        full=times[GraphMode.FULL],
        piecewise=times[GraphMode.PIECEWISE],
        worst=worst,
        mean=total / graphed if graphed else 1.0,
    )


def _beyond(role: Role, sides: tuple[_Side, _Side]) -> int:
    """Return the tokens above which no batch has a graph, nor one of as many requests on the other side."""
    widths = (family.query_len for side in sides if role in side.modes for family in side.families(role))
    return max(side.largest(role) for side in sides) * max(widths, default=1)


def _holes(left: _Side, right: _Side, role: Role, kind: Kind) -> Iterator[Hole]:
    """Yield where one side alone runs eager: neighbours of one reason and one mode as one hole.

    Decodes of as many requests are the same ones, whatever each side drafts for them.
    """
    a, b = left.of(role, kind), right.of(role, kind)
    found: dict[tuple[str, int | None, int, Reason | None, GraphMode], dict[int, int]] = {}
    for key in a.keys() & b.keys():
        extent, loras, _ = key
        for side, eager, other in (("a", a[key], b[key]), ("b", b[key], a[key])):
            if eager.dispatch.entry is None and other.dispatch.entry is not None:
                query_len = eager.batch.query_len if kind is Kind.DECODE else None
                group = (side, query_len, loras, eager.dispatch.reason, other.dispatch.mode)
                extents = found.setdefault(group, {})
                extents[extent] = extents.get(extent, 0) + eager.times
    holes = [
        Hole(
            family=Family(role=role, kind=kind, query_len=query_len),
            eager=side,
            first=first,
            last=last,
            active_loras=loras,
            batches=sum(times for extent, times in extents.items() if first <= extent <= last),
            reason=reason,
            mode=mode,
        )
        for (side, query_len, loras, reason, mode), extents in found.items()
        for first, last in _runs(extents, sorted({key[0] for key in a.keys() & b.keys() if key[1] == loras}))
    ]
    yield from sorted(holes, key=lambda hole: (hole.eager, hole.active_loras, hole.first, hole.mode.value))


def _runs(extents: Container[int], asked: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of extents that follow each other among those asked about."""
    run: list[int] = []
    for count in asked:
        if count in extents:
            run.append(count)
        elif run:
            yield run[0], run[-1]
            run = []
    if run:
        yield run[0], run[-1]
