"""Traffic of logs and metrics, in the formats of the installed engines."""

from __future__ import annotations

from collections.abc import Iterable

from capture_planner.engines import engines
from capture_planner.measuring import traffic
from capture_planner.measuring.traffic import SourceOptions, TrafficReading, TrafficSource
from capture_planner.measuring.traffic.formats import LogFormats
from capture_planner.measuring.traffic.source import Advance
from capture_planner.records.traffic import Traffic


def log_formats() -> list[LogFormats]:
    """Return what each of the installed engines writes about its batches."""
    return [item.value.logs for item in engines().values()]


def read_sources(
    sources: Iterable[str | TrafficSource], options: SourceOptions | None = None, advance: Advance = lambda _: None
) -> TrafficReading:
    """Do as ``measuring.traffic.read_sources``, with the formats of the installed engines."""
    return traffic.read_sources(sources, options, advance, formats=log_formats())


def read_traffic(
    paths: Iterable[str], options: SourceOptions | None = None, advance: Advance = lambda _: None
) -> tuple[Traffic, tuple[str, ...]]:
    """Return the traffic of sources, and some of the lines that could not be read, as ``read_sources`` does."""
    found = read_sources(paths, options, advance)
    return found.traffic, found.unreadable
