"""Hypothesis strategies for people who test backends, or tools over specs and plans.

Needs Hypothesis, which the extra ``testing`` brings.
"""

from __future__ import annotations

try:
    import hypothesis as _hypothesis
except ImportError as error:  # pragma: no cover - said in the message, seen without the extra only
    raise ImportError(
        "capture_planner.testing needs hypothesis; install it, or the extra 'testing' of capture-planner"
    ) from error

from capture_planner.testing.strategies import (
    Deployment,
    Document,
    FakeBackend,
    arbitrary_plans,
    backends,
    batches,
    deployments,
    documents,
    environments,
    padding_contracts,
    plans,
    registries,
    specs,
)
from capture_planner.testing.strategies.ranks import submissions, vectors

del _hypothesis

__all__ = [
    "Deployment",
    "Document",
    "FakeBackend",
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
    "submissions",
    "vectors",
]
