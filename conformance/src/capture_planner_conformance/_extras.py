"""The packages that the suite needs, and how to get those that are missing."""

from __future__ import annotations

from capture_planner_runner._extras import RUN_PACKAGES, refuse_missing


def refuse_missing_packages() -> None:
    """Refuse where a package that the suite needs is missing; raises ``RunError`` with the remedy."""
    refuse_missing("the suite", (*RUN_PACKAGES, "hypothesis"), "conformance")
