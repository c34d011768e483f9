"""Costs: the figures of a profile as functions of the size, with what had to be assumed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

import attrs

from capture_planner.errors import PlanningError, Problem
from capture_planner.modes import GraphMode, Role
from capture_planner.records.profile import CostCurve, GraphCost, Profile, family_name

Family = tuple[Role, GraphMode, int | None, int | None]
"""Role, mode, query length (None: mixed batches) and draft steps of a graph (None: one pass)."""


@attrs.frozen
class Curve:
    """Milliseconds by padded tokens: non-decreasing, interpolated between measured sizes."""

    tokens: tuple[int, ...]
    milliseconds: tuple[float, ...]
    """After a running maximum: a size that takes longer than a larger one is a mistake of measuring, or dominated."""
    passes: float = 1
    """How many passes of the curve make the pass that was asked for; of a longer chain a part."""

    @classmethod
    def of(cls, measured: CostCurve, passes: float = 1) -> Curve:
        """Return the function of a measured curve."""
        return cls(measured.tokens, tuple(accumulate(measured.milliseconds, max)), passes)

    def __call__(self, tokens: int) -> float:
        """Return the milliseconds of ``tokens``; beyond the last measured size along the last slope."""
        sizes, times = self.tokens, self.milliseconds
        index = bisect_left(sizes, tokens)
        if index < len(sizes) and sizes[index] == tokens:
            return times[index] * self.passes
        if index == 0 or len(sizes) == 1:
            return times[0] * self.passes
        right = min(index, len(sizes) - 1)
        slope = (times[right] - times[right - 1]) / (sizes[right] - sizes[right - 1])
        return (times[right - 1] + slope * (tokens - sizes[right - 1])) * self.passes


@attrs.frozen
class Costs:
    """What passes and graphs of one deployment cost, by a profile."""

    profile: Profile

    def graph(self, family: Family) -> Curve:
        """Return the time of a replay by padded tokens; raises ``PlanningError`` where no curve is near."""
        return self._curve(family)

    def eager(self, role: Role, query_len: int | None, draft_steps: int | None = None) -> Curve:
        """Return the time of an eager pass by tokens; raises ``PlanningError`` where no curve is near."""
        return self._curve((role, GraphMode.NONE, query_len, draft_steps))

    def known(self, family: Family) -> Curve | None:
        """Return the time of a pass by padded tokens; None where the profile has no such times of the role.

        :param family: with the mode NONE, an eager pass.
        """
        return self._curve(family) if self._alike(family) else None

    def reach(self, family: Family) -> int:
        """Return the most tokens at which a replay was measured; raises ``PlanningError`` where no curve is near."""
        return self._nearest(family).tokens[-1]

    def of_graph(self, family: Family) -> GraphCost:
        """Return what one graph of a family costs; raises ``PlanningError`` where its role has none."""
        cost = self.cost_of(family)
        if cost is None:
            raise _absent(f"no costs of graphs of {family[0].value}")
        return cost

    def cost_of(self, family: Family) -> GraphCost | None:
        """Return what one graph of a family costs, or of the nearest one of its role; None: the profile has none."""
        return min(
            (cost for cost in self.profile.graphs if cost.role is family[0]),
            key=lambda cost: _distance(cost.key, family),
            default=None,
        )

    def assumptions(self, families: Sequence[Family]) -> Iterator[str]:
        """Yield a sentence for each family whose own curve is not in the profile."""
        for family in families:
            nearest = self._nearest(family)
            if nearest.key != family:
                known = family_name(*nearest.key)
                yield f"times of {family_name(*family)} are taken from {known}, which the profile has"

    def _curve(self, family: Family) -> Curve:
        nearest = self._nearest(family)
        # A chain of draft decodes is its number of single passes, or a part or a multiple of another chain.
        return Curve.of(nearest, (family[3] or 1) / (nearest.draft_steps or 1))

    def _nearest(self, family: Family) -> CostCurve:
        alike = self._alike(family)
        if not alike:
            raise _absent(f"no {'eager times' if family[1] is GraphMode.NONE else 'times of graphs'} of {family[0]}")
        return min(alike, key=lambda curve: _distance(curve.key, family))

    def _alike(self, family: Family) -> list[CostCurve]:
        """Return the curves of the family's role: of graphs, or of eager passes."""
        eager = family[1] is GraphMode.NONE
        curves = self.profile.curves
        return [each for each in curves if each.role is family[0] and (each.mode is GraphMode.NONE) is eager]


def _distance(key: Family, family: Family) -> tuple[object, ...]:
    """Order what a profile has by how near it is: length of the chain, mode, kind of batch, query length."""
    (_, mode, query_len, steps), (_, wanted_mode, wanted_len, wanted_steps) = key, family
    return (
        steps != wanted_steps,
        steps is not None,
        abs((steps or 1) - (wanted_steps or 1)),
        mode is not wanted_mode,
        (query_len is None) is not (wanted_len is None),
        abs((query_len or 0) - (wanted_len or 0)),
        mode.value,
        query_len or 0,
    )


def _absent(what: str) -> PlanningError:
    problem = Problem(path=("sizes", "profile"), message=f"the profile has {what}", remedy="profile this deployment")
    return PlanningError([problem])
