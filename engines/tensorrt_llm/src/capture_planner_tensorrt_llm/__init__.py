"""TensorRT-LLM's PyTorch backend: which decode graphs it captures from ``trtllm-serve`` flags, and when they run."""

from collections.abc import Iterable

from capture_planner.engines.engine import Engine
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner_tensorrt_llm.emulate import ENGINE, emulate
from capture_planner_tensorrt_llm.manager import DecodeGraphs, agreed

__all__ = ["ENGINE", "DecodeGraphs", "agreed", "emulate"]


@hookimpl
def capture_planner_engines() -> Iterable[Engine]:
    """Return the one engine of this distribution."""
    return (ENGINE,)
