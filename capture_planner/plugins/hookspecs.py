"""The plugin face: one hook. Register through the entry-point group ``capture_planner``."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from capture_planner.plugins.discovery import PROJECT
from capture_planner.records.backend import Backend

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
