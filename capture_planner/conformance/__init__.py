"""The conformance suite: attacks a backend's padding contract, its captures and its replays.

    from capture_planner import conformance
    outcome = conformance.conform(conformance.under_test("reference"))

``capture-planner conformance NAME`` is the same from the command line, and
``capture_planner.conformance.pytest_plugin`` from pytest.
"""

from capture_planner.conformance.audit import Attack, Audited, Verdict, attacked, audit, verdicts
from capture_planner.conformance.finding import Check, Finding, Violation
from capture_planner.conformance.here import under_test
from capture_planner.conformance.machine import (
    ConformanceMachine,
    Log,
    Played,
    play,
    played,
    scenes,
)
from capture_planner.conformance.scene import Case, Scene, Shape, dumps, loads
from capture_planner.conformance.shapes import Refused, usable_shapes
from capture_planner.conformance.stage import Stage, Tested
from capture_planner.conformance.suite import (
    DEFAULT,
    THOROUGH,
    Choices,
    Outcome,
    Profile,
    again,
    blamed,
    conform,
    search,
)

__all__ = [
    "DEFAULT",
    "THOROUGH",
    "Attack",
    "Audited",
    "Case",
    "Check",
    "Choices",
    "ConformanceMachine",
    "Finding",
    "Log",
    "Outcome",
    "Played",
    "Profile",
    "Refused",
    "Scene",
    "Shape",
    "Stage",
    "Tested",
    "Verdict",
    "Violation",
    "again",
    "attacked",
    "audit",
    "blamed",
    "conform",
    "dumps",
    "loads",
    "play",
    "played",
    "scenes",
    "search",
    "under_test",
    "usable_shapes",
    "verdicts",
]
