"""Engines as they plan and dispatch today: emulated from their own flags, checked, and fed with plans.

No engine is needed for it, and no GPU. Each engine is a folder with an ``ENGINE``; what an emulation is
stands in ``core``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from capture_planner.engines.core import Emulation, Engine
from capture_planner.environment import Environment
from capture_planner.errors import CapturePlannerError

_MODULES = {
    "vllm": "capture_planner.engines.vllm",
    "sglang": "capture_planner.engines.sglang",
    "tensorrt-llm": "capture_planner.engines.tensorrt_llm",
}
ENGINES = tuple(_MODULES)
"""The names of the engines that are emulated."""


def find_engine(name: str) -> Engine:
    """Return the engine of that name; raises ``CapturePlannerError`` for one that is not emulated."""
    if name not in _MODULES:
        raise CapturePlannerError(f"no engine {name!r} is emulated; expected one of {', '.join(ENGINES)}")
    engine: Engine = import_module(_MODULES[name]).ENGINE
    return engine


def emulate(name: str, flags: Sequence[str], environment: Environment) -> Emulation:
    """Emulate an engine with its own flags on a machine; raises ``FlagError`` for flags that it refuses."""
    return find_engine(name).emulate(flags, environment)
