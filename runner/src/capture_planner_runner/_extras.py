"""The packages that the runner needs, and how to get those that are missing."""

from __future__ import annotations

import importlib.util

from capture_planner.errors import RunError

RUN_PACKAGES = ("torch", "transformers", "safetensors", "numpy")
"""The packages that execute a plan; their modules have the same names."""


def refuse_missing(subject: str = "executing a plan", packages: tuple[str, ...] = RUN_PACKAGES) -> None:
    """Refuse where a package that ``subject`` needs is missing; raises ``RunError`` with the remedy."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise RunError(
            f"{subject} needs {', '.join(missing)}; install the runner with its dependencies, from a clone with: "
            "python -m pip install ./runner"
        )


def refuse_without_hypothesis(subject: str) -> None:
    """Refuse ``subject`` where Hypothesis is missing; raises ``RunError``."""
    refuse_missing()
    if importlib.util.find_spec("hypothesis") is None:
        raise RunError(
            f"{subject} needs hypothesis; install the runner's extra `testing`, from a clone with: "
            "python -m pip install './runner[testing]'"
        )
