"""Paged attention in Triton, as a capture-planner backend: a GPU and torch are all it needs."""

from collections.abc import Iterable

from capture_planner.plugins.backend import Backend
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner_triton.backend import Triton

__all__ = ["Triton", "capture_planner_backends"]


@hookimpl
def capture_planner_backends() -> Iterable[Backend]:
    """Return the one backend of this distribution."""
    return (Triton(),)
