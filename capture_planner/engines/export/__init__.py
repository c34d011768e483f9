"""From a plan to the flags of an engine: what comes closest, what it loses, and the proof."""

from collections.abc import Callable, Mapping

from capture_planner.engines.export.core import Cost, Difference, Effect, Export, Loss, Proof
from capture_planner.engines.export.mend import Mend, mend_vllm
from capture_planner.engines.export.proof import compared, prove
from capture_planner.engines.export.sglang import export_sglang
from capture_planner.engines.export.tensorrt_llm import export_tensorrt_llm
from capture_planner.engines.export.vllm import export_vllm
from capture_planner.plan import Plan

EXPORTERS: Mapping[str, Callable[[Plan], Export]] = {
    "vllm": export_vllm,
    "sglang": export_sglang,
    "tensorrt-llm": export_tensorrt_llm,
}
"""By the engine's name, as ``export --to`` takes it."""

__all__ = [
    "EXPORTERS",
    "Cost",
    "Difference",
    "Effect",
    "Export",
    "Loss",
    "Mend",
    "Proof",
    "compared",
    "export_sglang",
    "export_tensorrt_llm",
    "export_vllm",
    "mend_vllm",
    "prove",
]
