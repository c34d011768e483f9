"""The hooks that a plugin implements. The command line imports this module at every start, so it imports no records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from capture_planner.plugins.discovery import PROJECT

if TYPE_CHECKING:
    from capture_planner.plugins.backend import Backend
    from capture_planner.plugins.commands import Command
    from capture_planner.plugins.profiler import Profiler

# The markers only set an attribute, so a module that uses them registers nothing by itself.
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of a hook."""


@hookspec
def capture_planner_backends() -> Iterable[Backend]:
    """Return the attention backends of this plugin.

    Called once, when backends are first asked for. A backend is chosen by its name, never by the
    order of registration; a name that is taken is a ``BackendError``.
    """
    raise AssertionError("a hook specification is never called")


@hookspec
def capture_planner_commands() -> Iterable[Command]:
    """Return the commands that this plugin adds to ``capture-planner``.

    Register the module under the entry-point group ``capture_planner.commands``. Called at every start of the program
    that is not for a command of the core, for its help too: neither the module nor this function may import what
    the commands need. A name that is taken is left out with a ``PluginWarning``.
    """
    raise AssertionError("a hook specification is never called")


@hookspec
def capture_planner_profilers() -> Iterable[Profiler]:
    """Return what measures profiles on this machine, for the command ``profile``.

    Register the module under the entry-point group ``capture_planner.commands``. Called when something is to be
    measured; the first profiler that is found measures.
    """
    raise AssertionError("a hook specification is never called")
