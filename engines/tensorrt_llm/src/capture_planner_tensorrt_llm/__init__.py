"""TensorRT-LLM's PyTorch backend as an engine of capture-planner."""

from collections.abc import Iterable
from typing import Any

from capture_planner.plugins.hookspecs import hookimpl


@hookimpl
def capture_planner_engines() -> Iterable[Any]:
    """Return the engine; it is imported when engines are first needed."""
    from capture_planner_tensorrt_llm.engine import ENGINE

    return (ENGINE,)
