"""The optional packages that executing a plan needs."""

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
    """Raise ``RunError``, with what to install, where a package is missing."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RunError(
            f"executing a plan needs {', '.join(missing)}; install the extra `run`, from a clone with: "
            "python -m pip install '.[run]'"
        )
