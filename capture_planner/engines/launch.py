"""Launching under a plan: the variables that the plugin inside an engine reads, and what a command line lacks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import attrs

from capture_planner.errors import FlagError, Problem
from capture_planner.records.plan import Plan

PLAN = "CAPTURE_PLANNER_PLAN"
"""Names the plan's file for the plugin inside the engine."""
APPLY = "CAPTURE_PLANNER_APPLY"
"""Set to 0: a plan changes nothing, and differences from it are logged."""
OBSERVE = "CAPTURE_PLANNER_OBSERVE"
"""Names the folder that observations are written to."""
PROFILE = "CAPTURE_PLANNER_PROFILE"
"""Set to 1: graphs are timed after capture."""
STRICT = "CAPTURE_PLANNER_STRICT"
"""Set to 1: what the plugin would only log stops the start."""
STARTED = "CAPTURE_PLANNER_STARTED"
"""Names a file that the plugin makes when the first worker of an engine has captured its graphs."""


@attrs.frozen(kw_only=True)
class Launch:
    """Additions to a command line."""

    arguments: tuple[str, ...] = ()
    """Words to add at its end."""
    notes: tuple[str, ...] = ()
    """Cautions, and steps to do by hand, in a sentence each."""


def mark_started() -> None:
    """Make the file that ``CAPTURE_PLANNER_STARTED`` names, where it names one; for the plugin inside an engine.

    Where it cannot be made, as on another host, the engine counts as one that has not captured.
    """
    path = os.environ.get(STARTED)
    if path:
        with suppress(OSError):
            Path(path).touch()


WITHOUT_VARYING = "plan without speculative.varying_decodes"


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
        raise FlagError([Problem(path=path, message=obstacle, remedy=WITHOUT_VARYING)])
