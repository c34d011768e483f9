"""The table that costs least within a budget: where that is exact, where not, and what no budget may leave out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from capture_planner.errors import BudgetError, Problem
from capture_planner.modes import Reason
from capture_planner.planning.bounds import MICRO, BudgetBounds, GraphBound, reduced
from capture_planner.planning.costs import Costs
from capture_planner.planning.coverage import MOST_SETS, Programs, Table, least_table
from capture_planner.planning.demand import Team, eager_of
from capture_planner.planning.role import RoleInProgress
from capture_planner.planning.sizing import Ladder
from capture_planner.records._base import replace
from capture_planner.records.batch import Kind
from capture_planner.records.spec import Spec

_DOUBLINGS = 4
"""How often a bound on seconds is doubled, as each graph of a ladder is charged as its largest."""


@attrs.frozen(kw_only=True)
class BudgetedTable:
    """The table, and its ladders with their sizes."""

    table: Table
    ladders: tuple[Ladder, ...]
    bounds: BudgetBounds
    notes: tuple[str, ...]
    """What keeps another table from being known to cost no less."""
    warning: str | None = None
    """Which bounds leave no graph at all."""


def table_within(
    spec: Spec,
    roles: Sequence[RoleInProgress],
    costs: Costs,
    ladders: Sequence[Ladder],
    teams: Sequence[Team],
    *,
    regret: bool,
) -> BudgetedTable:
    """Return the table that costs least within the budget of ``spec``.

    The seconds of a graph depend on its size, and the search adds up what is the same for all sizes of a ladder: that
    of the largest. So it is first made without the bound, then with larger ones, until what it finds is within it.
    The larger bounds are powers of two, whatever the budget is: so a larger budget never costs more.

    :param ladders: without sizes, in the order in which the roles have them.
    :raises BudgetError: the budget leaves no graphs for passes that the profile has no eager times of.
    """
    bounds = BudgetBounds(spec, roles, costs)
    programs: Programs = {}
    for charged in _charged(spec, roles, costs, bounds):
        table = least_table(teams, charged, costs, regret=regret, programs=programs)
        sized = _sized(ladders, table, bounds)
        if charged is bounds or bounds.hold(sized):
            break
    _refuse_absent(teams, table, bounds, costs)
    notes = []
    if not table.proven:
        notes.append(
            f"{len(teams)} kinds of graphs have too many sets to try all: of the {MOST_SETS} that lose least and the "
            "cheapest of each number this is the best, and another may cost less"
        )
    if table.groups and charged.seconds is not None and charged.is_estimate:
        taken = bounds.micros(sized) / MICRO
        notes.append(
            f"capturing takes {taken:.3g} of {spec.budget.seconds:g} s; the search charged each graph as the largest "
            "of its ladder, so another table within the budget may cost less"
        )
    if len([team for team in teams if team.kind is Kind.MIXED and bounds.has_pool(team.ladders)]) > 1:
        notes.append("mixed batches of two roles are sized apart, and each is charged for the pool that both grow")
    return BudgetedTable(
        table=table,
        ladders=tuple(sized),
        bounds=bounds,
        notes=tuple(notes),
        warning=None if table.groups or not teams else _nothing(teams, bounds),
    )


def _charged(spec: Spec, roles: Sequence[RoleInProgress], costs: Costs, bounds: BudgetBounds) -> Iterator[BudgetBounds]:
    """Yield the bounds to search within, the loosest first, and the budget's own last."""
    base = costs.profile.base_seconds
    if bounds.seconds is not None and bounds.is_estimate and bounds.seconds > base:
        yield BudgetBounds(replace(spec, budget=replace(spec.budget, seconds=None)), roles, costs)
        first = int((bounds.seconds - base) * MICRO).bit_length()
        for power in reversed(range(first, first + _DOUBLINGS)):
            seconds = base + (1 << power) / MICRO
            yield BudgetBounds(replace(spec, budget=replace(spec.budget, seconds=seconds)), roles, costs)
    yield bounds


def _sized(ladders: Sequence[Ladder], table: Table, bounds: BudgetBounds) -> list[Ladder]:
    """Return the ladders with their sizes, and with all LoRA cases where the bounds leave room."""
    sizes = {ladder: group.sizes for group in table.groups for ladder in group.team.ladders}
    sized = []
    for ladder in ladders:
        if ladder in table.waived:
            sized.append(ladder.dropped(Reason.BUDGET))
            continue
        found = sizes.get(ladder, ())
        covered = ladder.domain.clipped(found[-1] if found else 0) if ladder.kind is Kind.MIXED else ladder.domain
        sized.append(attrs.evolve(reduced(ladder), sizes=found, domain=covered))
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
    for bound, least in zip(bounds.all, bounds.least([team.ladders for team in needed]), strict=True):
        if least > bound.limit:
            message = f"{bound.text} leaves {named} without a graph, and the profile has no eager times of that"
            remedy = f"the smallest budget is {bound.amount(least)}; raise it, or measure eager times too"
            problems.append(Problem(path=bound.path, message=message, remedy=remedy))
    raise BudgetError(problems)


def _nothing(teams: Sequence[Team], bounds: BudgetBounds) -> str | None:
    """Say which bounds leave no graph, and which would leave one."""
    each = [bounds.least([team.ladders]) for team in teams]

    def text(bound: GraphBound, index: int) -> str:
        return f"{bound.text}, where the cheapest takes {bound.amount(min(least[index] for least in each))}"

    short = [(index, bound) for index, bound in enumerate(bounds.all)]
    words = [text(bound, index) for index, bound in short if min(least[index] for least in each) > bound.limit]
    return f"no graph is within the budget: {'; '.join(words)}" if words else None
