"""The backend that is tested, on this machine."""

from __future__ import annotations

import attrs
import torch

from capture_planner.plugins import registry as plugins
from capture_planner.plugins.hookspecs import hookimpl
from capture_planner.plugins.registry import Registry
from capture_planner.records.backend import Backend
from capture_planner.records.environment import DeviceKind, Environment
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.graphs.graph import Grapher
from capture_planner.runtime.host import device_of, this_environment


@attrs.frozen(kw_only=True)
class Subject:
    """A backend of a registry, on a device, planned for an environment."""

    backend: str
    registry: Registry
    environment: Environment
    device: torch.device
    grapher: Grapher


def under_test(backend: str | Backend, *, environment: Environment | None = None) -> Subject:
    """Return a backend as it is tested on this machine: an installed one by its name, or any object.

    Plans are made for ``environment``, by default this machine's. Packages of a CPU host are left out,
    since no recorded graph depends on one. Raises ``BackendError`` if no backend of that name is installed.
    """
    if isinstance(backend, str):
        name, registry = backend, plugins.load_backends()
    else:
        name, registry = backend.name, plugins.load_backends(Plugin(backend), installed=False)
    machine = environment or this_environment("here")
    if machine.device.kind is DeviceKind.CPU:
        machine = Environment(name=machine.name, device=machine.device)
    device = device_of(machine)
    return Subject(
        backend=registry[name].name,
        registry=registry,
        environment=machine,
        device=device,
        grapher=grapher_for(device, accounts=False),
    )


class Plugin:
    """A plugin with one backend. Plans name it as the distribution, so its name has no underscore."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @hookimpl
    def capture_planner_backends(self) -> tuple[Backend, ...]:
        return (self._backend,)
