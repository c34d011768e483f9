"""A plan's budget in an export: fewer sizes where the engine would capture more graphs than it allows."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from functools import cache

import attrs

from capture_planner.engines.export.export import Export, Loss, all_scopes
from capture_planner.engines.export.proof import Emulate, emulated, prove
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted

RATIOS = tuple(Fraction(part, 8) for part in (*range(9, 17), *range(18, 33, 2), 40, 48, 64, 96, 128, 256, 512))
"""Worst padded/real ratios that are tried, the least first."""


def within_budget(export: Export, plan: Plan, emulate: Emulate) -> Export:
    """Return a proved export with at most the graphs that the plan's budget allows, and what that costs.

    An engine captures each size for every role, query length and adapter case, and so may capture more graphs than the
    plan has. Where no list of sizes has few enough, or the engine's exporter knows no coarser ones, that is a loss too.
    """
    bound = plan.allowed_graphs()
    captured = 0 if export.proof is None else export.proof.captured
    if bound is None or captured <= bound[0]:
        return export
    allowed, limit = bound
    says = f"with these sizes {export.engine} captures {counted(captured, 'graph')}, and {limit} allows {allowed}"
    coarser = export.coarser
    if coarser is None:
        return _lost(export, plan, f"{says}; give fewer sizes")

    @cache
    def thinned(ratio: Fraction) -> tuple[Export, int]:
        other = coarser(ratio)
        # What the first proof left out stays out.
        settings = {name: value for name, value in other.settings.items() if name in export.settings}
        if export.drafter_backend is None and other.drafter_backend is not None:
            flag, key = other.drafter_backend
            settings |= {flag: {name: value for name, value in settings.get(flag, {}).items() if name != key}}
        other = attrs.evolve(other, settings=settings)
        return other, len(emulated(other, plan.environment, emulate).graphs)

    least = bisect_left(RATIOS, True, key=lambda ratio: thinned(ratio)[1] <= allowed)
    ratio = RATIOS[min(least, len(RATIOS) - 1)]
    other, graphs = thinned(ratio)
    sizes = f"{len(other.sizes)} sizes instead of {len(export.sizes)}"
    says = (
        f"{limit} allows {counted(allowed, 'graph')}, and {export.engine} would capture {captured} with the sizes of "
        f"the plan; {sizes} make {graphs}, and pad decodes by up to {float(ratio - 1):.0%}"
        if graphs <= allowed
        else f"{limit} allows {counted(allowed, 'graph')}, and {export.engine} captures {graphs} even with {sizes}"
    )
    return _lost(prove(other, plan, emulate), plan, says)


def _lost(export: Export, plan: Plan, says: str) -> Export:
    scope = all_scopes(plan)
    cost = None if export.proof is None else export.proof.cost(scope)
    return attrs.evolve(export, losses=(Loss("budget", says, scope, cost), *export.losses))
