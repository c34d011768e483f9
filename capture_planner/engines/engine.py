"""Engine: what a distribution brings to the hook ``capture_planner_engines``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.export.core import Export
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan


@attrs.frozen(kw_only=True)
class Engine:
    """An engine that can be emulated."""

    name: str
    version: str
    """The release whose rules these are."""
    emulate: Callable[[Sequence[str], Environment], Emulation]
    """From the engine's own command line and the machine it runs on. Raises ``FlagError`` with all
    that is wrong with the flags."""
    export: Callable[[Plan], Export]
    """From a plan to the engine's flags that come closest to it."""
    flags: Mapping[str, str]
    """Each flag that graphs can depend on, with what it is for in a few words; others are read too."""
    programs: tuple[str, ...]
    """What may stand in front of the flags where a whole command line is given, the longest first."""
    limits: tuple[str, str, str]
    """The flags that say how many requests, tokens and drafted tokens there are at most."""
    variables: str | None = None
    """What the names of the engine's own environment variables begin with; None where none of them matters."""
    also_called: tuple[str, ...] = ()
    """Other names of the engine and its program, which a person may type for ``name``."""
