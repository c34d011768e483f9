"""Traffic of logs and metrics, in the formats of the installed engines."""

from __future__ import annotations

import re
from collections.abc import Iterable

from capture_planner.engines import engines
from capture_planner.measuring import traffic
from capture_planner.measuring.traffic import SourceOptions, TrafficReading
from capture_planner.measuring.traffic.formats import LogFormats
from capture_planner.measuring.traffic.source import Advance
from capture_planner.records.traffic import Traffic

WRITERS = {
    "vllm": re.compile(rb"(?i)vllm|\bIteration\(\d+\): \d+ context requests"),
    "sglang": re.compile(rb'(?i)sglang|(?:Decode|Prefill) batch|"scheduled_requests": ?\{'),
    "tensorrt_llm": re.compile(rb"(?i)tensorrt.llm|trt-?llm|currank_total_requests = "),
}
"""Engines whose distributions are in this repository, each with what shows that it wrote a log: for a message alone."""


def log_formats() -> list[LogFormats]:
    """Return what each of the installed engines writes about its batches."""
    return [item.value.logs for item in engines().values()]


def missing_reader(head: bytes) -> str:
    """Return how to install the engine that seems to have written a log; empty where it is installed, or unknown.

    :param head: beginning of the log.
    """
    for name, written in WRITERS.items():
        # An installed engine that does not know the log has nothing to be installed for it.
        if name not in engines() and written.search(head):
            return (
                f"it seems to be written by {name}, whose distribution is not installed; from a clone of "
                f"capture-planner: python -m pip install engines/{name}"
            )
    return ""


def read_sources(
    paths: Iterable[str], options: SourceOptions | None = None, advance: Advance = lambda _: None
) -> TrafficReading:
    """Do as ``measuring.traffic.read_sources``, with the formats of the installed engines."""
    return traffic.read_sources(paths, options, advance, formats=log_formats(), unread=missing_reader)


def read_traffic(
    paths: Iterable[str], options: SourceOptions | None = None, advance: Advance = lambda _: None
) -> tuple[Traffic, tuple[str, ...]]:
    """Return the traffic of sources, and some of the lines that could not be read, as ``read_sources`` does."""
    found = read_sources(paths, options, advance)
    return found.traffic, found.unreadable
