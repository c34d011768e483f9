"""What the runner adds to capture-planner: commands, and what measures. Every start imports it, so it is cheap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from capture_planner.plugins import Command, hookimpl

if TYPE_CHECKING:
    from capture_planner.plugins.profiler import Profiler

HERE = "capture_planner_runner.cli"


@hookimpl
def capture_planner_commands() -> Iterable[Command]:
    """Return the commands that execute, measure and test."""
    return (
        Command(name="run", help="Execute a plan on this machine and report.", target=f"{HERE}.run:run"),
        Command(name="bench", help="Measure a plan on this machine.", target=f"{HERE}.bench:bench"),
        Command(
            name="conformance", help="Test a backend under captured graphs.", target=f"{HERE}.conformance:conformance"
        ),
        Command(
            name="environment",
            help="Describe this machine as an environment file.",
            target=f"{HERE}.environment:environment",
        ),
    )


@hookimpl
def capture_planner_profilers() -> Iterable[Profiler]:
    """Return what measures a profile with torch."""
    from capture_planner_runner.profiler import TorchProfiler

    return (TorchProfiler(),)
