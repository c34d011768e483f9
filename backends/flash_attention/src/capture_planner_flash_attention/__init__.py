"""FlashAttention 2, 3, 4 and torch's varlen attention, as one capture-planner backend."""

from collections.abc import Iterable

from capture_planner.plugins.backend import Backend
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner_flash_attention.backend import FlashAttention

__all__ = ["FlashAttention", "capture_planner_backends"]


@hookimpl
def capture_planner_backends() -> Iterable[Backend]:
    """Return the one backend of this distribution."""
    return (FlashAttention(),)
