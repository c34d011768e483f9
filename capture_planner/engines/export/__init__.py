"""From a plan to the flags of an engine: what comes closest, what it loses, and the proof."""

from capture_planner.engines.export.core import Cost, Difference, Effect, Export, Loss, Proof
from capture_planner.engines.export.mend import Mend, mend_vllm
from capture_planner.engines.export.proof import compared, prove

__all__ = [
    "Cost",
    "Difference",
    "Effect",
    "Export",
    "Loss",
    "Mend",
    "Proof",
    "compared",
    "mend_vllm",
    "prove",
]
