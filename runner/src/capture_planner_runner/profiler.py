"""The profiler behind the core's command ``profile``."""

from __future__ import annotations

from capture_planner.plugins.profiler import ProfileSettings, Progress
from capture_planner.plugins.registry import load_backends
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner_runner._extras import refuse_missing


class TorchProfiler:
    """Measures graphs of this runner; torch is imported when something is measured."""

    def machine(self) -> Environment | None:
        """Return this machine where it has a GPU."""
        refuse_missing()
        from capture_planner_runner.host import gpu_environment

        return gpu_environment()

    def profile(self, plan: Plan, settings: ProfileSettings, progress: Progress) -> Profile:
        """Measure with the installed backends, on the settings' number of threads."""
        refuse_missing()
        import torch

        from capture_planner_runner.bench import profiling

        torch.set_num_threads(settings.threads)
        return profiling.profile(plan, load_backends(), settings, progress)
