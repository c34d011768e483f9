"""Traffic from logs, metrics, observations and traces.

A format is a module: a ``LineFormat`` of lines that a log has among others (``lines``), or a function that reads a
whole file. ``reading`` has the table of them.
"""

from capture_planner.measuring.traffic.fitting import fitting
from capture_planner.measuring.traffic.reading import LINE_FORMATS, read_source, read_traffic
from capture_planner.measuring.traffic.request_trace import TraceLimits, part_of
from capture_planner.measuring.traffic.source import SourceCounts, SourceOptions, TrafficSource

__all__ = [
    "LINE_FORMATS",
    "SourceCounts",
    "SourceOptions",
    "TraceLimits",
    "TrafficSource",
    "fitting",
    "part_of",
    "read_source",
    "read_traffic",
]
