"""The registry: finds the backends that are installed. The only plugin loader."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TypeVar

import attrs
import pluggy

from capture_planner import hookspecs
from capture_planner._record import Name, constraints
from capture_planner.contract import Attention, Backend, PaddingContract, Support, Workspace
from capture_planner.entry import Entry
from capture_planner.environment import Environment
from capture_planner.errors import BackendError
from capture_planner.modes import Refresh, Role
from capture_planner.spec import Limits

Answer = TypeVar("Answer")


@attrs.frozen(kw_only=True)
class Registered:
    """A backend with the distribution that brought it, asked under guard.

    What a backend raises, or returns of a wrong type, becomes a ``BackendError`` that names it.
    """

    backend: Backend
    distribution: str
    version: str
    name: str = attrs.field(init=False)

    @name.default
    def _read_once(self) -> str:
        return self.backend.name

    def support(self, role: Role, model: Attention, environment: Environment) -> Support:
        """Ask ``Backend.support``."""
        return self._ask("support", Support, role, model, environment)

    def padding(self, role: Role, model: Attention, environment: Environment) -> PaddingContract:
        """Ask ``Backend.padding``."""
        return self._ask("padding", PaddingContract, role, model, environment)

    def refresh(self, role: Role, model: Attention, environment: Environment) -> Refresh:
        """Ask ``Backend.refresh``."""
        return self._ask("refresh", Refresh, role, model, environment)

    def workspace(
        self, role: Role, model: Attention, environment: Environment, entries: Sequence[Entry], limits: Limits
    ) -> Workspace:
        """Ask ``Backend.workspace``."""
        return self._ask("workspace", Workspace, role, model, environment, entries, limits)

    def _ask(self, call: str, kind: type[Answer], role: Role, *args: object) -> Answer:
        who = f"the backend {self.name!r} ({self.distribution} {self.version}), asked for {call} of {role}"
        with _guarded(who):
            answer = getattr(self.backend, call)(role, *args)
        if not isinstance(answer, kind):
            raise BackendError(f"{who}, returned {answer!r}, not a {kind.__name__}; tell its authors")
        return answer


class Registry(Mapping[str, Registered]):
    """Backends by name, in the order of their names."""

    def __init__(self, backends: Iterable[Registered] = ()) -> None:
        found: dict[str, Registered] = {}
        for item in backends:
            if item.name in found:
                others = {found[item.name].distribution, item.distribution}
                raise BackendError(
                    f"two backends are named {item.name!r}, from {' and '.join(sorted(others))}; "
                    "names are unique among all that is installed"
                )
            found[item.name] = item
        self._found = dict(sorted(found.items()))

    def __getitem__(self, name: str) -> Registered:
        if name not in self._found:
            near = difflib.get_close_matches(name, self._found, n=1)
            raise BackendError(
                f"no backend named {name!r} is installed; "
                + (f"did you mean {near[0]!r}? " if near else "")
                + f"installed: {', '.join(self._found) or 'none'}"
            )
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def load(*plugins: object, installed: bool = True) -> Registry:
    """Return the registry of the installed plugins and of ``plugins`` (modules or objects).

    Raises ``BackendError`` where a plugin cannot be imported, breaks the contract, or brings a
    name that is taken.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    origins: dict[int, tuple[str, str]] = {}
    for plugin in plugins:
        with _guarded(f"the plugin {_unpackaged(plugin)}"):
            manager.register(plugin)
    if installed:
        for entry_point in metadata.entry_points(group=hookspecs.PROJECT):
            origin = entry_point.dist.name if entry_point.dist else entry_point.value
            with _guarded(f"the plugin {origin} ({entry_point.value})"):
                plugin = entry_point.load()
                if not manager.is_registered(plugin):
                    manager.register(plugin)
                    if entry_point.dist is not None:
                        origins[id(plugin)] = (entry_point.dist.name, entry_point.dist.version)
    return Registry(_backends(manager, origins))


def _backends(manager: pluggy.PluginManager, origins: Mapping[int, tuple[str, str]]) -> list[Registered]:
    found = []
    for implementation in manager.hook.capture_planner_backends.get_hookimpls():
        plugin = implementation.plugin
        distribution, version = origins.get(id(plugin), (_unpackaged(plugin), "0"))
        with _guarded(f"the plugin {distribution}"):
            brought: Iterable[object] = implementation.function()  # type: ignore[assignment]
            found += [_registered(backend, distribution, version) for backend in brought]
    return found


def _registered(backend: object, distribution: str, version: str) -> Registered:
    """Accept one backend: it has all the methods, and a name that a spec can write."""
    if not isinstance(backend, Backend):
        raise BackendError(
            f"{distribution}: {backend!r} is not a backend; it needs name, support, padding, refresh and "
            "workspace (see capture_planner.contract.Backend)"
        )
    name = backend.name
    for rule in constraints(Name):
        if (wrong := rule.problem(name)) is not None:
            raise BackendError(f"{distribution}: the name of a backend {wrong}")
    return Registered(backend=backend, distribution=distribution, version=version)


def _unpackaged(plugin: object) -> str:
    return getattr(plugin, "__name__", type(plugin).__name__)


@contextlib.contextmanager
def _guarded(who: str) -> Iterator[None]:
    """Turn whatever a plugin's code raises into a ``BackendError`` of one line that names it."""
    try:
        yield
    except BackendError:
        raise
    except (Exception, SystemExit) as error:
        says = " ".join(f"{type(error).__name__}: {error}".split())
        raise BackendError(f"{who} broke: {says}; tell its authors, or remove it") from error
