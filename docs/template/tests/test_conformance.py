"""The conformance suite, on this machine."""

from capture_planner.testing.plugin import ConformanceTests


class TestConformance(ConformanceTests):
    backend = "my-attention"
