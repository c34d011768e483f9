"""What steps take under a table of graphs, of a plan or of an engine, and with every size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs, Family
from capture_planner.planning.steps import Steps, passes_of
from capture_planner.records.batch import Batch, Entry, Kind
from capture_planner.records.batch_space import Deployment, decode_families, kind_of, token_step

Answer = Callable[[Batch], Entry | None]
"""Which entry serves a batch; None: it runs eager."""

Modes = Mapping[Role, GraphMode]
"""The mode of each role, by which a table with every size is judged."""


@attrs.frozen(kw_only=True)
class Judgement:
    """What the steps of a traffic take, by a profile."""

    steps: int
    mean_step_ms: float
    """Mean time of a step, in milliseconds; 0 without steps."""
    every_size_ms: float
    """The same with a graph of every size that the profile reaches, in the same modes."""
    eager_share: float
    """Share of the steps in which at least one pass runs eager."""
    times: tuple[tuple[float, int], ...]
    """Milliseconds of a step with the number of steps that take them, ascending."""

    @property
    def regret(self) -> float:
        """How much longer the mean step takes than with every size, as a share."""
        return self.mean_step_ms / self.every_size_ms - 1 if self.every_size_ms else 0.0

    def percentile(self, percent: float) -> float:
        """Return the time within which ``percent`` of the steps end, in milliseconds; 0 without steps."""
        left = self.steps * percent / 100
        for time, count in self.times:
            left -= count
            if left <= 1e-9:
                return time
        return 0.0


def judge(answer: Answer, steps: Steps, costs: Costs, deployment: Deployment, modes: Modes) -> Judgement:
    """Return what ``steps`` take where ``answer`` dispatches.

    Raises ``PlanningError`` where the profile has no times of a role.
    """
    prices = Prices(costs, deployment, modes)
    times: dict[float, int] = {}
    spent = every = 0.0
    eager = 0
    for batch, count in steps.counts.items():
        passes, is_eager = [], False
        for each, repeats in passes_of(batch, deployment):
            entry = answer(each)
            is_eager |= entry is None
            fused = entry is not None and entry.draft_steps is not None
            passes.append((prices.of(each, entry, repeats), prices.with_every_size(each, repeats, fused=fused)))
        own, best = (costs.profile.step(batch.num_reqs, *times) for times in zip(*passes, strict=True))
        spent, every = spent + own * count, every + best * count
        times[own] = times.get(own, 0) + count
        eager += count * is_eager
    total = steps.total or 1
    return Judgement(
        steps=steps.total,
        mean_step_ms=spent / total,
        every_size_ms=every / total,
        eager_share=eager / total,
        times=tuple(sorted(times.items())),
    )


class Prices:
    """The time of passes, by the entry that serves them."""

    def __init__(self, costs: Costs, deployment: Deployment, modes: Modes) -> None:
        self.graph, self.eager, self.reach = cache(costs.graph), cache(costs.eager), cache(costs.reach)
        self.modes, self._step = modes, token_step(deployment.parallel)
        self._families = {role: decode_families(role, deployment) for role in Role}

    def of(self, batch: Batch, entry: Entry | None, repeats: int) -> float:
        """Return the milliseconds of ``repeats`` passes of a batch on its entry."""
        if entry is None:
            return self._eager(batch, repeats)
        curve = self.graph((batch.role, entry.mode, entry.query_len, entry.draft_steps))
        return curve(entry.num_tokens) * (repeats if entry.draft_steps is None else 1)

    def with_every_size(self, batch: Batch, repeats: int, *, fused: bool = False) -> float:
        """Return the milliseconds of ``repeats`` passes on graphs of the batch's own size, in its role's mode."""
        mode = self.modes.get(batch.role, GraphMode.NONE)
        is_decode = kind_of(batch, self._families[batch.role]) is Kind.DECODE
        lowered = mode.decode_mode if is_decode else mode.mixed_mode
        own = is_decode and mode.is_separate
        tokens = -(-batch.num_tokens // self._step) * self._step
        family: Family = (batch.role, lowered, batch.query_len if own else None, repeats if fused else None)
        if lowered is GraphMode.NONE or not (own or tokens <= self.reach(family)):
            return self._eager(batch, repeats)
        return self.graph(family)(tokens) * (1 if fused else repeats)

    def _eager(self, batch: Batch, repeats: int) -> float:
        chain = repeats if batch.role is Role.DRAFT_DECODE else None
        return self.eager(batch.role, batch.uniform_query_len, chain)(batch.num_tokens)
