"""The packages that the runner needs, and how to get those that are missing."""

from __future__ import annotations

import importlib.util

from capture_planner.errors import RunError

RUN_PACKAGES = ("torch", "transformers", "safetensors", "numpy")
"""The packages that execute a plan; their modules have the same names."""


def refuse_missing(
    subject: str = "executing a plan", packages: tuple[str, ...] = RUN_PACKAGES, distribution: str = "runner"
) -> None:
    """Refuse where a package that ``subject`` needs is missing; raises ``RunError`` with the remedy.

    ``distribution``: the folder, in a clone, of the distribution that depends on the packages.
    """
    # Looked for and not imported: torch takes seconds.
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise RunError(
            f"{subject} needs {', '.join(missing)}; install capture-planner-{distribution} with its dependencies, "
            f"from a clone with: python -m pip install ./{distribution}"
        )
