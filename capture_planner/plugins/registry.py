"""The registry: finds the backends that are installed, and what measures a profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import attrs

from capture_planner.errors import BackendError, RunError
from capture_planner.modes import Refresh, Role
from capture_planner.plugins import hookspecs
from capture_planner.plugins.backend import Backend
from capture_planner.plugins.discovery import duplicate, guarded, implementations, left_out, unknown
from capture_planner.plugins.profiler import Profiler
from capture_planner.records._base import Name, constraints
from capture_planner.records.backend import Attention, PaddingContract, Support, Workspace
from capture_planner.records.batch import Entry
from capture_planner.records.environment import Environment
from capture_planner.records.spec import Limits

Answer = TypeVar("Answer")


@attrs.frozen(kw_only=True)
class RegisteredBackend:
    """A backend with the distribution that brought it, asked under guard; the methods are those of ``Backend``.

    What a backend raises, or returns of a wrong type, becomes a ``BackendError`` that names it.
    """

    backend: Backend
    distribution: str
    version: str
    name: str = attrs.field(init=False)

    @name.default
    def _read_once(self) -> str:
        # It may be a property, and a plan needs the same name each time.
        return self.backend.name

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        return self._ask("support", Support, role, model, environment)

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        return self._ask("padding", PaddingContract, role, model, environment)

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        return self._ask("refresh", Refresh, role, model, environment)

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        return self._ask("workspace", Workspace, role, model, environment, entries, limits)

    def _ask(self, call: str, kind: type[Answer], role: Role, *args: object) -> Answer:
        subject = f"the backend {self.name!r} ({self.distribution} {self.version}), asked for {call} of {role}"
        with guarded(subject, BackendError):
            # A wrong type would otherwise fail far from the backend that returned it.
            answer = getattr(self.backend, call)(role, *args)
            if not isinstance(answer, kind):
                raise BackendError(f"{subject}, returned {answer!r}, not a {kind.__name__}; report it to its authors")
        return answer


class Registry(Mapping[str, RegisteredBackend]):
    """Backends by name, in the order of their names."""

    def __init__(self, backends: Iterable[RegisteredBackend] = ()) -> None:
        by_name: dict[str, RegisteredBackend] = {}
        for item in backends:
            if item.name in by_name:
                raise BackendError(duplicate("backend", item.name, by_name[item.name].distribution, item.distribution))
            by_name[item.name] = item
        # Plugins are found in the order of installation, which must not show.
        self._by_name = dict(sorted(by_name.items()))

    def __getitem__(self, name: str) -> RegisteredBackend:
        if name not in self._by_name:
            raise BackendError(unknown("backend", name, self._by_name))
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


def load_backends(*plugins: object, installed: bool = True) -> Registry:
    """Return the registry of the installed plugins and of ``plugins`` (modules or objects).

    An installed plugin that cannot be imported or breaks the contract is left out with a ``PluginWarning``, and so are
    installed backends of a name that is taken. Raises ``BackendError`` where one of ``plugins`` does so.
    """
    found: dict[str, RegisteredBackend] = {}
    taken: set[str] = set()
    for item in implementations(hookspecs, "capture_planner_backends", BackendError, plugins, installed=installed):
        with left_out(BackendError, item.installed):
            backend = _registered(item.value, item.distribution, item.version)
            other = found.setdefault(backend.name, backend)
            if other is not backend:
                # Neither is taken: which one a spec means would depend on the order of installation.
                taken.add(backend.name)
                raise BackendError(duplicate("backend", backend.name, other.distribution, backend.distribution))
    return Registry(backend for name, backend in found.items() if name not in taken)


def _registered(backend: object, distribution: str, version: str) -> RegisteredBackend:
    """Accept one backend: it has all the methods, and a name that a spec can write."""
    with guarded(f"the plugin {distribution}", BackendError):
        if not isinstance(backend, Backend):
            raise BackendError(
                f"{distribution}: {backend!r} is not a backend; it needs name, support, padding, refresh and "
                "workspace (see capture_planner.plugins.backend.Backend)"
            )
        registered = RegisteredBackend(backend=backend, distribution=distribution, version=version)
    # A spec could not name it otherwise.
    for rule in constraints(Name):
        if (wrong := rule.problem(registered.name)) is not None:
            raise BackendError(f"{distribution}: the name of a backend {wrong}")
    return registered


def find_profiler(*plugins: object, installed: bool = True) -> Profiler | None:
    """Return the first profiler of ``plugins`` and of the installed distributions; None: nothing here can measure.

    An installed plugin that is broken is left out with a ``PluginWarning``. Raises ``RunError`` for one of ``plugins``.
    """
    for item in implementations(hookspecs, "capture_planner_profilers", RunError, plugins, installed=installed):
        with left_out(RunError, item.installed):
            if not isinstance(item.value, Profiler):
                raise RunError(f"{item.distribution}: {item.value!r} is no capture_planner.plugins.profiler.Profiler")
            return item.value
    return None
