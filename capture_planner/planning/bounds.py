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
    path: tuple[str, ...]
    """Of the budget in a spec; empty: it is a backend's."""
    text: str
    each: Callable[[Ladder], int]
    """What a graph of a ladder takes, or the most that any does."""
    amount: Callable[[int], str] = str
    """Write what is taken, as a budget has it, rounded up."""
    is_memory: bool = False
    exact: Callable[[Ladder], int] | None = None
    """What all graphs of a ladder take, where ``each`` is more than some do."""

    def taken(self, ladder: Ladder) -> int:
        """Return what all graphs of a ladder take, apart from its pool."""
        return self.each(ladder) * ladder.num_graphs if self.exact is None else self.exact(ladder)


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
        ladders = [ladder for working in roles for ladder in working.ladders]
        self.all = (*_counted(spec.budget, roles), *self._measured(spec.budget, ladders))
        self.seconds = spec.budget.seconds
        self.is_estimate = any(self.price(ladder).micros_per_token for ladder in ladders if ladder.domain)
        """Whether graphs of one ladder take different times to capture."""

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

    def least(self, teams: Iterable[Sequence[Ladder]]) -> tuple[int, ...]:
        """Return what the fewest graphs of teams of ladders take of each bound: one of the smallest largest size."""
        ladders = [reduced(ladder) for team in teams for ladder in team]
        tops = [
            (each, each.domain.ceiling if each.kind is Kind.DECODE else max((1, *each.anchors))) for each in ladders
        ]
        pool = sum(self.pools(tops).values())
        return tuple(taken + pool * bound.is_memory for taken, bound in zip(self.takes(ladders), self.all, strict=True))

    def has_pool(self, ladders: Iterable[Ladder]) -> bool:
        """Say whether the largest graphs of ladders take of a bound on memory."""
        pools = self.pools((ladder, ladder.domain.ceiling) for ladder in ladders)
        return any(bound.is_memory for bound in self.all) and any(pools.values())

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
            taken = sum(bound.taken(ladder) for ladder in ladders if ladder.sizes)
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
        return sum(map(self._micros, ladders)) + round(self._costs.profile.base_seconds * MICRO)

    def _micros(self, ladder: Ladder) -> int:
        """Return the microseconds of a ladder's graphs, each by its own size."""
        return sum(self._micros_at(ladder, size) * len(ladder.served(size)) for size in ladder.sizes)

    def _base(self, ladders: Iterable[Ladder]) -> int:
        """Return the bytes that capturing takes once in each pool."""
        pools = len({ladder.role for ladder in ladders if ladder.domain}) if self._pool is Pool.PER_ROLE else 1
        return pools * _in_bytes(self._costs.profile.base_mib)

    def _longest(self, ladder: Ladder) -> int:
        """Return the microseconds of a ladder's largest graph, which each of its graphs counts with."""
        return self._micros_at(ladder, ladder.domain.ceiling)

    def _micros_at(self, ladder: Ladder, size: int) -> int:
        price = self.price(ladder)
        return math.ceil(price.micros + price.micros_per_token * size * (ladder.query_len or 1))

    def _measured(self, budget: Budget, ladders: Sequence[Ladder]) -> Iterator[GraphBound]:
        if budget.seconds is not None:
            base = self._costs.profile.base_seconds
            yield GraphBound(
                limit=int((budget.seconds - base) * MICRO),
                path=("budget", "seconds"),
                text=f"seconds {budget.seconds:g}",
                each=self._longest,
                amount=lambda micros: f"{math.ceil((micros / MICRO + base) * 1000) / 1000:g}",
                exact=self._micros,
            )
        if budget.memory is not None:
            own = self._base(ladders)
            yield GraphBound(
                limit=budget.memory - own,
                path=("budget", "memory"),
                text=f"memory {budget.memory / (1 << 20):g}MiB",
                each=lambda ladder: self.price(ladder).memory,
                amount=lambda size: f"{math.ceil((size + own) / (1 << 20))}MiB",
                is_memory=True,
            )


def _in_bytes(mib: float) -> int:
    return round(mib * (1 << 20))


def _counted(budget: Budget, roles: Sequence[RoleInProgress]) -> Iterator[GraphBound]:
    if budget.max_graphs is not None:
        path = ("budget", "max_graphs")
        yield GraphBound(limit=budget.max_graphs, path=path, text=f"max_graphs {budget.max_graphs}", each=lambda _: 1)
    for kind in Kind:
        allowed = budget.allowed_of(kind)
        if allowed is not None:
            text = f"graphs.{kind.value} {allowed}"
            yield GraphBound(limit=allowed, path=("budget", "graphs", kind.value), text=text, each=_of_kind(kind))
    for working in roles:
        limits = {group.support.max_graphs: group.registered.name for group in working.groups}
        limits.pop(None, None)
        if limits:
            least = min(limits, key=lambda limit: limit or 0)
            text = f"{limits[least]} can hold {least} full graphs"
            yield GraphBound(limit=least or 0, path=(), text=text, each=_full_of(working.role))


def _of_kind(kind: Kind) -> Callable[[Ladder], int]:
    return lambda ladder: int(ladder.kind is kind)


def _full_of(role: Role) -> Callable[[Ladder], int]:
    return lambda ladder: int(ladder.role is role and ladder.mode is GraphMode.FULL)
