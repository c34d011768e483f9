"""What graphs take of each bound: number, by kind of batch and by backend; time to capture; memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from capture_planner.modes import GraphMode, Pool, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder
from capture_planner.records.batch import Kind
from capture_planner.records.spec import Budget, Spec

MICRO = 1_000_000


@attrs.frozen
class GraphBound:
    """One bound on the graphs of all ladders."""

    limit: int
    text: str
    each: Callable[[Ladder], int]
    """What a graph of a ladder takes."""
    is_memory: bool = False


@attrs.frozen
class GraphPrice:
    """What the graphs of a family take: bytes and microseconds."""

    memory: int
    """Bytes that each graph adds."""
    micros: int
    micros_per_token: float = 0
    largest: int = 0
    """Bytes of the pool for the largest graph of a mode, apart from its tokens."""
    per_token: int = 0
    """Bytes of the pool for each token of the largest graph."""


PoolKey = tuple[Role | None, GraphMode]
"""A pool, by its role where each has one, and the mode of the graphs that share their intermediates in it."""


def family_of(ladder: Ladder) -> Family:
    """Return the family of a ladder's graphs."""
    return ladder.role, ladder.mode, ladder.query_len, ladder.draft_steps


def reduced(ladder: Ladder) -> Ladder:
    """Return the ladder with the fewest LoRA cases that serve every batch: none, and the most."""
    return attrs.evolve(ladder, cases=tuple(dict.fromkeys((*ladder.cases[:1], *ladder.cases[-1:]))))


class BudgetBounds:
    """The bounds of a spec and of its backends, with what graphs take of them by a profile."""

    def __init__(self, spec: Spec, roles: Sequence[RoleInProgress], costs: Costs) -> None:
        self._budget, self._costs = spec.budget, costs
        self._pool = max(spec.pool, costs.profile.pool, key=lambda pool: pool is Pool.PER_ROLE)
        self._prices: dict[Family, GraphPrice] = {}
        self.all = (
            *_counted(spec.budget, roles),
            *self._measured(spec.budget, [ladder for working in roles for ladder in working.ladders]),
        )

    def price(self, ladder: Ladder) -> GraphPrice:
        """Return what a graph takes by the profile; by the budget's figures where that has none of the role."""
        family = family_of(ladder)
        if family not in self._prices:
            cost = self._costs.cost_of(family)
            if cost is None:
                budget = self._budget
                price = GraphPrice(budget.memory_per_graph, round(budget.seconds_per_graph * MICRO))
            else:
                price = GraphPrice(
                    memory=_in_bytes(cost.mib + cost.driver_mib),
                    micros=round(cost.seconds * MICRO),
                    micros_per_token=cost.seconds_per_token * MICRO,
                    largest=_in_bytes(cost.largest_mib),
                    per_token=_in_bytes(cost.mib_per_token),
                )
            self._prices[family] = price
        return self._prices[family]

    def takes(self, ladders: Iterable[Ladder]) -> tuple[int, ...]:
        """Return what one size of all these ladders takes of each bound."""
        graphs = [(ladder, len(ladder.cases)) for ladder in ladders]
        return tuple(sum(bound.each(ladder) * number for ladder, number in graphs) for bound in self.all)

    def pools(self, largest: Iterable[tuple[Ladder, int]]) -> Mapping[PoolKey, int]:
        """Return the bytes that pools have for their largest graphs, where ladders have these largest sizes."""
        pools: dict[PoolKey, int] = {}
        for ladder, size in largest:
            price = self.price(ladder)
            key = ladder.role if self._pool is Pool.PER_ROLE else None, ladder.mode
            taken = price.largest + price.per_token * size * (ladder.query_len or 1)
            pools[key] = max(pools.get(key, 0), taken)
        return pools

    def hold(self, ladders: Sequence[Ladder]) -> bool:
        """Say whether ladders are within every bound."""
        for bound in self.all:
            taken = sum(bound.each(ladder) * ladder.num_graphs for ladder in ladders)
            if bound.is_memory:
                taken += sum(self.pools((each, each.sizes[-1]) for each in ladders if each.sizes).values())
            if taken > bound.limit:
                return False
        return True

    def memory(self, ladders: Sequence[Ladder]) -> int:
        """Return the bytes of all graphs, and of their pools."""
        graphs = sum(self.price(ladder).memory * ladder.num_graphs for ladder in ladders)
        pools = self.pools((each, each.sizes[-1]) for each in ladders if each.sizes)
        return graphs + sum(pools.values()) + self._base(ladders)

    def micros(self, ladders: Sequence[Ladder]) -> int:
        """Return the microseconds that capturing takes."""
        graphs = sum(
            (self.price(ladder).micros + self.price(ladder).micros_per_token * size * (ladder.query_len or 1))
            * len(ladder.served(size))
            for ladder in ladders
            for size in ladder.sizes
        )
        return round(graphs + self._costs.profile.base_seconds * MICRO)

    def _base(self, ladders: Iterable[Ladder]) -> int:
        """Return the bytes that capturing takes once in each pool."""
        pools = len({ladder.role for ladder in ladders if ladder.domain}) if self._pool is Pool.PER_ROLE else 1
        return pools * _in_bytes(self._costs.profile.base_mib)

    def _longest(self, ladder: Ladder) -> int:
        """Return the microseconds of a ladder's largest graph, which each of its graphs counts with."""
        price = self.price(ladder)
        return math.ceil(price.micros + price.micros_per_token * ladder.domain.ceiling * (ladder.query_len or 1))

    def _measured(self, budget: Budget, ladders: Sequence[Ladder]) -> Iterator[GraphBound]:
        if budget.seconds is not None:
            limit = int((budget.seconds - self._costs.profile.base_seconds) * MICRO)
            yield GraphBound(limit, f"{budget.seconds:g} s", self._longest)
        if budget.memory is not None:
            limit = budget.memory - self._base(ladders)
            yield GraphBound(limit, f"memory {budget.memory} bytes", lambda ladder: self.price(ladder).memory, True)


def _in_bytes(mib: float) -> int:
    return round(mib * (1 << 20))


def _counted(budget: Budget, roles: Sequence[RoleInProgress]) -> Iterator[GraphBound]:
    if budget.max_graphs is not None:
        yield GraphBound(budget.max_graphs, f"max_graphs {budget.max_graphs}", lambda _: 1)
    for kind in Kind:
        allowed = budget.allowed_of(kind)
        if allowed is not None:
            yield GraphBound(allowed, f"graphs.{kind.value} {allowed}", _of_kind(kind))
    for working in roles:
        limits = {group.support.max_graphs: group.registered.name for group in working.groups}
        limits.pop(None, None)
        if limits:
            least = min(limits, key=lambda limit: limit or 0)
            yield GraphBound(least or 0, f"{limits[least]} can hold {least} full graphs", _full_of(working.role))


def _of_kind(kind: Kind) -> Callable[[Ladder], int]:
    return lambda ladder: int(ladder.kind is kind)


def _full_of(role: Role) -> Callable[[Ladder], int]:
    return lambda ladder: int(ladder.role is role and ladder.mode is GraphMode.FULL)
