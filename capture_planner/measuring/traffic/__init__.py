"""Traffic from logs, metrics, observations and traces.

The formats of engines' logs and metrics come with their distributions (``formats``, ``Engine.logs``);
``capture_planner.engines.logs`` reads with those of all installed engines.
"""

from typing import TYPE_CHECKING

from capture_planner.lazy import lazy_names
from capture_planner.measuring.traffic.fitting import fitting

if TYPE_CHECKING:
    from capture_planner.measuring.traffic.reading import TrafficReading, read_sources
    from capture_planner.measuring.traffic.request_trace import TraceLimits
    from capture_planner.measuring.traffic.source import RequestTrace, SourceCounts, SourceOptions, TrafficSource

__all__ = [
    "RequestTrace",
    "SourceCounts",
    "SourceOptions",
    "TraceLimits",
    "TrafficReading",
    "TrafficSource",
    "fitting",
    "read_sources",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "reading": ("TrafficReading", "read_sources"),
        "request_trace": ("TraceLimits",),
        "source": ("RequestTrace", "SourceCounts", "SourceOptions", "TrafficSource"),
    },
)
