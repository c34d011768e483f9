"""The search for the table that costs least: which kinds of batch have graphs, and which sizes, within every bound.

A team of ladders is waived where that costs less than what its graphs take from the others. Its price: decodes run on
mixed graphs of their role where those are large enough, chains of draft decodes on single steps, and all else runs
eager. Sets of waived teams are taken in the order of what each costs at least, until none can cost less.

Decodes of the target keep their graphs, and so do those whose substitute has no times of its own mode, as long as the
budget holds their least table.

No step is to take much longer than on a graph of its own size, whatever the traffic, and no batch that fits a measured
size is to run on one whose time is assumed. Limits that the budget or ``PRICE`` does not allow are loosened.

Of tables that cost nearly the same as the best, the one that is easier to review is taken: sizes move to those of
today, or to round ones, those first that cost least by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from fractions import Fraction
from functools import cached_property
from heapq import merge
from itertools import chain, combinations, product
from operator import itemgetter

import attrs

from capture_planner.errors import BudgetError, Problem
from capture_planner.modes import Reason, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.allocation import TOLERANCE, SizeGroup, allocate, by_largest, by_sum, least_worst
from capture_planner.planning.measured.bounds import MICRO, BudgetBounds, PoolKey
from capture_planner.planning.measured.teams import SCALE, Team, eager_of, problem_of, ratio_alone, serves, waived
from capture_planner.planning.sizing import Ladder
from capture_planner.planning.sizing.program import TAIL, LadderProgram, Value
from capture_planner.records.batch import Kind
from capture_planner.records.measurements import Graphs

MOST_SETS = 1024
"""Sets of waived teams that are tried: all of ten teams, and of more those that may cost least."""

MOST_LISTED = 1 << 16
"""Sets of waived teams that are listed, whether they leave room for the others or not."""

DOUBLINGS = 4
"""Doublings of a bound on seconds, as each graph of a ladder is charged as its largest."""

PRICE = Fraction(5, 1000)
"""Most extra time of a mean step for the bound on the worst one, as a share."""

NEARLY = Fraction(1, 1000)
"""Most extra cost of a table with preferred sizes over the best, as a share."""

ROUND = 8
"""Sizes of which multiples are preferred where there are no graphs of their kind today."""

Waivers = frozenset[int]

_Ranked = tuple[tuple[Value | Fraction, int, int], "Table"]
"""A table behind what it is ranked by: less is better."""

Programs = MutableMapping[tuple[int, Waivers, Fraction | None, bool], LadderProgram]
"""Programs of teams by index, by the waived ones that they serve too, and by the limit: the same for all bounds."""


@attrs.frozen
class Limit:
    """What sizes must keep to: the ratio of a batch's time to the time of its own size; None: any."""

    decodes: Fraction | None = None
    mixed: Fraction | None = None
    """No less than that of decodes, which mixed graphs may serve."""
    measured: bool = False
    """Whether batches that fit a measured size must not run on one that was not measured."""

    def of(self, team: Team, *, moved: bool = False) -> Fraction | None:
        """Return that of a team; ``moved``: mixed graphs serve decodes too."""
        return self.decodes if team.kind is Kind.DECODE or moved else self.mixed

    def __str__(self) -> str:
        named = (("decodes", self.decodes), ("mixed batches", self.mixed))
        return ", ".join(f"{float(bound - 1):.0%} for {name}" for name, bound in named if bound is not None) or "none"


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
    """Cost of all passes that some ladder could serve, in nanoseconds times the weights' scale."""
    worst: Fraction
    """The largest ratio of a batch's time to the time of its own size, on the graph that serves it, or eager."""
    limit: Limit = Limit()
    """Bound that the ratio was kept within."""
    proven: bool = True
    """True if no other table within the bounds costs less; False if there were too many sets of teams to try."""


@attrs.frozen(kw_only=True)
class Aim:
    """The objective of a search."""

    regret: bool = False
    """True to minimize the worst ratio rather than the cost."""
    limits: tuple[Limit, ...] = (Limit(),)
    """Limits to try in turn, the strictest first."""
    base: int = 0
    """Nanoseconds of a step besides its passes, which ratios count with."""


@attrs.frozen(kw_only=True)
class BudgetedTable:
    """The table, and its ladders with their sizes."""

    table: Table
    ladders: tuple[Ladder, ...]
    bounds: BudgetBounds
    slowdown: float
    """Worst extra time of a step over a graph of its own size, as a share; 0 for regret."""
    max_slowdown: float
    """The bound on ``slowdown`` that was wanted, as a share."""
    notes: tuple[str, ...]
    """Reasons why another table may cost less."""
    warning: str | None = None
    """The bounds that leave no graph at all, in words; None: some are left."""


def table_within(
    bounds: BudgetBounds, costs: Costs, ladders: Sequence[Ladder], teams: Sequence[Team], aim: Aim, today: Graphs = ()
) -> BudgetedTable:
    """Return the table that costs least within a budget.

    The seconds of a graph depend on its size, and the search adds up what is the same for all sizes of a ladder: that
    of the largest. So it is first made without the bound, then with larger ones, until what it finds is within it.
    The larger bounds are powers of two, whatever the budget is: so a larger budget never costs more.

    :param ladders: without sizes, in the order in which the roles have them.
    :param today: graphs whose sizes are preferred where that costs nearly nothing.
    :raises BudgetError: the budget leaves no graphs for passes that the profile has no eager times of.
    """
    programs: Programs = {}
    for charged in _charged(bounds, costs.profile.base_seconds, aim):
        table = least_table(teams, charged, costs, aim, programs=programs)
        sized = _sized(ladders, table, bounds)
        # The budget's own bounds come last, and charge no graph less than it takes.
        if charged is bounds or bounds.hold(sized):
            break
    _refuse_absent(teams, table, bounds, costs)
    if not aim.regret:  # of a worst ratio, each size next to the best one may be the worst
        table = with_preferred(table, today, lambda changed: bounds.hold(_sized(ladders, changed, bounds)))
        sized = _sized(ladders, table, bounds)
    first = aim.limits[0].decodes
    return BudgetedTable(
        table=table,
        ladders=tuple(sized),
        bounds=bounds,
        slowdown=0.0 if first is None else float(table.worst - 1),
        max_slowdown=0.0 if first is None else float(first - 1),
        notes=tuple(_notes(table, sized, teams, aim, bounds, charged)),
        warning=None if table.groups or not teams else _nothing(teams, bounds),
    )


def _notes(
    table: Table, sized: Sequence[Ladder], teams: Sequence[Team], aim: Aim, bounds: BudgetBounds, charged: BudgetBounds
) -> Iterator[str]:
    """Say what keeps another table from being known to cost no less, and which bound on the worst step is not kept."""
    first = aim.limits[0]
    if first.decodes is not None and table.limit != attrs.evolve(first, measured=table.limit.measured):
        yield (
            f"of the sizes tried the budget holds none by which each step takes at most {float(first.decodes - 1):.0%} "
            f"longer than on a graph of its own size, at a price of at most {float(PRICE):.1%} of a mean step; the "
            f"bound is {table.limit} in its place, and with these one takes up to {float(table.worst - 1):.0%} longer"
        )
    if first.measured and not table.limit.measured:
        yield f"no table within the budget and {float(PRICE):.1%} of the best runs batches on measured sizes that fit"
    if not table.proven:
        yield (
            f"{len(teams)} kinds of graphs have too many sets to try all: of the {MOST_SETS} that lose least and the "
            "cheapest of each number this is the best, and another may cost less"
        )
    if table.groups and charged.seconds is None and len(bounds.all) == 1 and bounds.seconds is not None:
        yield f"{bounds.seconds:g} s are more than the fewest sizes within {float(TOLERANCE):.0%} of every size take"
    if table.groups and charged.seconds is not None and charged.is_estimate:
        yield (
            f"capturing takes {bounds.micros(sized) / MICRO:.3g} of {bounds.seconds:g} s; the search charged each "
            "graph as the largest of its ladder, so another table within the budget may cost less"
        )
    if bounds.is_shared and sum(each.kind is Kind.MIXED and bounds.has_pool(each.ladders) for each in teams) > 1:
        yield "mixed batches of two roles are sized apart, and each is charged for the pool that both grow"


def _charged(bounds: BudgetBounds, base: float, aim: Aim) -> Iterator[BudgetBounds]:
    """Yield the bounds to search within, the loosest first, and the budget's own last.

    Without a bound on seconds a mean is near to the least; a worst ratio is not, unless other bounds decide it.

    :param base: seconds that capturing takes besides the graphs.
    """
    if bounds.seconds is not None and bounds.is_estimate and bounds.seconds > base:
        if not aim.regret:
            yield bounds.with_seconds(None)
        first = int((bounds.seconds - base) * MICRO).bit_length()
        for power in reversed(range(first, first + DOUBLINGS)):
            yield bounds.with_seconds(base + (1 << power) / MICRO)
    yield bounds


def _sized(ladders: Sequence[Ladder], table: Table, bounds: BudgetBounds) -> list[Ladder]:
    """Return the ladders with their sizes, and with all LoRA cases where the bounds leave room."""
    sizes = {ladder: group.sizes for group in table.groups for ladder in group.team.ladders}
    sized = []
    for ladder in ladders:
        # A ladder that gains nothing has no sizes either, but no budget took them.
        if ladder in table.waived:
            sized.append(ladder.dropped(Reason.BUDGET))
            continue
        found = sizes.get(ladder, ())
        covered = ladder.domain.clipped(found[-1] if found else 0) if ladder.kind is Kind.MIXED else ladder.domain
        sized.append(attrs.evolve(ladder.reduced, sizes=found, domain=covered))
    # The search had the fewest LoRA cases; the others come back one ladder at a time, where there is room.
    for index, ladder in enumerate(ladders):
        full = attrs.evolve(sized[index], cases=ladder.cases)
        if sized[index].sizes and full != sized[index] and bounds.hold([*sized[:index], full, *sized[index + 1 :]]):
            sized[index] = full
    return sized


def _refuse_absent(teams: Sequence[Team], table: Table, bounds: BudgetBounds, costs: Costs) -> None:
    """Refuse a table in which passes run eager that the profile has no eager times of."""
    needed = [team for team in teams if any(eager_of(ladder, costs) is None for ladder in team.ladders)]
    absent = [ladder for team in needed for ladder in team.ladders if eager_of(ladder, costs) is None]
    if table.waived.isdisjoint(absent):
        return
    named = ", ".join(dict.fromkeys(f"{ladder.role} ({ladder})" for ladder in absent))
    problems = []
    # Each bound by itself: raising only one may not be enough, but each of these has to be raised.
    for bound, least in zip(bounds.all, bounds.least([team.ladders for team in needed]), strict=True):
        if least > bound.limit:
            message = f"{bound.text} leaves {named} without a graph, and the profile has no eager times of that"
            remedy = f"the smallest budget is {bound.amount(least)}; raise it, or measure eager times too"
            problems.append(Problem(path=bound.path, message=message, remedy=remedy))
    raise BudgetError(problems)


def _nothing(teams: Sequence[Team], bounds: BudgetBounds) -> str | None:
    """Say which bounds leave no graph, and which would leave one."""
    cheapest = map(min, zip(*(bounds.least([team.ladders]) for team in teams), strict=True))
    words = [
        f"{bound.text}, where the cheapest takes {bound.amount(least)}"
        for bound, least in zip(bounds.all, cheapest, strict=True)
        if least > bound.limit
    ]
    return f"no graph is within the budget: {'; '.join(words)}" if words else None


def least_table(
    teams: Sequence[Team], bounds: BudgetBounds, costs: Costs, aim: Aim, *, programs: Programs | None = None
) -> Table:
    """Return the table that costs least.

    Of equal ones, that with the fewest waived teams, then with the fewest sizes.

    :param programs: programs that were solved for the same teams and the same aim under other bounds.
    """
    search = _WaivedSets(teams, bounds, costs, aim, {} if programs is None else programs)
    for forced in search.forced():
        free = _best_of(search, forced, Limit(), regret=aim.regret)
        if free is None:
            continue
        for limit in aim.limits:
            best = free if limit == Limit() else _best_of(search, forced, limit, regret=aim.regret)
            # A percentile gives up nothing: the mean alone pays (``TAIL``).
            if best is not None and best.value - free.value <= PRICE * (free.value % TAIL + aim.base * SCALE):
                return best
    raise AssertionError("without graphs, nothing exceeds a bound")


def _best_of(search: _WaivedSets, forced: Sequence[Waivers], limit: Limit, *, regret: bool) -> Table | None:
    """Return the best table in which one of the sets ``forced`` is waived, and others perhaps; None: none fits."""
    best: _Ranked | None = None
    tried, proven = 0, True
    sets = merge(*(search.sets(each, regret=regret) for each in forced), key=itemgetter(0))
    for number, (least, dropped) in enumerate(sets):
        # Of equal costs the fewest waived teams come first, so that later sets are no better.
        if best is not None and (least > best[0][0] or (least == best[0][0] and len(dropped) > best[0][1])):
            break
        if tried == MOST_SETS or number == MOST_LISTED:
            proven = False
            break
        if search.leaves_room(dropped, limit):
            tried += 1
            best = _better(best, search.table(dropped, limit, regret=regret), len(dropped), regret=regret)
    # Those tried lose little, so they may all leave too many graphs; one set of each number is tried in any case.
    for dropped in () if proven else chain.from_iterable(map(search.cheapest, forced)):
        best = _better(best, search.table(dropped, limit, regret=regret), len(dropped), regret=regret)
    return None if best is None else attrs.evolve(best[1], proven=proven)


def _better(best: _Ranked | None, table: Table | None, waived_teams: int, *, regret: bool) -> _Ranked | None:
    """Return the better of the best so far and of another table, which is None where none is within the bounds."""
    if table is None:
        return best
    rank = table.worst if regret else table.value, waived_teams, sum(len(each.indices) for each in table.groups)
    return (rank, table) if best is None or rank < best[0] else best


class _WaivedSets:
    """The costs of sets of waived teams."""

    def __init__(self, teams: Sequence[Team], bounds: BudgetBounds, costs: Costs, aim: Aim, programs: Programs) -> None:
        self._teams, self._bounds, self._costs, self._base = teams, bounds, costs, aim.base
        self._takes = [bounds.takes(ladder.reduced for ladder in team.ladders) for team in teams]
        self._programs = programs
        self._ratios: dict[tuple[int, tuple[int, ...]], Fraction] = {}
        short = any(bound.limit < 0 for bound in bounds.all)
        # Graphs that take of no bound are never waived, as long as the bounds allow for any.
        able = [
            index
            for index, team in enumerate(teams)
            if short or any(self._takes[index]) or bounds.has_pool(team.ladders)
        ]
        # Those that would be waived on assumed times alone are waived only where nothing else fits.
        self._kept = [index for index in able if self._is_kept(teams[index])]
        self._may_be_waived = [index for index in able if index not in self._kept]

    def forced(self) -> Iterator[list[Waivers]]:
        """Yield sets of kept teams that are waived nevertheless, alike ones together: fewest of the target's first.

        A later list counts only where nothing fits with the sets of an earlier one.
        """
        drafters, targets = (
            [index for index in self._kept if (Role.TARGET in self._teams[index].roles) is wanted]
            for wanted in (False, True)
        )
        for number, more in product(range(len(targets) + 1), range(len(drafters) + 1)):
            pairs = product(combinations(targets, number), combinations(drafters, more))
            yield [frozenset((*some, *others)) for some, others in pairs]

    def _is_kept(self, team: Team) -> bool:
        """Say whether decodes keep their graphs as long as there is room for any."""
        serving = [other for other in self._teams if serves(other, team)]
        # A FULL graph of the target is not traded for PIECEWISE ones.
        if serving and Role.TARGET in team.roles:
            return True
        # Assumed times never justify a waiver: these graphs must have times of their own mode.
        families = [ladder for each in (team, *serving) for ladder in each.ladders]
        return bool(serving) and not all(self._costs.has_mode(ladder.role, ladder.mode) for ladder in families)

    def sets(self, forced: Waivers, *, regret: bool) -> Iterator[tuple[Value | Fraction, Waivers]]:
        """Yield sets of waived teams, ``forced`` in each, with what tables without them cost at least, ascending."""
        if regret:
            least = max((self._least_ratio(index) for index in forced), default=Fraction(1))
            for ratio, dropped in by_largest({index: self._least_ratio(index) for index in self._may_be_waived}):
                yield max(ratio, least), dropped | forced
            return
        total = sum(self._every_size(index) for index in range(len(self._teams)))
        total += sum(self._least(index) - self._every_size(index) for index in forced)
        for lost, dropped in by_sum(self._losses):
            yield total + lost, dropped | forced

    def leaves_room(self, dropped: Waivers, limit: Limit) -> bool:
        """Say whether the other teams have room for one size each, apart from their pools."""
        if not self._is_within(dropped, limit):
            return False
        alive = [takes for index, takes in enumerate(self._takes) if index not in dropped]
        return not alive or all(
            sum(taken) <= bound.limit for taken, bound in zip(zip(*alive, strict=True), self._bounds.all, strict=True)
        )

    def cheapest(self, forced: Waivers) -> Iterator[Waivers]:
        """Yield sets of one more team each next to ``forced``, up to all, those first that lose least."""
        cheap = sorted(self._losses, key=self._losses.__getitem__)
        return (forced.union(cheap[:number]) for number in range(len(cheap) + 1))

    @cached_property
    def _losses(self) -> dict[int, Value]:
        """Return what each team that may be waived loses by that at least."""
        return {index: self._least(index) - self._every_size(index) for index in self._may_be_waived}

    def _every_size(self, index: int) -> Value:
        return self._program(index, frozenset()).problem.every_size

    def table(self, dropped: Waivers, limit: Limit, *, regret: bool) -> Table | None:
        """Return the best table in which exactly these teams are waived; None: none is within the bounds."""
        alive = [index for index in range(len(self._teams)) if index not in dropped]
        if not self._is_within(dropped, limit):
            return None
        # Decodes are captured up to their ceiling whatever their sizes are, so their part of the pools is known.
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
            program = self._program(index, moved, limit.of(team, moved=bool(moved)), measured=limit.measured)
            groups.append(SizeGroup(program=program, takes=self._takes[index], pool=self._pool(team, program, fixed)))
        # Without groups nothing is taken, even where a limit is negative.
        chosen = (least_worst if regret else allocate)(groups, limits) if groups else []
        if chosen is None:
            return None
        sized = tuple(
            SizedGroup(team=self._teams[index], group=group, indices=indices)
            for index, group, indices in zip(alive, groups, chosen, strict=True)
        )
        ratios = [ratio for _, ratio in self._ratios_of(dropped)]
        ratios += [each.group.problem.worst(each.indices) for each in sized]
        lost = sum(waived(self._teams[index], self._serving(index, alive), self._costs) for index in dropped)
        return Table(
            groups=sized,
            waived=frozenset(ladder for index in dropped for ladder in self._teams[index].ladders),
            value=sum(each.cost for each in sized) + lost,
            worst=max(ratios, default=Fraction(1)),
            limit=limit,
        )

    def _program(
        self, index: int, moved: Waivers, limit: Fraction | None = None, *, measured: bool = False
    ) -> LadderProgram:
        key = index, moved, limit, measured
        if key not in self._programs:
            team, decodes = self._teams[index], [self._teams[each] for each in sorted(moved)]
            if limit is None and not measured:
                # Where its largest size takes of the memory, a smaller one of the same time may be better.
                every_top = team.kind is Kind.MIXED and self._bounds.has_pool(team.ladders)
                problem = problem_of(team, self._costs, decodes, base=self._base, every_top=every_top)
            else:  # what sizes cost does not depend on the limit
                problem = self._program(index, moved).problem
            self._programs[key] = LadderProgram(problem, limit, measured)
        return self._programs[key]

    def _least(self, index: int) -> Value:
        serving = self._serving(index, range(len(self._teams)))
        return waived(self._teams[index], serving, self._costs, least=True)

    def _serving(self, index: int, alive: Iterable[int]) -> list[Team]:
        return [self._teams[each] for each in alive if serves(self._teams[each], self._teams[index])]

    def _is_within(self, dropped: Waivers, limit: Limit) -> bool:
        """Say whether the passes of waived teams that run eager are within a limit."""
        return all((most := limit.of(team)) is None or ratio <= most for team, ratio in self._ratios_of(dropped))

    def _ratios_of(self, dropped: Waivers) -> Iterator[tuple[Team, Fraction]]:
        alive = [index for index in range(len(self._teams)) if index not in dropped]
        return ((self._teams[index], self._alone(index, self._serving(index, alive))) for index in dropped)

    def _alone(self, index: int, serving: Sequence[Team]) -> Fraction:
        key = index, tuple(map(id, serving))
        if key not in self._ratios:
            self._ratios[key] = ratio_alone(self._teams[index], serving, self._costs, self._base)
        return self._ratios[key]

    def _least_ratio(self, index: int) -> Fraction:
        """Return what the ratio of a team is at least if it is waived."""
        serving = self._serving(index, range(len(self._teams)))
        return ratio_alone(self._teams[index], serving, self._costs, self._base, least=True)

    def _pool(self, team: Team, program: LadderProgram, fixed: Mapping[PoolKey, int]) -> tuple[int, ...] | None:
        """Return what the largest size of mixed ladders takes of the memory, beyond the pools of the decodes."""
        if team.kind is Kind.DECODE or not self._bounds.has_pool(team.ladders):
            return None
        # The decodes' largest graphs have their part of each pool already.
        extra = []
        for size in program.problem.sizes:
            own = self._bounds.pools((ladder, size) for ladder in team.ladders)
            extra.append(sum(max(taken - fixed.get(pool, 0), 0) for pool, taken in own.items()))
        return tuple(extra) if any(extra) else None


def with_preferred(table: Table, today: Graphs, holds: Callable[[Table], bool]) -> Table:
    """Return a table that costs at most ``NEARLY`` more than the best one, with more sizes of ``today``.

    No percentile is given up, nor the bound on the worst step.

    :param today: the role and the entry of each graph that there is.
    :param holds: whether a table is within the budget.
    """
    # Of the mean only: the weight of a percentile's batch is no cost.
    room = int(table.value % TAIL * NEARLY)
    wanted = [_wanted(group, today) for group in table.groups]
    moves = sorted(
        (delta, number, place, index)
        for number, group in enumerate(table.groups)
        for delta, place, index in _moves(group, wanted[number])
    )
    for _, number, place, index in moves:
        group = table.groups[number]
        if wanted[number](group.sizes[place]):
            continue
        # Sizes next to it may have moved before, so what this one costs is computed again.
        moved, problem = _replaced(group.indices, place, index), group.group.problem
        # Another size may have moved to this place, or beyond it.
        if list(moved) != sorted(set(moved)):
            continue
        delta, worst = problem.cost(moved) - group.cost, problem.worst(moved)
        assumed = table.limit.measured and moved[-1] > problem.border >= 0 and problem.border not in moved
        limit = table.limit.of(group.team, moved=bool(table.waived))
        if assumed or delta > room or (limit is not None and worst > limit):
            continue
        groups = (*table.groups[:number], attrs.evolve(group, indices=moved), *table.groups[number + 1 :])
        changed = attrs.evolve(table, groups=groups, value=table.value + delta, worst=max(table.worst, worst))
        if holds(changed):
            table, room = changed, room - delta
    if table.waived or not moves:  # the eager passes of those that are waived may be the worst
        return table
    return attrs.evolve(table, worst=max(each.group.problem.worst(each.indices) for each in table.groups))


def _wanted(group: SizedGroup, today: Graphs) -> Callable[[int], bool]:
    """Return whether a size of a group is preferred."""
    first = group.team.ladders[0]
    sizes = {
        entry.num_tokens if first.kind is Kind.MIXED else entry.num_tokens // (entry.query_len or 1)
        for role, entry in today
        if role is first.role and entry.query_len == first.query_len
    }
    return sizes.__contains__ if sizes else lambda size: size % ROUND == 0


def _moves(group: SizedGroup, wanted: Callable[[int], bool]) -> Iterator[tuple[Value, int, int]]:
    """Yield what it costs more to move a size to the next preferred one above or below, its place, and that one."""
    problem, indices = group.group.problem, group.indices
    for place, index in enumerate(indices):
        if wanted(problem.sizes[index]):
            continue
        low = indices[place - 1] if place else -1
        high = indices[place + 1] if place + 1 < len(indices) else len(problem.sizes)
        for ahead in (range(index + 1, high), range(index - 1, low, -1)):
            near = next((each for each in ahead if wanted(problem.sizes[each])), None)
            # The largest size stays large enough for what must be covered.
            if near is not None and (place + 1 < len(indices) or near >= problem.least_top):
                yield problem.cost(_replaced(indices, place, near)) - group.cost, place, near


def _replaced(indices: Sequence[int], place: int, index: int) -> tuple[int, ...]:
    return (*indices[:place], index, *indices[place + 1 :])
