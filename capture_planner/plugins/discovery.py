"""Discovery: what the installed plugins return from a hook, with the distribution that brought it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import attrs
import pluggy

from capture_planner.errors import BackendError

PROJECT = "capture_planner"
"""The pluggy project name, and the entry-point group of plugin distributions."""


@attrs.frozen(kw_only=True)
class Implementation:
    """One value that a plugin returned from a hook."""

    value: Any
    distribution: str
    version: str


def implementations(
    specs: ModuleType, hook: str, plugins: Iterable[object] = (), installed: bool = True
) -> list[Implementation]:
    """Return what each plugin's ``hook``, specified in ``specs``, returns: of ``plugins`` and of the installed ones.

    Raises ``BackendError`` naming the plugin where one cannot be imported or raises.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    origins: dict[int, tuple[str, str]] = {}
    for plugin in plugins:
        with guarded(f"the plugin {_unpackaged(plugin)}"):
            manager.register(plugin)
    if installed:
        for entry_point in metadata.entry_points(group=PROJECT):
            origin = entry_point.dist.name if entry_point.dist else entry_point.value
            with guarded(f"the plugin {origin} ({entry_point.value})"):
                plugin = entry_point.load()
                if not manager.is_registered(plugin):
                    manager.register(plugin)
                    if entry_point.dist is not None:
                        origins[id(plugin)] = (entry_point.dist.name, entry_point.dist.version)
    found = []
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        plugin = implementation.plugin
        distribution, version = origins.get(id(plugin), (_unpackaged(plugin), "0"))
        with guarded(f"the plugin {distribution}"):
            values: Iterable[object] = implementation.function()
            found += [
                Implementation(value=value, distribution=distribution, version=version) for value in values
            ]
    return found


def _unpackaged(plugin: object) -> str:
    return getattr(plugin, "__name__", type(plugin).__name__)


@contextlib.contextmanager
def guarded(subject: str) -> Iterator[None]:
    """Turn whatever a plugin's code raises into a ``BackendError`` of one line that names it."""
    try:
        yield
    except BackendError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise BackendError(f"{subject} broke: {message}; tell its authors, or remove it") from error
