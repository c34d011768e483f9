"""The conformance suite as the runner is tested with it: the public one, with what can be wrong in a runner alone.

Backends are attacked by ``capture_planner_conformance``, which trusts the runner that executes them. Here are
the scenes and the checks of the runner itself: dispatch, the classification and the fields of batches, replays, drafts
that are verified while requests are served, recurrent layers, coupled rows and compiled models; and, of their own, LoRA
of served requests and the agreement of ranks.

    from support.runner_conformance import runner_under_test
    result = conformance.conform(runner_under_test())
"""

from __future__ import annotations

from capture_planner.plugins.backend import Backend
from capture_planner_conformance import Subject, under_test
from support.runner_conformance.laws import RunnerCheck
from support.runner_conformance.stage import RunnerScene, RunnerStage

__all__ = ["RunnerCheck", "RunnerScene", "RunnerStage", "runner_under_test"]


def runner_under_test(backend: str | Backend = "reference") -> Subject:
    """Return the runner as it is tested with a healthy backend."""
    return under_test(backend, stage=RunnerStage)
