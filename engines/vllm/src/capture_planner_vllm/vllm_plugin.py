"""The entry point of vLLM's plugins: it installs what the environment asks for.

vLLM calls ``register`` through ``vllm.general_plugins`` in every process, before it makes a configuration. Without a
variable it imports nothing.

- ``CAPTURE_PLANNER_PLAN=FILE``: vLLM captures and dispatches what the plan says (``hooks``).
- ``CAPTURE_PLANNER_APPLY=0``: the plan is only compared with vLLM's configuration; each difference is a warning.
- ``CAPTURE_PLANNER_OBSERVE=FOLDER``, ``CAPTURE_PLANNER_PROFILE=1``: what ran is written down, with or without a plan.
- ``CAPTURE_PLANNER_STRICT=1``: warnings and errors of this plugin stop the start.

All lines go to the logger ``capture_planner.vllm``, each once per process.
"""

from __future__ import annotations

import os

PLAN = "CAPTURE_PLANNER_PLAN"
APPLY = "CAPTURE_PLANNER_APPLY"
OBSERVE = "CAPTURE_PLANNER_OBSERVE"
PROFILE = "CAPTURE_PLANNER_PROFILE"


def register() -> None:
    """Install the hooks that the variables ask for, once."""
    observe = bool(os.environ.get(OBSERVE)) or os.environ.get(PROFILE) == "1"
    if not os.environ.get(PLAN) and not observe:
        return
    # Imported late: vLLM calls this in every process, mostly without a variable.
    from capture_planner_vllm.inside import hooks

    hooks.install(apply=os.environ.get(APPLY) != "0", observe=observe)
