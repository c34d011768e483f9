"""Strategies: specs, machines, backends, plans, batches and files, small but with their extremes.

What a strategy gives is always valid, unless its name says otherwise. A field that joins a record
joins its strategy here; ``tests/test_strategies.py`` fails until it does.
"""

from capture_planner.testing.strategies.files import DocumentText, documents
from capture_planner.testing.strategies.machines import (
    FakeBackend,
    PlanInputs,
    backends,
    deployments,
    environments,
    padding_contracts,
    registries,
)
from capture_planner.testing.strategies.plans import arbitrary_plans, batches, plans
from capture_planner.testing.strategies.specs import specs

__all__ = [
    "DocumentText",
    "FakeBackend",
    "PlanInputs",
    "arbitrary_plans",
    "backends",
    "batches",
    "deployments",
    "documents",
    "environments",
    "padding_contracts",
    "plans",
    "registries",
    "specs",
]
