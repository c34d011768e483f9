"""The conformance suite, on this machine."""

from capture_planner_runner.conformance.pytest_plugin import ConformanceTests


class TestConformance(ConformanceTests):
    backend = "my-attention"
