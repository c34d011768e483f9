"""Plans with graphs for decodes of varying query lengths, which no engine runs from a plan."""

from __future__ import annotations

from capture_planner.errors import FlagError, Problem
from capture_planner.records.plan import Plan

REMEDY = "plan without speculative.varying_decodes"


def varying_obstacle(plan: Plan, engine: str) -> str | None:
    """Return why an engine cannot run a plan whose decodes vary in length; None where they do not.

    vLLM 0.33 has such graphs with adaptive verification alone, at sizes in tokens, and SGLang and TensorRT-LLM have
    none: their decodes are uniform, so a graph of the plan would serve other batches there than it was planned for.
    """
    if plan.speculative is None or not plan.speculative.varying_decodes:
        return None
    return f"the plan's decodes vary in length, and {engine} has no such graphs at a plan's sizes"


def refuse_varying(plan: Plan, engine: str) -> None:
    """Raise ``FlagError`` for a plan whose decodes vary in length."""
    obstacle = varying_obstacle(plan, engine)
    if obstacle is not None:
        path = ("speculative", "varying_decodes")
        raise FlagError([Problem(path=path, message=obstacle, remedy=REMEDY)])
