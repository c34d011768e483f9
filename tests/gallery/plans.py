"""Mutants that plan wrong: a spec that an engine's rule spoils, or a plan as the engine would have made it.

No backend runs here. Each mutant starts from a deployment whose plan has neither errors nor warnings
(``HEALTHY`` has that plan under the mutant's name) and differs from it by one bug.
"""

from __future__ import annotations

from collections.abc import Callable

from capture_planner.records.plan import Plan
from gallery import plan_resources, plan_shapes
from gallery.core import Mutant

_PLANTED = (*plan_shapes.PLANTED, *plan_resources.PLANTED)

MUTANTS: tuple[Mutant, ...] = tuple(planted.mutant for planted in _PLANTED)

HEALTHY: dict[str, Callable[[], Plan]] = {planted.mutant.name: planted.healthy for planted in _PLANTED}
"""By a mutant's name: the plan without its bug."""
