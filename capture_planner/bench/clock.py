"""Clocks: CUDA events on a GPU, the host's clock on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch


class HostClock:
    """The host's clock: work on a CPU is done when the call returns."""

    name = "perf_counter"

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds from before ``work`` until the device has done all of it."""
        started = perf_counter()
        work()
        return perf_counter() - started


class EventClock(HostClock):
    """CUDA events on the current stream."""

    name = "CUDA events"

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds between two events around ``work``, once the second has passed."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3


def clock_of(device: torch.device) -> HostClock:
    """Return the clock for a device."""
    return EventClock() if device.type == "cuda" else HostClock()
