"""Launch: what an engine's own command line needs so that the engine runs a plan, and which engine a command starts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Protocol, TypeVar

import attrs

PLAN = "CAPTURE_PLANNER_PLAN"
"""Names the plan's file for the plugin inside the engine."""
OBSERVE = "CAPTURE_PLANNER_OBSERVE"
"""Names the folder that observations are written to."""
PROFILE = "CAPTURE_PLANNER_PROFILE"
"""Set to 1: graphs are timed after capture."""
STRICT = "CAPTURE_PLANNER_STRICT"
"""Set to 1: what the plugin would only log stops the start."""


@attrs.frozen(kw_only=True)
class Launch:
    """What a command line lacks."""

    arguments: tuple[str, ...] = ()
    """Words to add at its end."""
    notes: tuple[str, ...] = ()
    """What to know, or to do by hand, in a sentence each."""


class HasPrograms(Protocol):
    """Something that is started by programs: an engine."""

    @property
    def programs(self) -> tuple[str, ...]: ...


E = TypeVar("E", bound=HasPrograms)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


def leading_variables(command: Sequence[str]) -> int:
    """Return how many words in front of a command set environment variables, as in a shell."""
    return next((index for index, word in enumerate(command) if not _VARIABLE.fullmatch(word)), len(command))


def started(command: Sequence[str], engines: Iterable[E]) -> tuple[E, int] | None:
    """Return the engine that a command starts and the number of its program's words; None for another program.

    A program may stand with its folder, and ``python`` with its version.
    """
    words = list(command)
    if words:
        words[0] = re.sub(r"^python[\d.]*$", "python", PurePath(words[0]).name)
    for engine in engines:
        for program in engine.programs:
            parts = program.split()
            if len(parts) > 1 and words[: len(parts)] == parts:
                return engine, len(parts)
    return None
