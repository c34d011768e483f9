"""Discovery: what the installed plugins return from a hook, with the distribution that brought it."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import attrs
import pluggy

from capture_planner.errors import CapturePlannerError

PROJECT = "capture_planner"
"""The pluggy project name, and the entry-point group of plugin distributions."""


@attrs.frozen(kw_only=True)
class Implementation:
    """One value that a plugin returned from a hook."""

    value: Any
    distribution: str
    version: str


def implementations(
    specs: ModuleType,
    hook: str,
    error: type[CapturePlannerError],
    plugins: Iterable[object] = (),
    *,
    installed: bool = True,
) -> list[Implementation]:
    """Return the values of one hook, from ``plugins`` and from the installed distributions.

    Arguments:
        specs: the module with the hook specification.
        hook: the name of the hook.
        error: raised, with a one-line message that names the distribution, where a plugin cannot be
            imported or its hook raises.
        plugins: modules or objects to register besides those installed.
        installed: whether to load the entry points.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    origins: dict[int, tuple[str, str]] = {}
    for plugin in plugins:
        with guarded(f"the plugin {_unpackaged(plugin)}", error):
            manager.register(plugin)
    for entry_point in metadata.entry_points(group=PROJECT) if installed else ():
        origin = entry_point.dist.name if entry_point.dist else entry_point.value
        with guarded(f"the plugin {origin} ({entry_point.value})", error):
            plugin = entry_point.load()
            if not manager.is_registered(plugin):
                manager.register(plugin)
                if entry_point.dist is not None:
                    origins[id(plugin)] = (entry_point.dist.name, entry_point.dist.version)
    results = []
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        plugin = implementation.plugin
        distribution, version = origins.get(id(plugin), (_unpackaged(plugin), "0"))
        with guarded(f"the plugin {distribution}", error):
            results += [
                Implementation(value=value, distribution=distribution, version=version)
                for value in implementation.function()
            ]
    return results


def _unpackaged(plugin: object) -> str:
    return getattr(plugin, "__name__", type(plugin).__name__)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that no plugin brought: ``kind`` is ``backend`` or ``engine``."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, n=1)
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    return f"no {kind} named {name!r} is installed; {suggestion}installed: {', '.join(listed) or 'none'}"


def duplicate(kind: str, name: str, one: str, other: str) -> str:
    """Return the message for a name that two plugins brought; ``one`` and ``other`` are distributions."""
    return (
        f"two {kind}s are named {name!r}, from {' and '.join(sorted({one, other}))}; "
        "names are unique among all installed plugins"
    )


@contextlib.contextmanager
def guarded(subject: str, error: type[CapturePlannerError]) -> Iterator[None]:
    """Turn any exception of a plugin's code into an ``error`` of one line that names ``subject``."""
    try:
        yield
    except error:
        raise
    except (Exception, SystemExit) as cause:
        message = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise error(f"{subject} failed: {message}; report it to its authors, or uninstall it") from cause
