"""The conformance suite, on this machine."""

from capture_planner_conformance import ConformanceTests


class TestConformance(ConformanceTests):
    backend = "my-attention"
