"""Which kinds of batch have graphs, and which sizes: the table that costs least within every bound.

A team of ladders is waived where that costs less than what its graphs take from the others. Its price: decodes run on
mixed graphs of their role where those are large enough, chains of draft decodes on single steps, and all else runs
eager. Sets of waived teams are taken in the order of what each costs at least, until none can cost less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from fractions import Fraction

import attrs

from capture_planner.planning.bounds import BudgetBounds, PoolKey, reduced
from capture_planner.planning.costs import Costs
from capture_planner.planning.demand import UNKNOWN, Team, eager_of, problem_of, serves, waived
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.allocation import SizeGroup, allocate
from capture_planner.planning.sizing.program import LadderProgram, Value
from capture_planner.planning.sizing.subsets import by_largest, by_sum
from capture_planner.planning.sizing.worst import least_worst
from capture_planner.records.batch import Kind

MOST_SETS = 1024
"""Sets of waived teams that are tried: all of ten teams, and of more those that may cost least."""

MOST_LISTED = 1 << 16
"""Sets of waived teams that are listed, whether they leave room for the others or not."""

Waivers = frozenset[int]

Programs = MutableMapping[tuple[int, Waivers], LadderProgram]
"""The programs of teams, by index, that also serve the passes of waived ones: the same for all bounds."""


@attrs.frozen(kw_only=True)
class SizedGroup:
    """A team that has graphs, with what was chosen."""

    team: Team
    group: SizeGroup
    indices: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.group.problem.sizes[index] for index in self.indices)

    @property
    def cost(self) -> Value:
        return self.group.problem.cost(self.indices)


@attrs.frozen(kw_only=True)
class Table:
    """The teams that have graphs, and the ladders that have none."""

    groups: tuple[SizedGroup, ...]
    waived: frozenset[Ladder]
    value: Value
    """What all passes cost that some ladder could serve."""
    worst: Fraction
    """The largest ratio of a batch's time to the time of its own size; a waived team's batches count as eager."""
    proven: bool = True
    """Whether no other table within the bounds costs less; False where there were too many sets of teams to try."""


def least_table(
    teams: Sequence[Team], bounds: BudgetBounds, costs: Costs, *, regret: bool, programs: Programs | None = None
) -> Table:
    """Return the table that costs least.

    Of equal ones, that with the fewest waived teams, then with the fewest sizes.

    :param regret: whether the worst ratio is to be least, rather than the cost.
    :param programs: programs that were solved for the same teams under other bounds.
    """
    search = _WaivedSets(teams, bounds, costs, {} if programs is None else programs)
    best: _Ranked | None = None
    tried, proven = 0, True
    for number, (least, dropped) in enumerate(search.sets(regret=regret)):
        # Of equal costs the fewest waived teams come first, so that later sets are no better.
        if best is not None and (least > best[0][0] or (least == best[0][0] and len(dropped) > best[0][1])):
            break
        if tried == MOST_SETS or number == MOST_LISTED:
            proven = False
            break
        if search.leaves_room(dropped):
            tried += 1
            best = _better(best, search.table(dropped, regret=regret), len(dropped), regret=regret)
    for dropped in () if proven else search.cheapest():
        best = _better(best, search.table(dropped, regret=regret), len(dropped), regret=regret)
    assert best is not None, "without graphs, nothing exceeds a bound"
    return attrs.evolve(best[1], proven=proven)


_Ranked = tuple[tuple[Value | Fraction, int, int], Table]


def _better(best: _Ranked | None, table: Table | None, waived_teams: int, *, regret: bool) -> _Ranked | None:
    """Return the better of the best so far and of another table, which is None where none is within the bounds."""
    if table is None:
        return best
    rank = table.worst if regret else table.value, waived_teams, sum(len(each.indices) for each in table.groups)
    return (rank, table) if best is None or rank < best[0] else best


class _WaivedSets:
    """What sets of waived teams cost."""

    def __init__(self, teams: Sequence[Team], bounds: BudgetBounds, costs: Costs, programs: Programs) -> None:
        self._teams, self._bounds, self._costs = teams, bounds, costs
        self._takes = [bounds.takes(map(reduced, team.ladders)) for team in teams]
        self._programs = programs
        short = any(bound.limit < 0 for bound in bounds.all)
        self._may_be_waived = [
            index
            for index, team in enumerate(teams)
            if short or any(self._takes[index]) or self._pools(team) is not None
        ]

    def sets(self, *, regret: bool) -> Iterator[tuple[Value | Fraction, Waivers]]:
        """Yield sets of waived teams, each with what tables without them cost at least, ascending."""
        if regret:
            yield from by_largest({index: self._ratio(index) for index in self._may_be_waived})
            return
        total = sum(self._every_size(index) for index in range(len(self._teams)))
        for lost, dropped in by_sum(self._losses()):
            yield total + lost, dropped

    def leaves_room(self, dropped: Waivers) -> bool:
        """Say whether the other teams have room for one size each, apart from their pools."""
        alive = [takes for index, takes in enumerate(self._takes) if index not in dropped]
        return not alive or all(
            sum(taken) <= bound.limit for taken, bound in zip(zip(*alive, strict=True), self._bounds.all, strict=True)
        )

    def cheapest(self) -> Iterator[Waivers]:
        """Yield sets of one more team each, up to all, those first that lose least."""
        losses = self._losses()
        cheap = sorted(losses, key=lambda index: losses[index])
        return (frozenset(cheap[:number]) for number in range(len(cheap) + 1))

    def _losses(self) -> dict[int, Value]:
        """Return what each team that may be waived loses by that at least."""
        return {index: self._least(index) - self._every_size(index) for index in self._may_be_waived}

    def _every_size(self, index: int) -> Value:
        return self._program(index, frozenset()).problem.every_size

    def table(self, dropped: Waivers, *, regret: bool) -> Table | None:
        """Return the best table in which exactly these teams are waived; None: none is within the bounds."""
        alive = [index for index in range(len(self._teams)) if index not in dropped]
        fixed = self._bounds.pools(
            (ladder, ladder.domain.ceiling)
            for index in alive
            if self._teams[index].kind is Kind.DECODE
            for ladder in self._teams[index].ladders
        )
        taken = sum(fixed.values())
        limits = [bound.limit - taken * bound.is_memory for bound in self._bounds.all]
        groups = []
        for index in alive:
            team = self._teams[index]
            moved = frozenset(each for each in dropped if serves(team, self._teams[each]))
            program = self._program(index, moved)
            groups.append(SizeGroup(program=program, takes=self._takes[index], pool=self._pool(team, program, fixed)))
        if not groups:
            chosen: list[tuple[int, ...]] | None = []
        else:
            chosen = (least_worst if regret else allocate)(groups, limits)
        if chosen is None:
            return None
        sized = tuple(
            SizedGroup(team=self._teams[index], group=group, indices=indices)
            for index, group, indices in zip(alive, groups, chosen, strict=True)
        )
        lost = sum(
            waived(team, self._serving(team, alive), self._costs) for team in map(self._teams.__getitem__, dropped)
        )
        ratios = [each.group.problem.worst(each.indices) for each in sized] + [self._ratio(index) for index in dropped]
        return Table(
            groups=sized,
            waived=frozenset(ladder for index in dropped for ladder in self._teams[index].ladders),
            value=sum(each.cost for each in sized) + lost,
            worst=max([Fraction(1), *ratios]),
        )

    def _program(self, index: int, moved: Waivers) -> LadderProgram:
        key = index, moved
        if key not in self._programs:
            decodes = [self._teams[each] for each in sorted(moved)]
            self._programs[key] = LadderProgram(problem_of(self._teams[index], self._costs, decodes))
        return self._programs[key]

    def _least(self, index: int) -> Value:
        team = self._teams[index]
        return waived(team, self._serving(team, range(len(self._teams))), self._costs, least=True)

    def _serving(self, team: Team, alive: Iterable[int]) -> list[Team]:
        return [self._teams[each] for each in alive if serves(self._teams[each], team)]

    def _ratio(self, index: int) -> Fraction:
        """Return the largest ratio of an eager pass of a team to one in a graph of its own size."""
        if any(eager_of(ladder, self._costs) is None for ladder in self._teams[index].ladders):
            return Fraction(UNKNOWN)
        return self._program(index, frozenset()).problem.eager_ratio

    def _pools(self, team: Team) -> tuple[int, ...] | None:
        if not any(bound.is_memory for bound in self._bounds.all):
            return None
        ceiling = sum(self._bounds.pools((ladder, ladder.domain.ceiling) for ladder in team.ladders).values())
        return (ceiling,) if ceiling else None

    def _pool(self, team: Team, program: LadderProgram, fixed: Mapping[PoolKey, int]) -> tuple[int, ...] | None:
        """Return what the largest size of mixed ladders takes of the memory, beyond the pools of the decodes."""
        if team.kind is Kind.DECODE or self._pools(team) is None:
            return None
        extra = []
        for size in program.problem.sizes:
            own = self._bounds.pools((ladder, size) for ladder in team.ladders)
            extra.append(sum(max(taken - fixed.get(pool, 0), 0) for pool, taken in own.items()))
        return tuple(extra) if any(extra) else None
