"""Bounds on graphs, and how much graphs take of each: number, by kind and by backend; time to capture; memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import attrs

from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.resolve import fewest_graphs
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.profile import GraphCost
from capture_planner.records.spec import Budget, Spec

MICRO = 1_000_000
"""Microseconds of a second."""


@attrs.frozen
class GraphBound:
    """One bound on the graphs of all ladders."""

    limit: int
    path: tuple[str, ...]
    """Path of the bound in a spec; empty: it is a backend's."""
    text: str
    each: Callable[[Ladder], int]
    """Amount that a graph of a ladder takes, or the most that any does."""
    amount: Callable[[int], str] = str
    """Write what is taken, as a budget has it, rounded up."""
    is_memory: bool = False
    exact: Callable[[Ladder], int] | None = None
    """Amount that all graphs of a ladder take, where ``each`` is more than some do."""

    def taken(self, ladder: Ladder) -> int:
        """Return what all graphs of a ladder take, apart from its pool."""
        return self.each(ladder) * ladder.num_graphs if self.exact is None else self.exact(ladder)


PoolKey = tuple[Role | None, GraphMode]
"""A pool, by its role where each has one, and the mode of the graphs that share it; NONE: what it takes once."""


class BudgetBounds:
    """The bounds of a spec and of its backends, with what graphs take of them by a profile."""

    def __init__(self, spec: Spec, roles: Sequence[RoleInProgress], costs: Costs) -> None:
        self._spec, self._roles, self._costs = spec, roles, costs
        # A profile whose graphs had a pool for each role charged each for its own.
        self._pool = max(spec.pool, costs.profile.pool, key=lambda pool: pool is Pool.PER_ROLE)
        self.is_shared = self._pool is Pool.SHARED
        self._known: dict[Family, GraphCost] = {}
        ladders = [ladder for working in roles for ladder in working.ladders]
        self.all = (*_counted(spec.budget, roles), *self._measured(ladders))
        self.seconds = spec.budget.seconds
        self.is_estimate = any(self._cost(ladder).seconds_per_token for ladder in ladders if ladder.domain)
        """True if graphs of one ladder take different times to capture."""

    def with_seconds(self, seconds: float | None) -> BudgetBounds:
        """Return the bounds with another one on seconds, or with none."""
        budget = replace(self._spec.budget, seconds=seconds)
        return BudgetBounds(replace(self._spec, budget=budget), self._roles, self._costs)

    def _cost(self, ladder: Ladder) -> GraphCost:
        """Return what a graph takes by the profile; by the budget's figures where that has none of the role."""
        if ladder.family not in self._known:
            cost, budget = self._costs.cost_of(ladder.family), self._spec.budget
            if cost is None:
                mib, seconds = budget.memory_per_graph / (1 << 20), budget.seconds_per_graph
                cost = GraphCost(role=ladder.role, mode=ladder.mode, mib=mib, seconds=seconds)
            self._known[ladder.family] = cost
        return self._known[ladder.family]

    def _memory(self, ladder: Ladder) -> int:
        """Return the bytes that each graph of a ladder adds, apart from its pool."""
        cost = self._cost(ladder)
        return _in_bytes(cost.mib + cost.driver_mib)

    def takes(self, ladders: Iterable[Ladder]) -> tuple[int, ...]:
        """Return what one size of all these ladders takes of each bound."""
        graphs = [(ladder, len(ladder.cases)) for ladder in ladders]
        return tuple(sum(bound.each(ladder) * number for ladder, number in graphs) for bound in self.all)

    def least(self, teams: Iterable[Sequence[Ladder]]) -> tuple[int, ...]:
        """Return what the fewest graphs of teams of ladders take of each bound: one of the smallest largest size."""
        ladders = [ladder.reduced for team in teams for ladder in team]
        # Decodes are covered up to their largest count, mixed batches only as far as decodes need them.
        tops = [
            (each, each.domain.ceiling if each.kind is Kind.DECODE else max((1, *each.anchors))) for each in ladders
        ]
        pool = sum(self.pools(tops).values())
        return tuple(taken + pool * bound.is_memory for taken, bound in zip(self.takes(ladders), self.all, strict=True))

    def has_pool(self, ladders: Iterable[Ladder]) -> bool:
        """Say whether the pools of ladders take of a bound on memory."""
        pools = self.pools((ladder, ladder.domain.ceiling) for ladder in ladders)
        return any(bound.is_memory for bound in self.all) and any(pools.values())

    def pools(self, largest: Iterable[tuple[Ladder, int]]) -> Mapping[PoolKey, int]:
        """Return the bytes that pools have for their largest graphs, where ladders have these largest sizes."""
        pools: dict[PoolKey, int] = {}
        for ladder, size in largest:
            cost = self._cost(ladder)
            key = ladder.role if self._pool is Pool.PER_ROLE else None, ladder.mode
            # Graphs of one mode run one at a time, so the pool is as large as the largest needs.
            pools[key] = max(
                pools.get(key, 0), _in_bytes(cost.largest_mib) + _in_bytes(cost.mib_per_token) * size * ladder.unit
            )
            if not self.is_shared:
                pools[ladder.role, GraphMode.NONE] = _in_bytes(self._costs.profile.base_mib)
        return pools

    def _pools_of(self, ladders: Iterable[Ladder]) -> int:
        """Return the bytes of all pools, where ladders have the sizes that they have."""
        return sum(self.pools((each, each.sizes[-1]) for each in ladders if each.sizes).values())

    def hold(self, ladders: Sequence[Ladder]) -> bool:
        """Say whether ladders are within every bound: without graphs they are, whatever capturing takes once."""
        graphs = [each for each in ladders if each.sizes]
        return not graphs or all(
            sum(map(bound.taken, graphs)) + bound.is_memory * self._pools_of(graphs) <= bound.limit
            for bound in self.all
        )

    def memory(self, ladders: Sequence[Ladder]) -> int:
        """Return the bytes of all graphs, and of their pools; without graphs none."""
        graphs = sum(self._memory(ladder) * ladder.num_graphs for ladder in ladders)
        return graphs + self._pools_of(ladders) + self._base(ladder for ladder in ladders if ladder.sizes)

    def micros(self, ladders: Sequence[Ladder]) -> int:
        """Return the microseconds that capturing takes; without graphs none."""
        base = round(self._costs.profile.base_seconds * MICRO) * any(ladder.sizes for ladder in ladders)
        return sum(map(self._micros, ladders)) + base

    def _micros(self, ladder: Ladder) -> int:
        """Return the microseconds of a ladder's graphs, each by its own size."""
        return sum(self._micros_at(ladder, size) * len(ladder.served(size)) for size in ladder.sizes)

    def _micros_at(self, ladder: Ladder, size: int) -> int:
        cost = self._cost(ladder)
        return math.ceil(round(cost.seconds * MICRO) + cost.seconds_per_token * MICRO * size * ladder.unit)

    def _base(self, ladders: Iterable[Ladder]) -> int:
        """Return the bytes that capturing takes once in the pool that these ladders share."""
        return _in_bytes(self._costs.profile.base_mib) * (self.is_shared and any(True for _ in ladders))

    def _measured(self, ladders: Sequence[Ladder]) -> Iterator[GraphBound]:
        budget = self._spec.budget
        if budget.seconds is not None:
            # What capturing takes once is spent before the first graph.
            base = self._costs.profile.base_seconds
            yield GraphBound(
                limit=round((budget.seconds - base) * MICRO),
                path=("budget", "seconds"),
                text=f"seconds {budget.seconds:g}",
                # The search adds up what all sizes take alike, so each graph counts as its ladder's largest.
                each=lambda ladder: self._micros_at(ladder, ladder.domain.ceiling),
                amount=lambda micros: f"{math.ceil((micros / MICRO + base) * 1000) / 1000:g}",
                exact=self._micros,
            )
        if budget.memory is not None:
            own = self._base(ladder for ladder in ladders if ladder.domain)
            yield GraphBound(
                limit=budget.memory - own,
                path=("budget", "memory"),
                text=f"memory {budget.memory / (1 << 20):g}MiB",
                each=self._memory,
                amount=lambda size: f"{math.ceil((size + own) / (1 << 20))}MiB",
                is_memory=True,
            )


def _in_bytes(mib: float) -> int:
    return round(mib * (1 << 20))


def _counted(budget: Budget, roles: Sequence[RoleInProgress]) -> Iterator[GraphBound]:
    """Yield the bounds on numbers of graphs: in all, by kind of batch, and of the full graphs of a backend."""
    if budget.max_graphs is not None:
        path = ("budget", "max_graphs")
        yield GraphBound(limit=budget.max_graphs, path=path, text=f"max_graphs {budget.max_graphs}", each=lambda _: 1)
    for kind in Kind:
        allowed = budget.allowed_of(kind)
        if allowed is not None:
            text = f"graphs.{kind.value} {allowed}"
            each = partial(_counts, kind=kind)
            yield GraphBound(limit=allowed, path=("budget", "graphs", kind.value), text=text, each=each)
    for working in roles:
        group = fewest_graphs(working.groups)
        if group is not None:
            least = group.support.max_graphs or 0
            text = f"{group.registered.name} can hold {least} full graphs"
            yield GraphBound(
                limit=least, path=(), text=text, each=partial(_counts, role=working.role, mode=GraphMode.FULL)
            )


def _counts(ladder: Ladder, **alike: object) -> int:
    """Return 1 for a ladder that has these attributes, else 0."""
    return int(all(getattr(ladder, name) is value for name, value in alike.items()))
