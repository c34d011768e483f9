"""Judgement: what a deployment's graphs cost, and what its steps take, by a profile.

One rule for every side: today's engine, by its emulation or its observation, and a plan. Each step is dispatched as
the deployment dispatches, and takes the time of the graph that it gets, or of an eager pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import attrs

from capture_planner.engines.emulation import Emulation
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.planning.costs import Costs, Curve, Family
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import kind_of


@attrs.frozen
class Passes:
    """A forward of one role in a step: its batch, and how many decodes follow each other in it."""

    batch: Batch
    draft_steps: int | None = None
    """Decodes of a draft chain; None for one forward."""


@attrs.frozen
class StepCost:
    """What one step takes."""

    milliseconds: float
    eager: frozenset[Role]
    """The roles that run it without a graph."""
    answers: tuple[Entry | None, ...]
    """The graph of each role that runs in it."""
    unknown: bool = False
    """Whether an observation has no answer for it; it counts as eager."""


@attrs.frozen(kw_only=True)
class Judgement:
    """One side of a comparison."""

    graphs: int
    memory_mib: float
    seconds: float
    steps: int
    """Steps that it was judged on."""
    mean_step_ms: float
    token_ms: float
    """What a request waits for one token: the time of its step over the tokens that the step gives it."""
    eager_share: Mapping[Role, float]
    """Share of the steps in which a role runs, and runs eager."""
    regret: float
    """How much longer steps take than if every size had a graph, as a share."""
    worst_regret: float
    """The same of the batch for which it is worst."""
    unknown: int = 0
    """Steps that an observation has no answer for; they count as eager."""


@attrs.frozen
class Pricing:
    """The costs of one deployment's steps."""

    deployment: Emulation
    costs: Costs
    _steps: dict[Batch, StepCost] = attrs.field(factory=dict, init=False, repr=False, eq=False)
    _curves: dict[Family, Curve] = attrs.field(factory=dict, init=False, repr=False, eq=False)

    def step(self, batch: Batch) -> StepCost:
        """Return what a step takes, over the roles that run in it.

        Raises ``PlanningError`` for a role of which the profile has no times.
        """
        known = self._steps.get(batch)
        if known is None:
            known = self._steps[batch] = self._priced(batch)
        return known

    def _priced(self, batch: Batch) -> StepCost:
        total = self.costs.profile.step_milliseconds
        eager, answers, unknown = set(), [], False
        for each in self._passes(batch):
            answer = self.deployment.dispatch(each.batch)
            answers.append(answer.entry)
            unknown = unknown or answer.reason is Reason.UNKNOWN
            total += self._time(each, answer.entry)
            if answer.entry is None:
                eager.add(each.batch.role)
        return StepCost(total, frozenset(eager), tuple(answers), unknown)

    def least(self, batch: Batch) -> float:
        """Return what the step would take if every size had a graph, in the modes that the roles run in."""
        return self.costs.profile.step_milliseconds + sum(
            min(self._time(each, entry) for entry in self._exact(each)) for each in self._passes(batch)
        )

    def runs(self, batch: Batch) -> frozenset[Role]:
        """Return the roles that run in a step."""
        return frozenset(each.batch.role for each in self._passes(batch))

    def _passes(self, batch: Batch) -> Iterator[Passes]:
        for role in self.deployment.modes:
            if role is not Role.DRAFT_DECODE:
                yield Passes(attrs.evolve(batch, role=role, active_loras=0 if role.is_drafter else batch.active_loras))
                continue
            for family in self.deployment.families(role):
                if batch.num_reqs in family.requests:
                    decode = Batch.decode(role, batch.num_reqs, family.query_len)
                    yield Passes(decode, family.draft_steps)

    def _time(self, each: Passes, entry: Entry | None) -> float:
        batch = each.batch
        if entry is None:
            decode = kind_of(batch, self.deployment.families(batch.role)) is Kind.DECODE
            family = (batch.role, GraphMode.NONE, batch.query_len if decode else None, each.draft_steps)
            return self._curve(family)(batch.num_tokens)
        curve = self._curve((batch.role, entry.mode, entry.query_len, entry.draft_steps))
        return curve(entry.num_tokens) * (1 if entry.draft_steps else each.draft_steps or 1)

    def _curve(self, family: Family) -> Curve:
        found = self._curves.get(family)
        if found is None:
            found = self._curves[family] = self.costs.graph(family)
        return found

    def _exact(self, each: Passes) -> Iterator[Entry | None]:
        """Yield the graphs of exactly a batch's size that its role could have, and None: eager."""
        yield None
        batch, mode = each.batch, self.deployment.modes[each.batch.role]
        decode = kind_of(batch, self.deployment.families(batch.role)) is Kind.DECODE
        chains = {graph.entry.draft_steps for graph in self.deployment.graphs if graph.role is batch.role}
        if decode and mode.is_separate:
            steps = each.draft_steps if each.draft_steps in chains else None
            yield Entry(
                GraphMode.FULL, batch.num_tokens, num_reqs=batch.num_reqs, query_len=batch.query_len, draft_steps=steps
            )
        if mode.mixed_mode is not GraphMode.NONE:
            yield Entry(mode=mode.mixed_mode, num_tokens=batch.num_tokens)


def judged(pricing: Pricing, steps: Mapping[Batch, int], accepted: float = 0.0) -> Judgement:
    """Return what a deployment's graphs cost, and what steps take.

    :param accepted: drafts that a request gets accepted in a step, on average.
    """
    deployment = pricing.deployment
    priced = {batch: (pricing.step(batch), count) for batch, count in steps.items()}
    total = sum(steps.values())
    spent = sum(step.milliseconds * count for step, count in priced.values())
    waited = sum(step.milliseconds * count * batch.num_reqs for batch, (step, count) in priced.items())
    requests = sum(count * batch.num_reqs for batch, count in steps.items())
    least = {batch: pricing.least(batch) for batch in steps}
    floor = sum(least[batch] * count for batch, count in steps.items())
    eager: Counter[Role] = Counter()
    run: Counter[Role] = Counter()
    for batch, (step, count) in priced.items():
        eager.update(dict.fromkeys(step.eager, count))
        run.update(dict.fromkeys(pricing.runs(batch), count))
    mib, seconds = footprint(deployment, pricing.costs)
    return Judgement(
        graphs=len(deployment.graphs),
        memory_mib=mib,
        seconds=seconds,
        steps=total,
        mean_step_ms=spent / total,
        token_ms=waited / requests / (1 + accepted),
        eager_share={role: eager[role] / run[role] if run[role] else 0.0 for role in deployment.modes},
        regret=spent / floor - 1,
        worst_regret=max(step.milliseconds / least[batch] for batch, (step, _) in priced.items()) - 1,
        unknown=sum(count for step, count in priced.values() if step.unknown),
    )


def footprint(deployment: Emulation, costs: Costs) -> tuple[float, float]:
    """Return the memory of a deployment's graphs in MiB, and the time of their capture in seconds."""
    graphs = deployment.graphs
    if not graphs:
        return 0.0, 0.0
    profile = costs.profile
    mib, seconds, pools = profile.base_mib, profile.base_seconds, dict[Family, float]()
    for graph in graphs:
        family = (graph.role, graph.entry.mode, graph.entry.query_len, graph.entry.draft_steps)
        cost = costs.of_graph(family)
        mib += cost.mib + cost.driver_mib
        seconds += cost.seconds
        pools[family] = max(pools.get(family, 0.0), cost.mib_per_token * graph.entry.num_tokens)
    # All graphs share a pool: the largest decides its size.
    return mib + max(pools.values()), seconds
