"""The conformance suite: attacks a backend's padding contract, its captures and its replays.

From pytest, one empty class runs all of it::

    from capture_planner_conformance import ConformanceTests

    class TestAcme(ConformanceTests):
        backend = "acme"

Any other program calls it, here with a few small scenes::

    from capture_planner_conformance import SearchProfile, SuiteOptions, conform, under_test

    few = SearchProfile(name="few", examples=2, steps=4)
    result = conform(under_test("reference"), SuiteOptions(profile=few, audits=False))
    assert result.passed, result.failures

``capture-planner conformance NAME`` runs it from the command line.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capture_planner_conformance.audits import AuditResult, Verdict, attack_case, audit, verdicts
    from capture_planner_conformance.deployments import scenes
    from capture_planner_conformance.failure import Check, Failure, Violation
    from capture_planner_conformance.machine import ConformanceMachine, Log, PlayResult, play
    from capture_planner_conformance.minimize import with_causes
    from capture_planner_conformance.pytest_plugin import ConformanceTests
    from capture_planner_conformance.scene import Case, Scene, Shape, dumps, loads
    from capture_planner_conformance.shapes import RefusedShape, usable_shapes
    from capture_planner_conformance.stage import Stage, Subject, under_test
    from capture_planner_conformance.suite import (
        DEFAULT,
        THOROUGH,
        SearchProfile,
        SuiteOptions,
        SuiteResult,
        conform,
        replay,
        search,
    )
    from capture_planner_conformance.tampering import Attack

__all__ = [
    "DEFAULT",
    "THOROUGH",
    "Attack",
    "AuditResult",
    "Case",
    "Check",
    "ConformanceMachine",
    "ConformanceTests",
    "Failure",
    "Log",
    "PlayResult",
    "RefusedShape",
    "Scene",
    "SearchProfile",
    "Shape",
    "Stage",
    "Subject",
    "SuiteOptions",
    "SuiteResult",
    "Verdict",
    "Violation",
    "attack_case",
    "audit",
    "conform",
    "dumps",
    "loads",
    "play",
    "replay",
    "scenes",
    "search",
    "under_test",
    "usable_shapes",
    "verdicts",
    "with_causes",
]

_HOMES = {
    "audits": ("AuditResult", "Verdict", "attack_case", "audit", "verdicts"),
    "deployments": ("scenes",),
    "failure": ("Check", "Failure", "Violation"),
    "machine": ("ConformanceMachine", "Log", "PlayResult", "play"),
    "minimize": ("with_causes",),
    "pytest_plugin": ("ConformanceTests",),
    "scene": ("Case", "Scene", "Shape", "dumps", "loads"),
    "shapes": ("RefusedShape", "usable_shapes"),
    "stage": ("Stage", "Subject", "under_test"),
    "suite": ("DEFAULT", "THOROUGH", "SearchProfile", "SuiteOptions", "SuiteResult", "conform", "replay", "search"),
    "tampering": ("Attack",),
}
"""The module of each public name, imported at its first use: the two plugins of this package load without torch."""


def __getattr__(name: str) -> object:
    """Import a public name from its module, once."""
    for home, names in _HOMES.items():
        if name in names:
            value: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names too that were not imported yet."""
    return sorted({*globals(), *__all__})
