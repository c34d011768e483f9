"""The hook for engines. Register through the entry-point group ``capture_planner``, as backends do."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from capture_planner.engines.engine import Engine
from capture_planner.plugins.discovery import PROJECT

hookspec = pluggy.HookspecMarker(PROJECT)


@hookspec
def capture_planner_engines() -> Iterable[Engine]:
    """Return the engines of this plugin.

    Called once, when an engine is first needed. Keep the plugin's module cheap to import and import the
    engine's code in this function: planning loads the module too, and calls the other hook only. An engine
    is chosen by its name; a name that is taken is an ``EngineError``.
    """
    raise AssertionError("a hook specification is never called")
