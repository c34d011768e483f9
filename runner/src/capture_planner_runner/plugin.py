"""What the runner adds to capture-planner: commands, and what measures. Every start imports it, so it is cheap."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from capture_planner.plugins import Command, hookimpl
from capture_planner_runner._extras import refuse_missing

if TYPE_CHECKING:
    from capture_planner.plugins.profiler import Profiler, ProfileSettings, Progress
    from capture_planner.records.environment import Environment
    from capture_planner.records.plan import Plan
    from capture_planner.records.profile import Profile

HERE = "capture_planner_runner.cli"


class TorchProfiler:
    """The profiler behind the core's command ``profile``; torch is imported when something is measured."""

    def machine(self) -> Environment | None:
        """Return this machine where it has a GPU."""
        refuse_missing()
        from capture_planner_runner.host import gpu_environment

        return gpu_environment()

    def profile(self, plan: Plan, settings: ProfileSettings, progress: Progress) -> Profile:
        """Measure with the installed backends, on the settings' number of threads."""
        refuse_missing()
        import torch

        from capture_planner.plugins.registry import load_backends
        from capture_planner_runner.bench import profiling

        torch.set_num_threads(settings.threads)
        return profiling.profile(plan, load_backends(), settings, progress)


@hookimpl
def capture_planner_commands() -> Iterable[Command]:
    """Return the commands that execute and measure."""
    return (
        Command(name="run", help="Execute a plan on this machine and report.", target=f"{HERE}.run:run"),
        Command(name="bench", help="Measure a plan on this machine.", target=f"{HERE}.bench:bench"),
        Command(
            name="environment",
            help="Describe this machine as an environment file.",
            target=f"{HERE}.environment:environment",
        ),
    )


@hookimpl
def capture_planner_profilers() -> Iterable[Profiler]:
    """Return what measures a profile with torch."""
    return (TorchProfiler(),)
