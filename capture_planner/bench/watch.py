"""Watching what backends take to prepare, without a change to them."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import attrs

from capture_planner.modes import Refresh, Role
from capture_planner.plugins.registry import Registered, Registry
from capture_planner.records.backend import Attention, Backend, PaddingContract, Support, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits
from capture_planner.runtime.executor import Executor, Metadata, Reservation


@attrs.frozen(eq=False)
class Asked:
    """One preparation."""

    executor: Executor
    metadata: Metadata


@attrs.define(eq=False)
class Watch:
    """What the preparations since the last ``clear`` took, of all backends together, in seconds."""

    prepare: float = 0.0
    asked: list[Asked] = attrs.Factory(list)
    """Each executor that prepared, with what it was given."""

    def clear(self) -> None:
        """Forget all of it."""
        self.prepare = 0.0
        self.asked.clear()

    def stock(self) -> float | None:
        """Make the libraries' own plan calls for what was prepared last; None where there are none.

        An executor that has one says so by a method ``stock``: it takes a step's metadata and returns the
        call, which alone is timed.
        """
        calls = [
            stock(asked.metadata)
            for asked in self.asked
            if asked.metadata.is_full and (stock := getattr(asked.executor, "stock", None)) is not None
        ]
        calls = [call for call in calls if call is not None]
        if not calls:
            return None
        started = perf_counter()
        for call in calls:
            call()
        return perf_counter() - started

    def registry(self, registry: Registry) -> Registry:
        """Return the same backends, watched."""
        return Registry(
            Registered(
                backend=_Backend(found.backend, self), distribution=found.distribution, version=found.version
            )
            if hasattr(found.backend, "reserve")
            else found
            for found in registry.values()
        )


class _Backend:
    """A backend whose executors are watched."""

    def __init__(self, backend: Backend, watch: Watch) -> None:
        self._backend: Any = backend
        self._watch = watch

    @property
    def name(self) -> str:
        """The backend's."""
        return str(self._backend.name)

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """As the backend does."""
        found: Support = self._backend.support(role, model, environment)
        return found

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """As the backend does."""
        found: PaddingContract = self._backend.padding(role, model, environment)
        return found

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """As the backend does."""
        found: Refresh = self._backend.refresh(role, model, environment)
        return found

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """As the backend does."""
        found: Workspace = self._backend.workspace(role, model, environment, entries, limits)
        return found

    def reserve(self, reservation: Reservation) -> Executor:
        """Reserve, and watch."""
        executor: Executor = _Executor(self._backend.reserve(reservation), self._watch)
        return executor


class _Executor:
    """An executor whose preparation is timed; everything else goes to the real one."""

    def __init__(self, executor: Executor, watch: Watch) -> None:
        self._executor, self._watch = executor, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def prepare(self, metadata: Metadata) -> None:
        """Prepare, timed."""
        started = perf_counter()
        self._executor.prepare(metadata)
        self._watch.prepare += perf_counter() - started
        self._watch.asked.append(Asked(self._executor, metadata))
