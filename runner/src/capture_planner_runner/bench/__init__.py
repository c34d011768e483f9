"""Bench: measure a plan on this machine, each figure against another of the same run."""

from capture_planner_runner.bench.measure import Bench, measure
from capture_planner_runner.bench.record import FIGURES, BenchReport, verdicts

__all__ = ["FIGURES", "Bench", "BenchReport", "measure", "verdicts"]
