"""TensorRT-LLM's PyTorch backend: which decode graphs it captures from ``trtllm-serve`` flags, and when they run."""

from capture_planner.engines.tensorrt_llm.emulate import ENGINE, emulate
from capture_planner.engines.tensorrt_llm.manager import DecodeGraphs, agreed

__all__ = ["ENGINE", "DecodeGraphs", "agreed", "emulate"]
