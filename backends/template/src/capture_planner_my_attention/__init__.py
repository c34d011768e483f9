"""The attention backend my-attention, for capture-planner."""

from collections.abc import Iterable

from capture_planner.plugins.backend import Backend
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner_my_attention.backend import MyBackend


@hookimpl
def capture_planner_backends() -> Iterable[Backend]:
    """Return the backends of this distribution."""
    return (MyBackend(),)
