"""Plain torch attention, as a capture-planner backend: what the others are held against."""

from collections.abc import Iterable

from capture_planner.plugins.backend import Backend
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner_reference.backend import Reference

__all__ = ["Reference", "capture_planner_backends"]


@hookimpl
def capture_planner_backends() -> Iterable[Backend]:
    """Return the one backend of this distribution."""
    return (Reference(),)
