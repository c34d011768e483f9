"""Plugins: the hooks for attention backends, commands and measuring, and what finds the implementations.

A plugin is a distribution with an entry point of the group ``capture_planner``. The entry point names a module
that implements a hook with ``hookimpl``::

    from capture_planner.plugins import hookimpl

    @hookimpl
    def capture_planner_backends():
        return [MyBackend()]

Engines have a hook of their own, ``capture_planner_engines``: see ``capture_planner.engines``.

Commands and profilers have an entry-point group of their own, ``capture_planner.commands``, because the command line
asks for them at every start and must not import backends and engines for it::

    from capture_planner.plugins import Command, hookimpl

    @hookimpl
    def capture_planner_commands():
        return [Command(name="mine", help="Do it.", target="my_package.commands:mine")]

``capture_planner.plugins.backend`` has the contract of a backend, ``capture_planner.plugins.registry`` finds backends.
"""

from capture_planner.plugins.commands import Command
from capture_planner.plugins.hookspecs import (
    capture_planner_backends,
    capture_planner_commands,
    capture_planner_profilers,
    hookimpl,
)

__all__ = ["Command", "capture_planner_backends", "capture_planner_commands", "capture_planner_profilers", "hookimpl"]
