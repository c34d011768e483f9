"""The public API: every public name exists, has one home, and is documented by the API reference.

The reference has one page per public package, each an ``automodule`` that documents ``__all__``. So the list
of names lives in the packages alone; this test holds the pages and ``__all__`` to each other.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

PAGES = Path(__file__).parent.parent / "docs" / "reference" / "api"

PACKAGES = (
    "capture_planner",
    "capture_planner.codec",
    "capture_planner.plugins",
    "capture_planner.planning",
    "capture_planner.dispatch",
    "capture_planner.analysis",
    "capture_planner.analysis.lint",
    "capture_planner.engines",
    "capture_planner.testing",
    "capture_planner_conformance",
)
"""The public packages. A name that none of them exports is private."""

RECORDS = (
    "spec",
    "model",
    "environment",
    "batch",
    "plan",
    "promise",
    "backend",
    "measurements",
    "observation",
    "traffic",
    "profile",
)
"""The modules of records: all classes that they define are public."""

MODULES = (
    "capture_planner.records",
    *(f"capture_planner.records.{name}" for name in RECORDS),
    "capture_planner.errors",
    "capture_planner.modes",
    "capture_planner.plugins.backend",
    "capture_planner.plugins.profiler",
    "capture_planner.plugins.registry",
    "capture_planner_runner.graphs.offloading",
    "capture_planner_runner.options",
    "capture_planner_runner.runner",
)
"""Public modules: all that they define is public. Importing those of the runner needs torch."""


def load(name: str) -> ModuleType:
    """Import a package; a test is skipped where an optional dependency of the package is missing."""
    if name == "capture_planner_conformance":
        pytest.importorskip("torch")
    if name in ("capture_planner.testing", "capture_planner_conformance"):
        pytest.importorskip("hypothesis")
    return importlib.import_module(name)


def documented() -> list[str]:
    """Return the modules that the pages of the reference document, in their order."""
    pages = sorted(PAGES.glob("*.md"))
    return [name for path in pages for name in re.findall(r"automodule:: (\S+)", path.read_text("utf-8"))]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_in_all_exists_once(package: str) -> None:
    module = load(package)
    assert Counter(module.__all__).most_common(1)[0][1] == 1
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_class_and_function_has_a_docstring(package: str) -> None:
    """Constants are exempt: their comment is in the source, where autodoc finds it."""
    module = load(package)
    values = ((name, getattr(module, name)) for name in module.__all__)
    assert [
        name for name, value in values if (inspect.isclass(value) or inspect.isroutine(value)) and not value.__doc__
    ] == []


def test_reference_documents_every_public_package_once() -> None:
    assert Counter(documented()) == Counter([*PACKAGES, *MODULES])


def test_reference_leaves_no_public_name_out() -> None:
    """No page lists names by hand, and none excludes any."""
    for path in PAGES.glob("*.md"):
        assert not re.search(r":(?:exclude-)?members: \S|autofunction|autoclass|autodata", path.read_text("utf-8"))
