"""Engines as they plan and dispatch today: emulated from their own flags, checked, and fed with plans.

No engine is needed for it, and no GPU. Each engine is a folder with an ``ENGINE``; what an emulation is
stands in ``core``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

import attrs

from capture_planner.engines import hookspecs
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.engine import Engine
from capture_planner.errors import CapturePlannerError, FlagError, InvalidValue
from capture_planner.plugins.discovery import implementations
from capture_planner.records.environment import Environment


@functools.cache
def engines() -> Mapping[str, Engine]:
    """Return the installed engines by name."""
    found = implementations(hookspecs, "capture_planner_engines")
    return {item.value.name: item.value for item in found}


ENGINES = tuple(engines())
"""The names of the engines that are emulated."""


def find_engine(name: str) -> Engine:
    """Return the engine of that name; raises ``CapturePlannerError`` for one that is not emulated."""
    if name not in engines():
        raise CapturePlannerError(f"no engine {name!r} is emulated; expected one of {', '.join(ENGINES)}")
    return engines()[name]


def emulate(name: str, flags: Sequence[str], environment: Environment) -> Emulation:
    """Emulate an engine with its own flags on a machine; raises ``FlagError`` for flags that it refuses.

    A whole command line will do: variables and the program's name may stand in front. Of variables only the
    engine's own matter.
    """
    engine = find_engine(name)
    try:
        return engine.emulate(_flags(engine, flags), environment)
    except FlagError:
        raise
    except InvalidValue as error:
        requests, tokens, drafts = engine.limits
        places = {"max_num_reqs": requests, "max_num_tokens": tokens, "num_tokens": drafts}
        raise FlagError(
            attrs.evolve(
                problem,
                path=(places.get(str(problem.path[-1]), requests),) if problem.path else (),
                message=f"{name} may take it, and capture-planner does not: {problem.message}",
                remedy=problem.remedy or "give less",
            )
            for problem in error.problems
        ) from None


def _flags(engine: Engine, command: Sequence[str]) -> list[str]:
    """Return the engine's own variables and flags of a command line."""
    words, kept = list(command), []
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0], re.DOTALL):
        variable = words.pop(0)
        if engine.variables is not None and variable.startswith(engine.variables):
            kept.append(variable)
    if words and re.fullmatch(r"(?:\S*/)?python[\d.]*", words[0]):
        words[0] = "python"
    for program in engine.programs:
        parts = program.split()
        if words[: len(parts)] == parts:
            words = words[len(parts) :]
            break
    return [*kept, *words]
