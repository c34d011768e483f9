"""Plugins: the hook for attention backends, and the registry that finds what is installed.

A plugin is a distribution with an entry point of the group ``capture_planner``. The entry point names a module
that implements a hook with ``hookimpl``::

    from capture_planner.plugins import hookimpl

    @hookimpl
    def capture_planner_backends():
        return [MyBackend()]

Engines have a hook of their own, ``capture_planner_engines``: see ``capture_planner.engines``.
"""

from capture_planner.plugins.hookspecs import capture_planner_backends, hookimpl
from capture_planner.plugins.registry import RegisteredBackend, Registry, load_backends

__all__ = ["RegisteredBackend", "Registry", "capture_planner_backends", "hookimpl", "load_backends"]
