"""Hypothesis strategies to test backends, and tools that read specs and plans.

Needs Hypothesis; from a clone of capture-planner: ``python -m pip install '.[testing]'``.
"""

from __future__ import annotations

try:
    import hypothesis as _hypothesis
except ImportError as error:  # pragma: no cover - seen without the extra only
    raise ImportError(
        "capture_planner.testing needs hypothesis; install the extra `testing`, from a clone of capture-planner "
        "with: python -m pip install '.[testing]'"
    ) from error

from capture_planner.testing.strategies.machines import (
    FakeBackend,
    PlanInputs,
    backends,
    deployments,
    environments,
    padding_contracts,
    registries,
)
from capture_planner.testing.strategies.measurements import measurements
from capture_planner.testing.strategies.plans import arbitrary_plans, batches, plans
from capture_planner.testing.strategies.specs import specs

del _hypothesis

__all__ = [
    "FakeBackend",
    "PlanInputs",
    "arbitrary_plans",
    "backends",
    "batches",
    "deployments",
    "environments",
    "measurements",
    "padding_contracts",
    "plans",
    "registries",
    "specs",
]
