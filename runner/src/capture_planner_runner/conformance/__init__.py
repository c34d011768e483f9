"""The conformance suite: attacks a backend's padding contract, its captures and its replays.

    from capture_planner_runner import conformance
    result = conformance.conform(conformance.under_test("reference"))

``capture-planner conformance NAME`` runs it from the command line, and
``capture_planner_runner.conformance.pytest_plugin`` from pytest.
"""

from capture_planner_runner.conformance.audit import AuditResult, Verdict, attack_case, audit, verdicts
from capture_planner_runner.conformance.deployments import scenes
from capture_planner_runner.conformance.failure import Check, Failure, Violation
from capture_planner_runner.conformance.machine import ConformanceMachine, Log, PlayResult, play
from capture_planner_runner.conformance.minimize import with_causes
from capture_planner_runner.conformance.scene import Case, Scene, Shape, dumps, loads
from capture_planner_runner.conformance.shapes import RefusedShape, usable_shapes
from capture_planner_runner.conformance.stage import Stage, Subject, under_test
from capture_planner_runner.conformance.suite import (
    DEFAULT,
    THOROUGH,
    SearchProfile,
    SuiteOptions,
    SuiteResult,
    conform,
    replay,
    search,
)
from capture_planner_runner.conformance.tampering import Attack

__all__ = [
    "DEFAULT",
    "THOROUGH",
    "Attack",
    "AuditResult",
    "Case",
    "Check",
    "ConformanceMachine",
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
