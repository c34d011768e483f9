"""A start of vLLM under a plan: that it came up is marked, and one that fails says how to start without the plan.

Follows ``Worker`` of vllm/v1/worker/gpu_worker.py, 0.33: the last of its stages captures the graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from capture_planner.engines.launch import mark_started
from capture_planner.records._base import digest
from capture_planner.records.plan import Plan
from capture_planner_vllm.inside.log import LOG
from capture_planner_vllm.inside.seam import wrap

WORKER = "vllm.v1.worker.gpu_worker"
LAST = "compile_or_warm_up_model"
STAGES = ("init_device", "load_model", "determine_available_memory", "initialize_from_config", LAST)


def watch(module: ModuleType, plan: Plan | None, path: str) -> None:
    """Wrap the stages of the workers that a module has; another vLLM, with other stages, starts as it does.

    :param plan: what this process applies, from the file at ``path``.
    """
    worker = getattr(module, "Worker", None)
    named = path if plan is None else f"{path} ({digest(plan)[:15]})"

    def explained(original: Callable[..., Any]) -> Callable[..., Any]:
        return _explained(original, named)

    for stage in STAGES:
        # What another release calls differently is not worth a refused start.
        if hasattr(worker, stage):
            wrap(worker, stage, explained)


def _explained(original: Callable[..., Any], named: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = original(*args, **kwargs)
        # Not BaseException: a start that is interrupted has not failed.
        except Exception:
            LOG.error(
                "vLLM ended in %s, before its graphs were captured; it ran under the plan %s; to start without it, "
                "unset CAPTURE_PLANNER_PLAN, or leave out `capture-planner launch PLAN --`",
                original.__name__,
                named,
            )
            raise
        # launch --auto takes a run without the mark for one that failed under its plan.
        if original.__name__ == LAST:
            mark_started()
        return result

    return run
