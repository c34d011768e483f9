"""What a deployment's graphs cost and its steps take: by one rule for today's engine and for a plan.

Each step is dispatched as the deployment dispatches, and takes the time of the graph that it gets, or of an eager pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from operator import attrgetter

import attrs

from capture_planner.engines.emulation import Emulation
from capture_planner.measuring.fits import predict_graphs
from capture_planner.modes import Reason, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.judging import Prices
from capture_planner.planning.steps import passes_of
from capture_planner.records.batch import Batch, Entry


@attrs.frozen
class PassCost:
    """What the passes of one role take in a step."""

    batch: Batch
    entry: Entry | None
    """The graph that serves it; None: eager."""
    milliseconds: float
    every_size: float
    """The same if every size had a graph, in the mode that the role runs in."""


@attrs.frozen
class StepCost:
    """What one step takes."""

    passes: tuple[PassCost, ...]
    milliseconds: float
    every_size: float
    """The same if every size had a graph."""
    unknown: bool = False
    """Whether an observation has no answer for it; it counts as eager."""

    @property
    def answers(self) -> dict[Role, Entry | None]:
        """The graph of each role that runs in it."""
        return {each.batch.role: each.entry for each in self.passes}


@attrs.frozen(kw_only=True)
class SideFigures:
    """One side of a comparison: its graphs, and the steps that it was judged on."""

    graphs: int
    memory_mib: float
    seconds: float
    """Start-up time that capturing takes."""
    mean_step_ms: float
    token_ms: float
    """What a request waits for one token: the time of a step over the tokens that a request gets of it."""
    eager_share: Mapping[Role, float]
    """Share of the steps in which a role runs that it runs eager."""
    regret: float
    """How much longer steps take than if every size had a graph, as a share."""
    worst_regret: float
    """The same of the batch for which it is worst."""
    objective: float
    """What was to be least: milliseconds, or of the worst regret the ratio."""
    unknown: int = 0
    """Steps that an observation has no answer for; they count as eager."""

    @property
    def rank(self) -> tuple[float, float]:
        """What tables are compared by: the objective, and of equal ones the mean step."""
        return self.objective, self.mean_step_ms


class Pricing:
    """The time of a deployment's steps."""

    def __init__(self, deployment: Emulation, costs: Costs) -> None:
        self.deployment, self.costs = deployment, costs
        self._prices = Prices(costs, deployment, deployment.modes)
        self._known: dict[Batch, StepCost] = {}

    def step(self, batch: Batch) -> StepCost:
        """Return what a step of the target's ``batch`` takes.

        Raises ``PlanningError`` for a role of which the profile has no times.
        """
        if batch not in self._known:
            self._known[batch] = self._step(batch)
        return self._known[batch]

    def _step(self, batch: Batch) -> StepCost:
        passes, unknown = [], False
        for each, repeats in self._passes(batch):
            answer = self.deployment.dispatch(each)
            entry = answer.entry
            unknown = unknown or answer.reason is Reason.UNKNOWN
            fused = entry is not None and entry.draft_steps is not None
            every = self._prices.with_every_size(each, repeats, fused=fused)
            passes.append(PassCost(each, entry, self._prices.of(each, entry, repeats), every))
        target = [cost for cost in passes if not cost.batch.role.is_drafter]
        drafting = [cost for cost in passes if cost.batch.role.is_drafter]
        own, best = (
            self.costs.profile.step(batch.num_reqs, sum(map(time, target)), *map(time, drafting))
            for time in (attrgetter("milliseconds"), attrgetter("every_size"))
        )
        return StepCost(tuple(passes), own, best, unknown)

    def _passes(self, batch: Batch) -> Iterator[tuple[Batch, int]]:
        """Yield the passes of the roles that the engine runs: some draft without a model, or inside the target."""
        return (each for each in passes_of(batch, self.deployment) if each[0].role in self.deployment.modes)


def judged(
    pricing: Pricing, steps: Mapping[Batch, int], *, objective: str = "mean", accepted: float = 0.0
) -> SideFigures:
    """Return what a deployment's graphs cost, and what steps take.

    :param objective: as in ``Sizes.objective``: mean, regret, or a percentile as p99.
    :param accepted: drafts that a request gets accepted in a step, on average.
    """
    graphs = [(graph.role, graph.entry) for graph in pricing.deployment.graphs]
    capture = predict_graphs(pricing.costs.profile, graphs)
    spent = every = waited = worst = 0.0
    requests = unknown = 0
    eager: Counter[Role] = Counter()
    run: Counter[Role] = Counter()
    for batch, count in steps.items():
        step = pricing.step(batch)
        spent += step.milliseconds * count
        every += step.every_size * count
        worst = max(worst, step.milliseconds / step.every_size - 1)
        waited += step.milliseconds * batch.num_reqs * count
        requests += batch.num_reqs * count
        unknown += step.unknown * count
        for role, entry in step.answers.items():
            run[role] += count
            eager[role] += count * (entry is None)
    mean = spent / sum(steps.values())
    values = {"mean": mean, "regret": 1 + worst}
    return SideFigures(
        graphs=len(graphs),
        memory_mib=capture.memory_mib,
        seconds=capture.seconds,
        mean_step_ms=mean,
        token_ms=waited / requests / (1 + accepted),
        eager_share={role: eager[role] / max(run[role], 1) for role in pricing.deployment.modes},
        regret=spent / every - 1,
        worst_regret=worst,
        objective=values[objective] if objective in values else _percentile(pricing, steps, float(objective[1:])),
        unknown=unknown,
    )


def _percentile(pricing: Pricing, steps: Mapping[Batch, int], percent: float) -> float:
    """Return the milliseconds within which so many of the steps end."""
    left = sum(steps.values()) * percent / 100
    times = sorted((pricing.step(batch).milliseconds, count) for batch, count in steps.items())
    for milliseconds, count in times:
        left -= count
        if left <= 1e-9:
            return milliseconds
    return times[-1][0]
