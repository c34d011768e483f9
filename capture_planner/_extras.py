"""What executing needs beside planning, and how to get it."""

from __future__ import annotations

import importlib.util

from capture_planner.errors import RunError

NEEDED = {"torch": "torch", "transformers": "transformers", "safetensors": "safetensors", "numpy": "numpy"}
"""Packages by the module that is looked for."""


def refuse_without_hypothesis(what: str) -> None:
    """Refuse ``what`` where Hypothesis is missing; raises ``RunError``."""
    refuse_missing()
    if importlib.util.find_spec("hypothesis") is None:
        raise RunError(
            f"{what} needs hypothesis; install the extras `run` and `testing`, from a clone with: "
            "python -m pip install '.[run,testing]'"
        )


def refuse_missing() -> None:
    """Refuse to execute anything where a package is missing, and say what to install; raises ``RunError``."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RunError(
            f"executing a plan needs {', '.join(missing)}; install the extra `run`, from a clone with: "
            "python -m pip install '.[run]'"
        )
