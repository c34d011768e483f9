"""Bench: measure a plan on this machine, each figure against another of the same run."""

from capture_planner.bench.measure import Bench, measure
from capture_planner.bench.record import FIGURES, BenchReport
from capture_planner.bench.targets import verdicts

__all__ = ["FIGURES", "Bench", "BenchReport", "measure", "verdicts"]
