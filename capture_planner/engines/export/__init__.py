"""From a plan to the flags of an engine: what comes closest, what it loses, and the proof."""

from capture_planner.engines.export.budget import within_budget
from capture_planner.engines.export.export import BatchDifference, Cost, Effect, Export, Loss, Proof
from capture_planner.engines.export.proof import compared, prove

__all__ = ["BatchDifference", "Cost", "Effect", "Export", "Loss", "Proof", "compared", "prove", "within_budget"]
