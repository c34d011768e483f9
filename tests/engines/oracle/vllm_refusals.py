"""Refusals of vLLM that the emulation does not repeat: over values that have no effect on graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capture_planner.records.environment import Environment
from engines.generators.vllm_ignored import present, without


def excused(
    engine: Any, command: Sequence[str], environment: Environment, variables: dict[str, str], refused: Any
) -> tuple[str, Any]:
    """Return the ignored flags to blame for a refusal, and vLLM's answer without them.

    ``engine`` is a ``VllmOracle``. A single flag is blamed where leaving it out is enough; where vLLM refuses
    the line without all ignored flags too, ``("", refused)`` is returned, which is a difference.
    """
    flags = list(present(command))
    for some in (*([flag] for flag in flags), flags):
        answer = engine.answer(without(command, some), environment, variables)
        if some and not isinstance(answer, type(refused)):
            return ", ".join(some), answer
    return "", refused
