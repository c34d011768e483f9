"""The entry point of SGLang's plugins: it registers what the environment asks for.

SGLang calls ``register`` through ``sglang.srt.plugins`` in each of its processes. Without a variable it imports
nothing.

- ``CAPTURE_PLANNER_PLAN=FILE``: each role captures and dispatches what the plan says (``inside.hooks``).
- ``CAPTURE_PLANNER_OBSERVE=FOLDER``, ``CAPTURE_PLANNER_PROFILE=1``: what ran is written down, with or without a plan.
- ``CAPTURE_PLANNER_STRICT=1``: where the plan cannot be applied, SGLang does not start.

All lines go to the logger ``capture_planner.sglang``.
"""

from __future__ import annotations

import logging
import os

PLAN = "CAPTURE_PLANNER_PLAN"
OBSERVE = "CAPTURE_PLANNER_OBSERVE"
STRICT = "CAPTURE_PLANNER_STRICT"


def register() -> None:
    """Register the hooks that the environment asks for; SGLang applies them."""
    path, folder = os.environ.get(PLAN), os.environ.get(OBSERVE)
    if not path and not folder:
        return
    try:
        from capture_planner_sglang.inside import hooks

        hooks.register(path, folder)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        logging.getLogger("capture_planner.sglang").error("SGLang is left alone: %s: %s", path or folder, reason)
        if os.environ.get(STRICT) == "1":
            # SGLang swallows every Exception of a plugin.
            raise SystemExit(f"capture_planner: {path or folder}: {reason}") from error
