"""Timing the preparation of backends, without changing them."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import attrs

from capture_planner.plugins.registry import Registered, Registry
from capture_planner.records.backend import Backend
from capture_planner.runtime.executor import Executor, Metadata, Reservation


@attrs.define(eq=False)
class PrepareTimer:
    """The preparations of all backends since the last ``clear``."""

    seconds: float = 0.0
    calls: list[tuple[Executor, Metadata]] = attrs.Factory(list)
    """Each executor that prepared, with its argument."""

    def clear(self) -> None:
        """Forget the preparations so far."""
        self.seconds = 0.0
        self.calls.clear()

    def stock(self) -> float | None:
        """Time the libraries' own plan calls for the last preparations; None if they have none.

        An executor may offer its library's call by a method ``stock``, which takes a step's metadata and
        returns a callable; only that callable is timed.
        """
        plans = [
            stock(metadata)
            for executor, metadata in self.calls
            if metadata.is_full and (stock := getattr(executor, "stock", None)) is not None
        ]
        plans = [plan for plan in plans if plan is not None]
        if not plans:
            return None
        started = perf_counter()
        for plan in plans:
            plan()
        return perf_counter() - started

    def registry(self, registry: Registry) -> Registry:
        """Return the same backends, with timed executors."""
        return Registry(
            Registered(
                backend=_TimedBackend(entry.backend, self), distribution=entry.distribution, version=entry.version
            )
            if hasattr(entry.backend, "reserve")
            else entry
            for entry in registry.values()
        )


class _TimedBackend:
    """A backend whose executors are timed."""

    def __init__(self, backend: Backend, timer: PrepareTimer) -> None:
        # Attributes rather than __getattr__, which isinstance with a protocol does not see.
        self.name, self.support, self.padding = backend.name, backend.support, backend.padding
        self.refresh, self.workspace = backend.refresh, backend.workspace
        self._backend: Any = backend
        self._timer = timer

    def reserve(self, reservation: Reservation) -> Executor:
        """Reserve an executor, and time it."""
        executor: Executor = _TimedExecutor(self._backend.reserve(reservation), self._timer)
        return executor


class _TimedExecutor:
    """An executor whose preparation is timed; everything else goes to the real one."""

    def __init__(self, executor: Executor, timer: PrepareTimer) -> None:
        self._executor, self._timer = executor, timer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def prepare(self, metadata: Metadata) -> None:
        """Prepare a step, timed."""
        started = perf_counter()
        self._executor.prepare(metadata)
        self._timer.seconds += perf_counter() - started
        self._timer.calls.append((self._executor, metadata))
