"""Costs: the figures of a profile as functions of the size, with what had to be assumed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import attrs

from capture_planner.errors import PlanningError, Problem
from capture_planner.modes import GraphMode, Role
from capture_planner.records.profile import CostCurve, GraphCost, Profile, family_name

Family = tuple[Role, GraphMode, int | None, int | None]
"""Role, mode, query length (None: mixed batches) and draft steps of a graph (None: one pass)."""

PIECES = 1.3
"""Launch time of a PIECEWISE graph's pieces, as a multiple of the smallest FULL graph of the role.

It is the host's work, and does not grow with the tokens. The least factor between the two in docs/lab/gpu.md is 2.3.
"""


@attrs.frozen
class Curve:
    """Milliseconds by padded tokens: the measured times, made non-decreasing and interpolated between sizes."""

    tokens: tuple[int, ...]
    milliseconds: tuple[float, ...]
    """After a running maximum: a size that takes longer than a larger one is a mistake of measuring, or dominated."""
    passes: float = 1
    """Passes of the curve in the pass that was asked for; a part of one where the measured chain is longer."""
    overhead: float = 0.0
    """Milliseconds that a step takes longer because its target runs in this mode, besides the pass."""
    is_graph: bool = False
    """True for graphs, whose larger sizes are bound by proportion; an eager pass goes on as over its last doubling."""
    bounds: tuple[Curve, ...] = ()
    """The same pass without a graph, or in pieces: a graph that is not measured takes no longer."""
    pieces: float = 0.0
    """Milliseconds that are added because the curve is that of FULL graphs, and PIECEWISE ones are asked for."""
    floor: Callable[[int], float] | None = None
    """Least milliseconds by tokens: those of the host that no other pass of the step hides."""
    experts: Callable[[int], float] | None = None
    """Milliseconds of the experts in an eager pass, by tokens, which are left out as they are of graphs."""

    @classmethod
    def of(cls, measured: CostCurve, passes: float = 1, overhead: float = 0.0) -> Curve:
        """Return the function of a measured curve."""
        times = tuple(accumulate(measured.milliseconds, max))
        return cls(measured.tokens, times, passes, overhead, is_graph=measured.mode is not GraphMode.NONE)

    @property
    def reach(self) -> int:
        """The most tokens that were measured."""
        return self.tokens[-1]

    def __call__(self, tokens: int) -> float:
        """Return the milliseconds of ``tokens``; beyond the last measured size by the rule of ``Costs``."""
        own = self._pass(tokens)
        return (own if self.floor is None else max(own, self.floor(tokens))) + self.overhead

    def _pass(self, tokens: int) -> float:
        least = self._measured(min(tokens, self.reach) if self.is_graph else tokens) * self.passes
        if self.experts is not None:
            least = max(least - self.experts(tokens), 0.0)
        if not self.is_graph or (tokens <= self.reach and not self.pieces):
            return least
        bound = least * max(tokens / self.reach, 1.0) + self.pieces * self.passes
        bound = min((bound, *(each._pass(tokens) for each in self.bounds if tokens <= each.reach)))
        return max(least, bound)

    def _measured(self, tokens: int) -> float:
        sizes, times = self.tokens, self.milliseconds
        index = bisect_left(sizes, tokens)
        if index < len(sizes) and sizes[index] == tokens:
            return times[index]
        # Below the smallest size, or with one size only, no slope was measured.
        if index == 0 or len(sizes) == 1:
            return times[0]
        if index < len(sizes):
            left, before, right, after = sizes[index - 1], times[index - 1], sizes[index], times[index]
        else:
            # Two sizes near each other say nothing about a slope: what one took longer would count a thousand times.
            left, right, after = max(sizes[0], sizes[-1] // 2), sizes[-1], times[-1]
            before = self._measured(left)
        return before + (after - before) / (right - left) * (tokens - left)


@attrs.frozen
class Costs:
    """The costs of one deployment's passes and graphs, by a profile.

    Beyond what was measured there is one rule. A graph larger than the largest that was measured takes as much longer
    as it has more tokens, and never longer than an eager pass, or than the PIECEWISE graph in place of a FULL one, that
    was measured at so many. An eager pass larger than the largest goes on as it grew over its last doubling, and never
    takes less. Where no PIECEWISE graph of a role was measured, one takes ``PIECES`` smallest FULL graphs longer than
    the FULL graph of its size, and never longer than the eager pass; all these are bounds from above. Where no FULL
    graph was measured, one takes what the PIECEWISE graph does.

    The experts of a mixture take the same on any graph and on none, as they skip padding. So no time here has them
    (``Profile.experts``), and a bound on a ratio is stricter than with them.
    """

    profile: Profile

    def graph(self, family: Family) -> Curve:
        """Return the time of a replay by padded tokens; raises ``PlanningError`` where no curve is near.

        The times of a target's passes include what a step takes longer besides the pass, in this mode.

        :param family: with the mode NONE, an eager pass.
        """
        nearest = self._nearest(family)
        # A chain of draft decodes is its number of single passes, or a part or a multiple of another chain.
        role, mode, query_len, draft_steps = family
        # What the mode of the target's pass adds to the base overhead of a step.
        overhead = 0.0 if role.is_drafter else self.profile.overhead(mode, query_len) - self.profile.base_overhead
        passes = draft_steps or 1
        curve = Curve.of(nearest, passes / (nearest.draft_steps or 1), overhead)
        if not role.is_drafter and self.profile.floor(mode, query_len):
            curve = attrs.evolve(curve, floor=self._floor(mode, query_len))
        if not curve.is_graph:
            if not self.profile.experts:
                return curve
            experts = self.profile.expert_milliseconds
            return attrs.evolve(curve, experts=lambda tokens: experts(role, tokens) * passes)
        bounds = [self.known((role, GraphMode.NONE, query_len, draft_steps))]
        if mode is GraphMode.FULL and draft_steps is None and self.has_mode(role, GraphMode.PIECEWISE):
            bounds.append(self.known((role, GraphMode.PIECEWISE, None, None)))
        known = tuple(each for each in bounds if each is not None)
        return attrs.evolve(curve, bounds=known, pieces=self._pieces(family, nearest))

    def _floor(self, mode: GraphMode, query_len: int | None) -> Callable[[int], float]:
        """Return the least milliseconds of a target's pass by tokens: the step's, without what its drafts take."""
        floor, drafting = self.profile.floor(mode, query_len), self.least_drafting(mode, query_len)
        return lambda tokens: floor - drafting(tokens)

    def least_drafting(self, mode: GraphMode, query_len: int | None) -> Callable[[int], float]:
        """Return the milliseconds by tokens that a drafter's passes of a step take at least; 0.0 without a drafter.

        :param mode: in which the draft prefill runs, as the target does.
        """
        speculative = self.profile.speculative
        prefill = self.known((Role.DRAFT_PREFILL, mode, query_len, None))
        decode = self.known((Role.DRAFT_DECODE, GraphMode.FULL, 1, None))
        # Of as few requests as there can be: what more of them take is added.
        decodes = (speculative.num_tokens - 1) * decode(1) if decode is not None and speculative is not None else 0.0
        return lambda tokens: decodes + (0.0 if prefill is None else prefill(tokens))

    def eager(self, role: Role, query_len: int | None, draft_steps: int | None = None) -> Curve:
        """Return the time of an eager pass by tokens; raises ``PlanningError`` where no curve is near."""
        return self.graph((role, GraphMode.NONE, query_len, draft_steps))

    def known(self, family: Family) -> Curve | None:
        """Return the time of a pass by padded tokens, with the mode NONE an eager one; None: the profile has none."""
        return self.graph(family) if self._alike(family) else None

    def has_mode(self, role: Role, mode: GraphMode) -> bool:
        """Say whether graphs of a role were measured in this mode; else its times are assumed."""
        return any(curve.role is role and curve.mode is mode for curve in self.profile.curves)

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
                known, more = family_name(*nearest.key), ""
                if self._pieces(family, nearest):
                    more = f", and {self._pieces(family, nearest):.3g} ms more for the pieces, up to the eager time"
                yield f"times of {family_name(*family)} are taken from {known}, which the profile has{more}"

    def bounds(self, families: Mapping[Family, int]) -> Iterator[str]:
        """Yield a sentence for each reach beyond which times are bounds; ``families``: each with its most tokens."""
        beyond: dict[int, list[str]] = {}
        for family, most in families.items():
            if family[1] is not GraphMode.NONE and most > (reach := self._nearest(family).tokens[-1]):
                beyond.setdefault(reach, []).append(family_name(*family))
        for reach, names in sorted(beyond.items()):
            yield (
                f"beyond {reach} tokens times of {', '.join(names)} are a bound: they grow in proportion to the "
                "tokens, up to the eager time"
            )

    def _pieces(self, family: Family, nearest: CostCurve) -> float:
        """Return what is added to each time of the nearest curve for the pieces of a family's graphs."""
        assumed = family[1] is GraphMode.PIECEWISE and nearest.mode is GraphMode.FULL
        return PIECES * nearest.milliseconds[0] if assumed else 0.0

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
        # A single pass is nearer than a chain of another length, whose passes are known only together.
        steps is not None,
        abs((steps or 1) - (wanted_steps or 1)),
        mode is not wanted_mode,
        (query_len is None) is not (wanted_len is None),
        abs((query_len or 0) - (wanted_len or 0)),
        # These break ties, so that a choice does not depend on the order of the profile.
        mode.value,
        query_len or 0,
        steps or 0,
    )


def _absent(what: str) -> PlanningError:
    problem = Problem(path=("sizes", "profile"), message=f"the profile has {what}", remedy="profile this deployment")
    return PlanningError([problem])
