"""What ``run`` and ``bench`` refuse before a model is made: backends that do not run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import attrs
import pytest
import torch

from capture_planner import codec
from capture_planner.errors import BackendError, RunError
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.plugins.registry import Registry
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner_runner.bench import Bench, measure
from capture_planner_runner.launch.launch import launch
from capture_planner_runner.launch.request import RunRequest, refuse_backends
from capture_planner_runner.serving.workload import Request

pytestmark = pytest.mark.usefixtures("one_thread")
PLANS = Path(__file__).parents[2] / "plans"
Execute = Callable[[Plan, Registry], object]


def planned(k: int) -> Plan:
    """Plan the shipped tiny model with so many drafts."""
    spec = codec.load_spec(PLANS / "specs" / "tiny-reference-cpu.yaml")
    speculative = replace(spec.speculative, num_tokens=k) if k else None
    environment = codec.load_environment(PLANS / "environments" / "cpu.yaml")
    return make_plan(replace(spec, speculative=speculative), environment, registry.load_backends())


@contextmanager
def quiet(task: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show nothing."""
    yield lambda now: None


def run(plan: Plan, backends: Registry) -> object:
    """Execute a plan as ``run`` does."""
    requests = [Request(name="r", arrival=0.0, prompt=(1, 2), max_new_tokens=3)]
    return launch(plan, backends, lambda vocab_size: requests, RunRequest(), quiet)


def bench(plan: Plan, backends: Registry) -> object:
    """Measure a plan as ``bench`` does."""
    return measure(plan, backends, Bench(quick=True), quiet)


both = pytest.mark.parametrize("execute", [run, bench])


class MissingLibrary:
    """The reference backend, whose library is not here."""

    name = "reference"

    def __init__(self, backend: Any, error: Exception) -> None:
        self.support, self.padding = backend.support, backend.padding
        self.refresh, self.workspace = backend.refresh, backend.workspace
        self._error = error

    def reserve(self, reservation: Any) -> NoReturn:
        """Raise."""
        raise self._error


class CountingReference(MissingLibrary):
    """The reference backend, with what was reserved and released."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend, BackendError(""))
        self._backend = backend
        self.reserved: list[Any] = []
        self.released = 0

    def reserve(self, reservation: Any) -> Any:
        """Reserve, and count."""
        executor = self._backend.reserve(reservation)
        self.reserved.append(reservation)

        def release() -> None:
            self.released += 1

        executor.release = release
        return executor


def registered(made: Callable[[Any], Any]) -> tuple[Any, Registry]:
    """Return a backend in place of the reference, and a registry with it alone."""
    found = registry.load_backends()["reference"]
    backend = made(found.backend)
    return backend, Registry([attrs.evolve(found, backend=backend)])


@both
@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("error", [BackendError("its library is not installed"), ValueError("is not installed")])
def test_a_backend_that_does_not_run_here_is_refused_before_a_model_is_made(execute: Execute, error: Exception) -> None:
    """It is asked: what its ``reserve`` raises is told."""
    _, backends = registered(lambda backend: MissingLibrary(backend, error))
    with pytest.raises(BackendError, match="is not installed"):
        execute(planned(0), backends)


@both
@pytest.mark.usefixtures("no_model")
def test_a_backend_that_is_missing_or_only_plans_is_refused_before_a_model_is_made(execute: Execute) -> None:
    """By its name, or with what it lacks."""
    with pytest.raises(BackendError, match="no backend named 'reference' is installed"):
        execute(planned(0), Registry())

    def planning(backend: Any) -> Any:
        found = MissingLibrary(backend, BackendError(""))
        kept = {name: getattr(found, name) for name in ("support", "padding", "refresh", "workspace")}
        return type("Planning", (), kept | {"name": "reference"})()

    _, backends = registered(planning)
    with pytest.raises(RunError, match="plans and does not execute"):
        execute(planned(0), backends)


@pytest.mark.parametrize("k", [0, 2, 4])
def test_every_group_is_reserved_once_as_the_plan_has_it_and_released(k: int) -> None:
    """With the plan's entries and workspace, and a cache of one page for each of its layers."""
    backend, backends = registered(CountingReference)
    plan = planned(k)
    refuse_backends(plan, backends, torch.device("cpu"), 8)
    groups = [(role, group) for role in plan.roles for group in role.groups]
    assert backend.released == len(backend.reserved) == len(groups)
    for (role, group), reservation in zip(groups, backend.reserved, strict=True):
        assert (reservation.role, reservation.group, reservation.entries) == (role.role, group.name, role.entries)
        assert reservation.workspace.numel() == group.workspace.device
        assert len(reservation.caches) == group.layers
        assert {cache.keys.shape[:2] for cache in reservation.caches.values()} == {(2, 8)}
