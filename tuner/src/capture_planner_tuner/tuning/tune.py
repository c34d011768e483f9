"""Tune: of the tables of a deployment that measurements choose, the one to propose next to what it captures today.

Guards come first: what a proposal must not do, whatever it gains by the steps that were seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from statistics import fmean

import attrs

from capture_planner.analysis.lint import Finding, Severity, lint
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.spec_of import explicit_sizes
from capture_planner.errors import BudgetError
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.costs import Costs
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Kind
from capture_planner.records.batch_space import batches, extra_slots, kind_of, split_when
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Budget, KindGraphs, Roles, Sizes, Spec
from capture_planner.records.text import counted
from capture_planner_tuner.tuning.judgement import (
    LEAST_LINES,
    LEAST_STEPS,
    SPREAD,
    Evidence,
    Noise,
    Pricing,
    SideFigures,
    TuneVerdict,
    is_slower,
    judged,
    noise_between,
    subject_of,
    verdict_on,
)

FindingKey = tuple[str, Role | None]
"""The code of a rule and the role that it is about."""

Lost = tuple[Batch, int, GraphMode, GraphMode]
"""A batch, the last extent that it stands for, its mode today, and its mode in the proposal."""

_RANK = {GraphMode.NONE: 0, GraphMode.PIECEWISE: 1, GraphMode.FULL: 2}


def finding_key(finding: Finding) -> FindingKey:
    """Return what makes a finding of two plans the same one."""
    return finding.rule.code, finding.diagnostic.role


EVERY = Evidence(is_estimate=True)
"""No batch may lose its graph."""


def lost_graphs(today: Emulation, proposed: Emulation, evidence: Evidence | None = None) -> tuple[str, ...]:
    """Return which batches lose their graph, or a full one, in sentences.

    Batches that an observation has no answer for are left out.
    """
    return tuple(_described(_lost(today, proposed, evidence or Evidence())))


def _lost(today: Emulation, proposed: Emulation, evidence: Evidence) -> list[Lost]:
    lost: list[Lost] = []
    for role in [each for each in today.modes if each in proposed.modes]:
        for batch, last in _asked(today, proposed, role):
            # The dispatch of mixed batches is most of the work; skip it where they may lose graphs.
            if batch.kind is Kind.MIXED and not evidence.keeps_mixed:
                continue
            before = today.dispatch(batch)
            counts = evidence.is_estimate or batch.kind is Kind.MIXED or before.mode is GraphMode.FULL
            # What an observation does not know cannot be lost.
            if before.reason is Reason.UNKNOWN or not counts:
                continue
            after = proposed.dispatch(batch)
            if _RANK[after.mode] < _RANK[before.mode]:
                lost.append((batch, last, before.mode, after.mode))
    return lost


def _asked(today: Emulation, proposed: Emulation, role: Role) -> Iterator[tuple[Batch, int]]:
    """Yield the batches of a role that both admit; above the largest graph of both one represents all."""
    largest = max(
        (graph.entry.num_tokens for side in (today, proposed) for graph in side.graphs if graph.role is role), default=0
    )
    yield from batches(role, today, families=today.families(role), upto=largest)


SLOWER = 0.02
"""Least share by which a pass takes longer than today on a graph that pads it further, to be named."""


def slower_batches(today: Pricing, proposed: Pricing) -> tuple[str, ...]:
    """Return which batches that have a graph on both sides take longer than today, in sentences by class.

    They are padded further; whether the traffic has them or not.
    """
    found: dict[tuple[Role, Kind, int | None], list[tuple[float, int, float, float]]] = {}
    sides = today.deployment, proposed.deployment
    for role in [each for each in sides[0].modes if each in sides[1].modes]:
        for batch, _ in _asked(*sides, role):
            before, after = (side.dispatch(batch).entry for side in sides)
            # Batches that lose or gain a graph are for ``lost_graphs``; here is what padding costs the others.
            if before is None or after is None or after.num_tokens <= before.num_tokens:
                continue
            was, takes = (pricing.on(batch, entry) for pricing, entry in ((today, before), (proposed, after)))
            if takes > was * (1 + SLOWER):
                group = found.setdefault((role, batch.kind, batch.query_len), [])
                group.append((takes / was - 1, batch.extent(batch.kind), was, takes))
    return tuple(_slower(*kind, each) for kind, each in found.items())


def _slower(role: Role, kind: Kind, width: int | None, sizes: list[tuple[float, int, float, float]]) -> str:
    what, noun = ("mixed batches", "tokens") if kind is Kind.MIXED else (f"decodes of {width}", "requests")
    extents = [at for _, at, _, _ in sizes]
    share, at, was, takes = max(sizes)
    span = f"{counted(len(sizes), 'size')} of {min(extents)} to {max(extents)} {noun}"
    return (
        f"{role.value}, {what}: passes of {span} take longer on larger graphs, by up to {share:.0%}: at {at} "
        f"{takes:.3g} ms, not {was:.3g}"
    )


def _described(lost: list[Lost]) -> Iterator[str]:
    def apart(one: Lost, two: Lost) -> bool:
        return _class(one) != _class(two) or two[0].extent(two[0].kind) != one[1] + 1

    for run in split_when(apart, lost):
        batch, _, before, after = run[0]
        first, last = batch.extent(batch.kind), run[-1][1]
        span = f"{first}" if first == last else f"{first} to {last}"
        decode = f"decodes of {span} requests, query length {batch.query_len}"
        what = decode if batch.kind is Kind.DECODE else f"mixed batches of {span} tokens"
        now = "eager" if after is GraphMode.NONE else after.value
        yield f"{batch.role.value}: {what} have {before.value} graphs today and would run {now}"


def _class(lost: Lost) -> tuple[object, ...]:
    batch, _, before, after = lost
    return batch.role, batch.kind, batch.query_len, batch.active_loras, before, after


def shifted(steps: Mapping[Batch, int], deployment: Emulation) -> dict[Batch, int]:
    """Return the steps under twice the load: each batch has twice the requests and, with prompts, twice the tokens.

    Both end at the limits of the deployment. Decodes have as many tokens as the schedule gives so many requests, and at
    most as many requests as run together.
    """
    limits, families = deployment.limits, deployment.families(Role.TARGET)
    found: dict[Batch, int] = {}
    for batch, count in steps.items():
        requests = min(2 * batch.num_reqs, limits.max_num_reqs)
        if kind_of(batch, families) is Kind.DECODE:
            most = ((family.requests.upto_count(requests), family.query_len) for family in families)
            number, width = max((number, width) for number, width in most if number is not None)
            own = Batch.decode(Role.TARGET, number, width, batch.active_loras)
        else:
            # A drafter may need rows of its own in the same batch, which bound the target's tokens.
            room = limits.max_num_tokens - requests * extra_slots(deployment)
            tokens = max(min(2 * batch.num_tokens, room), batch.num_tokens)
            own = attrs.evolve(batch, num_reqs=min(requests, tokens), num_tokens=tokens, query_len=None)
        found[own] = found.get(own, 0) + count
    return found


@attrs.frozen(kw_only=True)
class ShiftRegret:
    """Extra time of steps over a graph of every size if the load doubles: shares, by side."""

    today: float
    proposed: float
    gain: float
    """Share of today's time that the proposed side saves; below 0: it takes more."""


def few(sentences: tuple[str, ...], most: int = 2) -> str:
    """Return some sentences as one, and how many more there are."""
    rest = len(sentences) - most
    return "; ".join(sentences[:most]) + (f"; and {rest} more" if rest > 0 else "")


def with_todays(spec: Spec, plan: Plan, today: Emulation, evidence: Evidence) -> Spec | None:
    """Return the spec with the sizes of a plan, and today's of each role and kind in which it takes graphs away.

    None where it takes none away, and where the costs and the load say enough for it to do so.
    """
    # By own costs and a load with prompts the choice may stand as it is.
    if not evidence.keeps_mixed:
        return None
    own = emulation_of(plan)
    lost = {(batch.role, batch.kind) for batch, *_ in _lost(today, own, evidence)}
    if not lost:
        return None
    kept_graphs = [g for g in today.graphs if (g.role, Kind.DECODE if g.entry.query_len else Kind.MIXED) in lost]
    sizes = {
        role: explicit_sizes(graph for graph in (*own.graphs, *kept_graphs) if graph.role is role) for role in own.modes
    }
    roles = {role.value: replace(spec.roles.of(role), sizes=sizes.get(role)) for role in Role if role.is_drafter}
    target = sizes[Role.TARGET] or Sizes()
    # Today's graphs run already, so a budget for new ones does not bound them; that of a kind of batch is for all.
    kinds = {kind.value: spec.budget.allowed_of(kind) for kind in Kind}
    if 0 in kinds.values():
        return None
    budget = replace(unbounded(spec.budget), graphs=KindGraphs(**kinds))
    return replace(spec, sizes=target, roles=Roles(target=spec.roles.target, **roles), budget=budget)


def unbounded(budget: Budget) -> Budget:
    """Return the costs of graphs of a budget, without its bounds."""
    return Budget(memory_per_graph=budget.memory_per_graph, seconds_per_graph=budget.seconds_per_graph)


GRAPH = 0.001
"""Price of a graph, as a share of a step: more graphs are proposed only if each takes that much time off.

A finer table costs memory, which is KV cache, and start-up, for a gain that soon no measurement shows.
"""

MORE = 0.01
"""Least gain of a step for more graphs, memory or start-up than today's, as a share."""

SHIFTED = 0.01
"""Most that a proposal may be slower than today if the load doubles, as a share."""

MOST_GRAPHS = 256
"""Most graphs that are tried where no budget says how many, unless there are more today."""

PADDED = "CP023"
"""Code of the rule about heavy padding, which goes by tokens."""

_WORSE = 0.05
"""Tables of fewer graphs are tried until they take longer by this share: they show what graphs buy."""

Progress = Callable[[str], None]
"""Called with what was done, each time that a table was planned and judged."""


@attrs.frozen(kw_only=True)
class TuningBounds:
    """Bounds of a table; None: no bound."""

    graphs: int | None = None
    memory_mib: float | None = None
    seconds: float | None = None

    def hold(self, side: SideFigures) -> bool:
        """Return whether a side is within all bounds."""
        return self.exceeded(side) == TuningBounds()

    def exceeded(self, side: SideFigures) -> TuningBounds:
        """Return the figures of a side that are beyond these bounds."""
        sides = ((name, getattr(side, name), most) for name, most in attrs.asdict(self).items() if most is not None)
        # A bound that is another side's own figure must hold for the same figure.
        return TuningBounds(**{name: value for name, value, most in sides if value > most * (1 + 1e-9)})

    def rounded(self) -> TuningBounds:
        """Return these bounds as people give them: rounded up, as smaller ones would exclude the very table."""
        memory, seconds = self.memory_mib, self.seconds
        return attrs.evolve(
            self,
            memory_mib=None if memory is None else math.ceil(memory),
            seconds=None if seconds is None else math.ceil(seconds * 10) / 10,
        )


Propose = Callable[[int, TuningBounds], Plan]
"""From a number of graphs, and bounds for their memory and time, to the plan that is best within both."""


@attrs.frozen
class ParetoPoint:
    """A table of some number of graphs, judged; none of fewer is as good by the objective, and then by the mean."""

    side: SideFigures
    within: bool
    """Whether it fits the bounds."""


@attrs.frozen(kw_only=True)
class Beyond:
    """The gain of a table beyond the bounds, and its price on top of the proposal, or of today's graphs."""

    gain: float
    """Share of the time that it takes less than the proposal, or than today."""
    graphs: int
    memory_mib: float
    seconds: float
    bounds: TuningBounds
    """What to give for it."""


@attrs.frozen
class Candidate:
    allowed: int
    plan: Plan
    pricing: Pricing
    chosen: SideFigures
    """On the steps that it was chosen by."""
    kept: TuningBounds

    @property
    def reach(self) -> int:
        """The least number of graphs that gives this plan, as far as that is known."""
        return min(self.allowed, self.plan.num_graphs)

    @property
    def name(self) -> str:
        return f"the table of {counted(self.plan.num_graphs, 'graph')}"


@attrs.frozen(kw_only=True)
class TuneCase:
    """A deployment as it is today, with what proposals are judged by."""

    today: Emulation
    costs: Costs
    chosen: Mapping[Batch, int] = attrs.field(repr=False)
    """Steps by batch of the target, by which sizes are chosen."""
    judging: Mapping[Batch, int] = attrs.field(repr=False)
    """Steps by which both sides are judged."""
    objective: str = "mean"
    """As in ``Sizes.objective``."""
    accepted: float = 0.0
    """Drafts that a request gets accepted in a step, on average."""
    evidence: Evidence = attrs.Factory(Evidence)
    usual: frozenset[FindingKey] = frozenset()
    """Findings of ``check`` that no sizes avoid."""
    reported_mib: float | None = None
    """Memory of today's graphs that the engine reported; None or 0: it is predicted."""
    reported_seconds: float | None = None
    """The time of their capture, as above."""

    def judged(self, pricing: Pricing, steps: Mapping[Batch, int]) -> SideFigures:
        """Return the figures of a side over some steps."""
        return judged(pricing, steps, objective=self.objective, accepted=self.accepted)

    def noise(self, before: Pricing, after: Pricing) -> Noise:
        """Return the noise in the difference of two sides over the steps that judge."""
        spread = self.costs.profile.spread
        off = SPREAD if spread is None else spread
        return noise_between(before, after, self.judging, off, self.objective, self.evidence)


def _side(plan: Plan, today: Emulation) -> Emulation:
    """Return the plan as a side: of the roles that run today, by the scheduler that runs today."""
    side = emulation_of(plan)
    managers = tuple(each for each in side.managers if each.role in today.modes)
    return attrs.evolve(side, managers=managers, whole_prompts=today.whole_prompts)


class TableSearch:
    """The tables of one deployment: each is planned and judged once."""

    def __init__(self, case: TuneCase, propose: Propose, progress: Progress) -> None:
        self.case, self.propose, self.progress = case, propose, progress
        self.present = Pricing(case.today, case.costs)
        self.past, self.before = (
            attrs.evolve(
                side, memory_mib=case.reported_mib or side.memory_mib, seconds=case.reported_seconds or side.seconds
            )
            for side in (case.judged(self.present, steps) for steps in (case.chosen, case.judging))
        )
        self.doubled = shifted(case.chosen, case.today)
        self._present_doubled = case.judged(self.present, self.doubled)
        self._made: dict[tuple[int, TuningBounds], Candidate] = {}
        self._obstacles: dict[Pricing, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self.refused: list[str] = []
        """Reasons why faster tables are not proposed."""
        self._too_small: dict[str, None] = {}
        self._unjudged: dict[str, None] = {}

    def judged(self, each: Candidate) -> SideFigures:
        """Return the figures of a table over the steps that judge."""
        return self.case.judged(each.pricing, self.case.judging)

    def candidate(self, count: int, bounds: TuningBounds) -> Candidate:
        """Return the best table of at most so many graphs within bounds; raises ``BudgetError``."""
        # `count` bounds the graphs: bounds that differ in their number alone share a table.
        kept = attrs.evolve(bounds, graphs=None)
        if (count, kept) not in self._made:
            plan = self.propose(count, kept)
            # Several budgets may give one plan, and judging takes longer than comparing.
            same = next((each for each in self._made.values() if each.plan == plan), None)
            pricing = Pricing(_side(plan, self.case.today), self.case.costs) if same is None else same.pricing
            chosen = self.case.judged(pricing, self.case.chosen) if same is None else same.chosen
            self._made[count, kept] = Candidate(count, plan, pricing, chosen, kept)
            self.progress(counted(plan.num_graphs, "graph"))
            # A budget that leaves no graph is worth a note, since nothing can be proposed within it.
            if not plan.num_graphs:
                decisions = (decision for role in plan.roles for decision in role.decisions)
                self._too_small |= {each.message: None for each in decisions if each.rule == "budget-too-small"}
        return self._made[count, kept]

    def obstacles(self, each: Candidate, tier: TuningBounds, *, warned: bool = False) -> tuple[str, ...]:
        """Return why a table is not proposed within bounds, in sentences; ``warned``: heavy padding is no reason."""
        if each.pricing not in self._obstacles:
            self._obstacles[each.pricing] = tuple(self._losses(each)), tuple(self._warnings(each))
        losses, warnings = self._obstacles[each.pricing]
        if warned and {found.rule.code for found in self._unusual(each)} == {PADDED}:
            warnings = ()
        # A today that exceeds the bounds is not kept, so losses are the price. An estimate takes no graph away all the
        # same.
        return (*losses, *warnings) if tier.hold(self.past) or self.case.evidence.is_estimate else warnings

    def _losses(self, each: Candidate) -> Iterator[str]:
        lost = lost_graphs(self.case.today, each.pricing.deployment, self.case.evidence)
        if lost:
            yield f"{each.name} takes graphs away: {few(lost)}"
        regret = self.shift_of(each)
        if regret.gain < -SHIFTED:
            yield f"with twice the load {each.name} would take {-regret.gain:.1%} more time than today's"

    def _warnings(self, each: Candidate) -> Iterator[str]:
        if says := tuple(f"{found.rule.code} {found.diagnostic.message}" for found in self._unusual(each)):
            yield f"check warns of {each.name}: {few(says)}"

    def _unusual(self, each: Candidate) -> list[Finding]:
        """Return what ``check`` warns of, except of what it would warn of with any sizes."""
        warnings = (found for found in lint(each.plan) if found.severity is not Severity.NOTE)
        return [found for found in warnings if finding_key(found) not in self.case.usual]

    def shift_of(self, each: Candidate) -> ShiftRegret:
        """Return how both sides do if the load doubles."""
        after, before = self.case.judged(each.pricing, self.doubled), self._present_doubled
        return ShiftRegret(
            today=before.regret, proposed=after.regret, gain=1 - after.mean_step_ms / before.mean_step_ms
        )

    def _is_admissible(self, each: Candidate, tier: TuningBounds, *, warned: bool = False) -> bool:
        """Return whether a table may be proposed within bounds; ``warned``: even if ``check`` warns of its padding."""
        if not tier.hold(each.chosen):
            return False
        # Where today exceeds the bounds it is no choice, and a slower table may be the best there is.
        if tier.hold(self.past):
            if is_slower(self.past, each.chosen) or is_slower(self.before, self.judged(each)):
                return False
            # Each tuning of a table that gains nothing would give a little more of another load away.
            gains = each.chosen.objective < self.past.objective * (1 - MORE)
            if not gains and self.shift_of(each).gain < -1e-9:
                return False
        # Without a graph nothing is left to choose.
        elif not each.plan.num_graphs:
            return False
        obstacles = self.obstacles(each, tier, warned=warned)
        self.refused += [says for says in obstacles if says not in self.refused]
        return not obstacles

    def most(self, tier: TuningBounds) -> int:
        """Return the most graphs that are tried within bounds."""
        return tier.graphs or max(MOST_GRAPHS, len(self.case.today.graphs))

    def worthwhile(self, tiers: Sequence[TuningBounds]) -> TuningBounds:
        """Return the first bounds that no later ones improve on enough, nor today; raises ``BudgetError``."""
        if len(tiers) == 1:
            return tiers[0]
        best, least = tiers[0], self.past.objective
        errors: list[BudgetError] = []
        for tier in tiers:
            try:
                top = self.candidate(self.most(tier), tier)
            except BudgetError as error:
                errors.append(error)
                continue
            # The first bounds are today's own and need no gain. Wider ones have to pay for what they take twice, as a
            # table whose graphs are worth their price is slower than their best.
            enough = tier is tiers[0] or top.chosen.objective < least * (1 - 2 * MORE)
            if enough and self._is_admissible(top, tier) and (tier is tiers[0] or self._is_surely_faster(tier, best)):
                best, least = tier, min(least, top.chosen.objective)
        # Some bounds may be too small for any table; only if all are is that the answer.
        if len(errors) == len(tiers):
            raise errors[-1]
        return best

    def _is_surely_faster(self, tier: TuningBounds, other: TuningBounds) -> bool:
        """Return whether what bounds select is faster than today, and than what others select, by more than noise."""
        found, sides = self.selected(tier), [self.present]
        # The others may be too small for any table.
        with suppress(BudgetError):
            own = self.selected(other)
            sides += [] if own is None else [own.pricing]
        if found is None:
            return False
        after = self.judged(found).objective
        return all(
            self.case.judged(side, self.case.judging).objective - after > self.case.noise(side, found.pricing).total
            for side in sides
        )

    def selected(self, tier: TuningBounds) -> Candidate | None:
        """Return the table within bounds whose graphs are worth their price; None: none is admissible.

        Where today's graphs exceed the bounds and every such table is slower than them, one with heavy padding may be
        the best there is: the time of its padding is known.
        """
        found = self._selected(tier)
        if tier.hold(self.past) or (found is not None and not is_slower(self.past, found.chosen)):
            return found
        both = [each for each in (found, self._selected(tier, warned=True)) if each is not None]
        return min(both, key=lambda each: (is_slower(self.past, each.chosen), each.chosen.rank), default=None)

    def _selected(self, tier: TuningBounds, *, warned: bool = False) -> Candidate | None:
        """Return the best table within bounds, each graph at its price.

        A table costs as much as its steps take longer, by the objective or in the mean: a few slow steps say nothing of
        all others. Or by the average of both and of every doubling of requests alike, as a load of few requests has
        next to none of the tokens. Each graph adds ``GRAPH`` to that; of costs nearer than a tenth of it fewer graphs
        are better. Around the best of the numbers of graphs that were tried it searches on, down to steps of an eighth.
        """
        good = [each for each in self._halved(self.most(tier), tier) if self._is_admissible(each, tier, warned=warned)]
        if not good:
            return None
        # A few graphs may serve this traffic, and leave other loads far from what they could be.
        steady = any(each.plan.is_steady for each in good)
        good = [each for each in good if each.plan.is_steady or not steady]

        def cost(each: Candidate) -> float:
            columns = zip(each.chosen.figures, *(other.chosen.figures for other in good), strict=True)
            ratios: list[float] = [own / min(others) for own, *others in columns]
            return max(*ratios[:2], fmean(ratios)) * (1 + GRAPH * each.plan.num_graphs)

        def cheapest() -> Candidate:
            costs = [(cost(each), each) for each in good]
            most = min(costs, key=itemgetter(0))[0] * (1 + GRAPH / 10)
            return min((each for own, each in costs if own <= most), key=lambda each: each.plan.num_graphs)

        selected, center = cheapest(), None
        while selected is not center:
            center = selected
            # Each table takes a plan and a judgement, so the steps end at an eighth.
            steps = [center.reach // share for share in (2, 4, 8)]
            counts = {count for step in steps for count in (center.reach - step, center.reach + step)}
            for count in sorted(counts - {0}):  # 0 where the table is empty
                try:
                    each = self.candidate(min(count, self.most(tier)), tier)
                except BudgetError:
                    continue
                if (each.plan.is_steady or not steady) and self._is_admissible(each, tier, warned=warned):
                    good.append(each)
            selected = cheapest()
        return selected

    def _halved(self, top: int, tier: TuningBounds) -> Iterator[Candidate]:
        """Yield tables of ever fewer graphs, until they are clearly slower than the first, or leave no table.

        Too few graphs leave passes without one that the engine never runs eager, so that its profile has no times of
        them. Raises ``BudgetError`` where the first is such a table.
        """
        count, best = top, math.inf
        while count >= 1:
            try:
                each = self.candidate(count, tier)
            except BudgetError as error:
                # The largest number has to be possible; smaller ones were an offer.
                if count == top:
                    raise
                says = f"tables of at most {counted(count, 'graph')} are not judged: {error.problems[0].message}"
                self._unjudged = {says: None}
                return
            yield each
            best = min(best, each.chosen.objective)
            # Fewer graphs only get slower from here.
            if each.chosen.objective > best * (1 + _WORSE):
                return
            count = each.reach // 2

    def verdict(self, each: Candidate, bounds: TuningBounds | None) -> tuple[TuneVerdict, str]:
        """Return the verdict on a table, and why; ``bounds``: those that the user gave."""
        proposed, objective = self.judged(each), self.case.objective
        if bounds is None or bounds.hold(self.past):
            return verdict_on(self.before, proposed, self.case.noise(self.present, each.pricing), objective)
        # Today's graphs are no choice, so nothing has to be gained over them.
        says = (_change(self.before, proposed, objective), *self.obstacles(each, TuningBounds()))
        return TuneVerdict.CHANGE, f"today's graphs exceed the budget; within it {few(says, len(says))}"

    def beyond(self, bounds: TuningBounds | None, limits: TuningBounds, proposal: Candidate | None) -> Beyond | None:
        """Return what other bounds gain over a proposal, or over today's graphs; None: less than ``MORE``.

        :param bounds: those that the user gave.
        :param limits: those that were searched within.
        """
        against = self.before if proposal is None else self.judged(proposal)
        most = against.objective * (1 - MORE)
        try:
            top = self.candidate(self.most(TuningBounds()), TuningBounds())
            free = self.selected(TuningBounds()) if self.judged(top).objective < most else None
            if free is None or limits.hold(free.chosen):
                return None
            # Figures are those that a tuning with just these flags has.
            over = limits.exceeded(free.chosen).rounded()
            given = {name: value for name, value in attrs.asdict(over).items() if value is not None}
            other = attrs.evolve(bounds or TuningBounds(), **given)
            found = self.selected(other)
        except BudgetError:
            return None
        if found is None or self.verdict(found, other)[0] is not TuneVerdict.CHANGE:
            return None
        side = self.judged(found)
        if side.objective >= most:
            return None
        return Beyond(
            gain=1 - side.objective / against.objective,
            graphs=side.graphs - against.graphs,
            memory_mib=side.memory_mib - against.memory_mib,
            seconds=side.seconds - against.seconds,
            bounds=over,
        )

    def notes(self) -> tuple[str, ...]:
        """Return what could not be judged, and which bounds leave no graph."""
        return *self._unjudged, *self._too_small

    def pareto(self, limits: TuningBounds) -> Iterator[ParetoPoint]:
        """Yield the tables that are faster than all with fewer graphs, on the steps that chose them.

        Those within the limits are compared with each other alone, as those beyond them are no choice.
        """
        fastest = dict.fromkeys((True, False), (math.inf, math.inf))
        once = {each.pricing: each for each in self._made.values()}.values()
        # Fewest graphs first, so that a table is listed only if more graphs buy something.
        for each in sorted(once, key=lambda each: (each.plan.num_graphs, each.chosen.rank)):
            side = self.judged(each)
            within = limits.hold(side)
            if each.chosen.rank >= fastest[within]:
                continue
            fastest[within] = each.chosen.rank
            yield ParetoPoint(side, within)


@attrs.frozen(kw_only=True)
class Tuning:
    """Today and what is proposed, judged on the same steps by the same costs."""

    verdict: TuneVerdict
    reason: str
    today: SideFigures | None
    proposed: SideFigures | None
    """None where there is too little data."""
    is_estimate: bool = False
    """Whether the costs are not this deployment's own, so that nothing is promised."""
    pareto: tuple[ParetoPoint, ...] = ()
    plan: Plan | None = None
    """The proposed plan; None: keep what runs."""
    pricings: tuple[Pricing, Pricing] | None = None
    """Today's and the plan's; ``today`` and ``proposed`` are their figures over ``judging``."""
    judging: Mapping[Batch, int] = attrs.field(factory=dict, repr=False)
    max_graphs: int | None = None
    """The number of graphs with which it was planned."""
    kept: TuningBounds = TuningBounds()
    """The memory and the time of capture with which it was planned."""
    noise: Noise | None = None
    """In the difference of the two sides by the objective."""
    shift: ShiftRegret | None = None
    """The figures of both sides if the load doubles."""
    beyond: Beyond | None = None
    """The gain of a table beyond the bounds, if it is ``MORE`` or more."""
    bounds: TuningBounds | None = None
    """Within which it was chosen."""
    objective: str = "mean"
    notes: tuple[str, ...] = ()
    """Sentences on tables that could not be judged."""


def tune(
    case: TuneCase,
    propose: Propose,
    *,
    bounds: TuningBounds | None = None,
    room: TuningBounds | None = None,
    progress: Progress = lambda _: None,
) -> Tuning:
    """Propose a plan by the steps that choose, and judge it next to today's graphs on those that judge.

    Of all tables within the bounds it takes the one whose steps take the least time, each graph at the price of
    ``GRAPH``. A table is proposed only if it is no slower than today on both, ``check`` does not warn of it, no decode
    loses a full graph, and it is no slower by more than ``SHIFTED`` if the load doubles, or at all where it gains less
    than ``MORE``. Heavy padding is no reason where today exceeds the bounds and every other table is slower than it.
    With costs that are not this deployment's own, no batch at all loses its graph.

    :param propose: chooses by the same objective.
    :param bounds: what the user gives; None: the number, the memory and the time of capture of today's graphs.
        Where that takes twice ``MORE`` off a step, ``room`` for as many graphs, and where that does again,
        for more.
    :param room: what graphs may take if that pays; None: anything.
    :raises PlanningError: the profile has no times of a role.
    """
    today = case.today
    found = Tuning(
        verdict=TuneVerdict.TOO_LITTLE_DATA,
        reason=_too_little(case),
        today=None,
        proposed=None,
        is_estimate=case.evidence.is_estimate,
        objective=case.objective,
    )
    # Before any table is planned: no figure of so few steps can be held to.
    if found.reason:
        return found
    search = TableSearch(case, propose, progress)
    before = search.before
    kept = attrs.evolve(found, verdict=TuneVerdict.KEEP, today=before, proposed=before, judging=case.judging)
    # Graphs that are turned off on purpose are not for sizes to turn on.
    if not today.graphs and not any(mode.allowed for mode in today.modes.values()):
        return attrs.evolve(kept, reason="graphs are turned off, so no sizes are chosen; allow them, and tune again")
    # Not 0 graphs, which `most` would read as no bound.
    own = TuningBounds(graphs=max(len(today.graphs), 1), memory_mib=before.memory_mib, seconds=before.seconds).rounded()
    wide = _wider(room or TuningBounds(), own)
    # Without a budget: what today takes, then more memory and time, then more graphs too.
    tiers = [own, attrs.evolve(wide, graphs=own.graphs), wide] if bounds is None else [bounds]
    limits = search.worthwhile(tiers)
    try:
        selected = search.selected(limits)
    except BudgetError:
        if bounds is not None:
            raise
        selected = None  # Today's graphs are fewer than any plan may have.
    verdict, reason = (TuneVerdict.KEEP, "") if selected is None else search.verdict(selected, bounds)
    # Guards come last: say what they refused, as that is what keeps the gain away.
    refused = f": {search.refused[0]}" if search.refused else ""
    beyond = search.beyond(bounds, limits, selected if verdict is TuneVerdict.CHANGE else None)
    pareto = tuple(search.pareto(limits))
    kept = attrs.evolve(kept, pareto=pareto, beyond=beyond, bounds=limits, notes=search.notes())
    if selected is None:
        if bounds is not None and not bounds.hold(search.past):
            reason = f"today's graphs exceed the budget, and no table within it holds{refused}"
            return attrs.evolve(kept, verdict=TuneVerdict.OVER_BUDGET, reason=reason)
        reason = f"no better table holds{refused}" if refused else "no table of sizes within the bounds is faster"
        return attrs.evolve(kept, reason=reason)
    return attrs.evolve(
        kept,
        verdict=verdict,
        reason=reason,
        proposed=search.judged(selected),
        plan=selected.plan,
        pricings=(search.present, selected.pricing),
        max_graphs=selected.allowed,
        kept=selected.kept,
        noise=case.noise(search.present, selected.pricing),
        shift=search.shift_of(selected),
    )


def _too_little(case: TuneCase) -> str:
    """Return why there is too little data to promise anything, in a sentence; empty: there is enough."""
    steps, lines = sum(case.judging.values()), case.evidence.lines
    if steps < LEAST_STEPS:
        return f"{counted(steps, 'step')} to judge on; below {LEAST_STEPS:,} nothing is promised"
    if lines is not None and lines < LEAST_LINES:
        return (
            f"{counted(lines, 'line')} to judge on, which stand for {counted(steps, 'step')}; below {LEAST_LINES:,} "
            "nothing is promised"
        )
    return "" if case.chosen else "no step to choose sizes by is within the limits; give traffic of this deployment"


def _change(before: SideFigures, after: SideFigures, objective: str) -> str:
    change = after.objective / before.objective - 1
    return f"the {subject_of(objective)} is {abs(change):.1%} {'longer' if change > 0 else 'shorter'}"


def _wider(room: TuningBounds, own: TuningBounds) -> TuningBounds:
    """Return bounds for memory and time that today's graphs are within."""
    memory, seconds = (
        None if most is None else max(most, least or 0.0)
        for most, least in ((room.memory_mib, own.memory_mib), (room.seconds, own.seconds))
    )
    return TuningBounds(graphs=room.graphs, memory_mib=memory, seconds=seconds)
