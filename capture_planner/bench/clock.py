"""What times are taken with: events of the device, or the host's clock."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import torch


class Clock(Protocol):
    """Times work that is asked for on the current stream."""

    name: str

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds from before ``work`` to when the device has done all of it."""


class EventClock:
    """CUDA events on the current stream."""

    name = "CUDA events"

    def time(self, work: Callable[[], object]) -> float:
        """Record, work, record, and wait for the second event."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3


class HostClock:
    """The host's clock: what runs on a CPU is done when the call returns."""

    name = "perf_counter"

    def time(self, work: Callable[[], object]) -> float:
        """Read, work, read."""
        started = perf_counter()
        work()
        return perf_counter() - started


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return EventClock() if device.type == "cuda" else HostClock()
