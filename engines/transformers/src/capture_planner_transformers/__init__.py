"""transformers' continuous batching under a plan: ``apply(model, plan)``, then serve as before."""

from collections.abc import Iterable
from typing import Any

from capture_planner.plugins.hookspecs import hookimpl
from capture_planner_transformers.apply import Application, apply

__all__ = ["Application", "apply"]


@hookimpl
def capture_planner_engines() -> Iterable[Any]:
    """Return no engine: transformers has no command line that says what it captures.

    It captures a graph when a batch first needs one, so that depends on the requests and on free memory.
    """
    return ()
