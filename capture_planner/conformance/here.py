"""A backend on this machine."""

from __future__ import annotations

from capture_planner.conformance.stage import Tested
from capture_planner.plugins import registry as plugins
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.records.backend import Backend
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.runtime.host import device_of, this_environment
from capture_planner.runtime.launch import grapher_for


def under_test(
    backend: str | Backend,
    *,
    environment: Environment | None = None,
) -> Tested:
    """Return a backend as it is tested on this machine: an installed one by its name, or any object.

    ``environment`` is planned for in place of this machine's. A host's own names no packages, since no
    recorded graph depends on one. Raises ``BackendError`` for a name that is not installed.
    """
    registry = (
        plugins.load_backends()
        if isinstance(backend, str)
        else plugins.load_backends(Plugin(backend), installed=False)
    )
    name = backend if isinstance(backend, str) else backend.name
    here = environment or this_environment("here")
    if here.device.kind is DeviceKind.CPU:
        here = Environment(name=here.name, device=here.device)
    found = registry[name]
    device = device_of(here)
    return Tested(
        backend=found.name,
        registry=registry,
        environment=here,
        device=device,
        grapher=grapher_for(device, accounts=False),
    )


class Plugin:
    """A plugin that brings one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @hookimpl
    def capture_planner_backends(self) -> tuple[Backend, ...]:
        """Return it."""
        return (self._backend,)
