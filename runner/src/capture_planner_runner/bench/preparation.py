"""Host time of preparing a forward (fill, padding, backends), against the library's own plan call.

First as the runner does it, in a decode that is served. Then each role is staged by itself, as in a
step that reuses nothing of the step before, with the values of a decode that grows by a token each time.
The device is synchronized in between, untimed, so that the host's work is measured and not the queue.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from capture_planner.modes import GraphMode, Role
from capture_planner.plugins.backend import Executor, Metadata, Reservation
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import grouped
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import query_len_of
from capture_planner.records.text import counted
from capture_planner_runner.bench.record import Preparation
from capture_planner_runner.bench.rig import Absence, Rig, inputs_with_context, serving_entry, trimmed
from capture_planner_runner.execution.role import RoleRun
from capture_planner_runner.ledger.rows import Forward


def preparation(rig: Rig, advance: Callable[[str], None]) -> tuple[Preparation, ...]:
    """Measure each role at each number of requests that one of its graphs serves."""
    timer = PrepareTimer()
    rows = []
    longest = rig.plan.model.max_model_len
    with rig.runner(trimmed(rig.plan, rig.sizes), registry=timer.registry(rig.registry)) as runner:
        runner.capture()
        for size in rig.sizes:
            query = query_len_of(Role.TARGET, rig.plan, size)
            steps = min(rig.effort.prepared, longest - rig.prompt - query)
            if steps < 1:
                raise Absence(f"a model of {counted(longest, 'token')} has no room for a decode")
            # Stays empty if the decode fails: then no role has a row.
            by_role: Mapping[Role, list[Forward]] = {}
            with rig.trying("preparation"), rig.decoding(runner, size, steps) as decoding:
                by_role = grouped(decoding.forwards(steps), lambda forward: forward.role)
            for role in runner.roles.values():
                entry = serving_entry(runner.dispatcher, rig.plan, role.role, size)
                if entry is not None and role.role in by_role:
                    mean = statistics.mean(forward.preparation / forward.repeats for forward in by_role[role.role])
                    with rig.trying("preparation"):
                        rows.append(_row(rig, role, timer, entry, size, steps, mean))
            advance(counted(size, "request"))
    return tuple(rows)


def _row(
    rig: Rig, role: RoleRun, timer: PrepareTimer, entry: Entry, size: int, steps: int, step_seconds: float
) -> Preparation:
    query = query_len_of(role.role, rig.plan, size)
    batch = Batch.decode(role.role, size, query)
    # The batch without padding; the entry that serves it may be larger.
    shape = Entry(mode=GraphMode.FULL, num_tokens=size * query, num_reqs=size, query_len=query)
    stages: list[float] = []
    prepares: list[float] = []
    stocks: list[float] = []
    # Step -1 warms up: it fills the fields that the largest graph left, and a library's own call
    # allocates and compiles.
    for step in range(-1, steps):
        inputs = inputs_with_context(rig, role, shape, rig.prompt + max(step, 0))
        timer.clear()
        _wait(rig)
        started = perf_counter()
        forward = role.step(batch, entry, inputs)
        role.stage_inputs(forward)
        role.prepare_backends(forward)
        ended = perf_counter()
        # After the measured time, and timed by itself.
        stock = timer.stock()
        if step >= 0:
            stages.append(ended - started)
            prepares.append(timer.seconds)
            if stock is not None:
                stocks.append(stock)
    _wait(rig)
    return Preparation(
        num_reqs=size,
        role=role.role,
        backends=tuple(group.plan.backend for group in role.groups),
        steps=steps,
        step=step_seconds,
        stage=statistics.median(stages),
        prepare=statistics.median(prepares),
        stock=statistics.median(stocks) if stocks else None,
    )


def _wait(rig: Rig) -> None:
    if rig.device.type == "cuda":
        torch.cuda.synchronize()


@attrs.define(eq=False)
class PrepareTimer:
    """The preparations of all backends since the last ``clear``."""

    seconds: float = 0.0
    calls: list[tuple[Executor, Metadata]] = attrs.Factory(list)
    """Each executor that prepared, with its argument."""

    def add(self, seconds: float, executor: Executor, metadata: Metadata) -> None:
        self.seconds += seconds
        self.calls.append((executor, metadata))

    def clear(self) -> None:
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
            attrs.evolve(entry, backend=self._timed(entry.backend)) if hasattr(entry.backend, "reserve") else entry
            for entry in registry.values()
        )

    def _timed(self, backend: Any) -> Any:
        """Return a backend whose executors are timed."""

        def reserve(reservation: Reservation) -> Executor:
            executor: Executor = _TimedExecutor(backend.reserve(reservation), self)
            return executor

        # Attributes rather than __getattr__, which isinstance with a protocol does not see.
        public = {name: getattr(backend, name) for name in dir(backend) if not name.startswith("_")}
        return SimpleNamespace(**public | {"reserve": reserve})


class _TimedExecutor:
    """An executor whose preparation is timed; everything else goes to the real one."""

    def __init__(self, executor: Executor, timer: PrepareTimer) -> None:
        self._executor, self._timer = executor, timer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def prepare(self, metadata: Metadata) -> None:
        started = perf_counter()
        self._executor.prepare(metadata)
        self._timer.add(perf_counter() - started, self._executor, metadata)
