"""Discovery: what the installed plugins return from a hook, with the distribution that brought it."""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import attrs
import pluggy

from capture_planner.errors import CapturePlannerError, PluginWarning, class_and_message

PROJECT = "capture_planner"
"""The pluggy project name, and the entry-point group of backends and engines."""

COMMANDS = "capture_planner.commands"
"""The entry-point group of what the command line asks for at every start, so that it loads no backend and no engine."""

HOOKS = {
    "capture_planner_backends": PROJECT,
    "capture_planner_engines": PROJECT,
    "capture_planner_commands": COMMANDS,
    "capture_planner_profilers": COMMANDS,
}
"""The hooks that a plugin can implement, here or in ``capture_planner.engines``, with their entry-point groups."""


@attrs.frozen(kw_only=True)
class Implementation:
    """One value that a plugin returned from a hook."""

    value: Any
    distribution: str
    version: str
    installed: bool = True
    """True for an entry point, False for an object in the program."""


def implementations(
    specs: ModuleType,
    hook: str,
    error: type[CapturePlannerError],
    plugins: Iterable[object] = (),
    *,
    installed: bool = True,
    named: str | None = None,
) -> list[Implementation]:
    """Return the values of one hook, from ``plugins`` and from the installed distributions.

    An installed distribution that is broken is left out with a ``PluginWarning``.

    :param specs: the module with the hook specification.
    :param hook: the name of the hook.
    :param error: raised, with a one-line message that names the plugin, where one of ``plugins`` is broken.
    :param plugins: modules or objects to register besides those installed.
    :param installed: whether to load the entry points.
    :param named: load only the entry points of this name; if there are none, load all.
    """
    # A new manager for each call, so that the plugins of one caller are not those of the next.
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    origins: dict[int, tuple[str, metadata.Distribution | None]] = {}
    for plugin in plugins:
        with guarded(f"the plugin {_unpackaged(plugin)}", error):
            manager.register(plugin)
    group = HOOKS[hook]
    found = list(metadata.entry_points(group=group)) if installed else []
    # An entry point of another name may bring it too, which only loading tells.
    for entry_point in [each for each in found if named is not None and each.name == named] or found:
        dist = entry_point.dist
        # An entry point that was made by hand has no distribution.
        distribution = dist.name if dist else entry_point.value
        with left_out(error), guarded(f"the plugin {distribution} ({entry_point.value})", error):
            plugin = entry_point.load()
            # Two entry points may name one object, which pluggy registers once.
            if not manager.is_registered(plugin):
                manager.register(plugin)
                origins[id(plugin)] = distribution, dist
                _name_other_hooks(manager, plugin, distribution, group)
    results: list[Implementation] = []
    # One by one: a call of the hook would end at the first error, and not tell whose value is whose.
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        plugin = implementation.plugin
        brought = id(plugin) in origins
        distribution, dist = origins[id(plugin)] if brought else (_unpackaged(plugin), None)
        # Only here: each version is a file that is read, and most plugins do not have the hook.
        version = dist.version if dist else "0"
        with left_out(error, brought), guarded(f"the plugin {distribution}", error):
            # Listed under guard, because a hook may be a generator, which fails only when it is iterated.
            results += [
                Implementation(value=value, distribution=distribution, version=version, installed=brought)
                for value in list(implementation.function())
            ]
    return results


@contextlib.contextmanager
def left_out(error: type[CapturePlannerError], installed: bool = True) -> Iterator[None]:
    """Turn an ``error`` of an installed plugin into a ``PluginWarning``: it stops nothing that does not use it."""
    try:
        yield
    except error as cause:
        if not installed:
            raise
        warn(str(cause))


def warn(message: str) -> None:
    """Warn of a broken plugin; the same sentence is shown once, however many hooks find it."""
    # By one line of code, because Python shows a warning once for each message and line.
    warnings.warn(message, PluginWarning, stacklevel=1)


def _name_other_hooks(manager: pluggy.PluginManager, plugin: object, distribution: str, group: str) -> None:
    """Warn where an installed plugin implements no hook of its entry-point group, or one that does not exist."""
    # pluggy says nothing of an implementation without a specification.
    marked = [name for name in dir(plugin) if manager.parse_hookimpl_opts(plugin, name) is not None]
    hooks = [name for name, of in HOOKS.items() if of == group]
    misspelled = [name for name in marked if name not in HOOKS]
    for name in misspelled:
        near = difflib.get_close_matches(name, HOOKS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"hooks are {', '.join(HOOKS)}"
        warn(f"the plugin {distribution} implements {name}, which is no hook; {hint}")
    if not misspelled and not set(marked) & set(hooks):
        listed = " or ".join(hooks)
        warn(f"the plugin {distribution} implements no hook of the group {group}; mark {listed} with hookimpl")


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
    # An ``error`` has its message already, and Ctrl-C is no failure of the plugin.
    except (error, KeyboardInterrupt):
        raise
    # A plugin may raise what is no Exception, as sys.exit does.
    except BaseException as cause:
        message = class_and_message(cause)
        raise error(f"{subject} failed: {message}; report it to its authors, or uninstall it") from cause
