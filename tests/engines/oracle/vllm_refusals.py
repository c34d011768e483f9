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

    ``engine`` is a ``VllmOracle``. No flag is blamed that vLLM would accept beside the others; where vLLM refuses
    the line without all ignored flags too, ``("", refused)`` is returned, which is a difference.
    """
    blamed, accepted = list(present(command)), refused
    for flags in (blamed, *([other for other in blamed if other != flag] for flag in blamed)):
        fewer = [flag for flag in flags if flag in blamed]
        answer = engine.answer(without(command, fewer), environment, variables) if fewer else refused
        if not isinstance(answer, type(refused)):
            blamed, accepted = fewer, answer
    return ("", refused) if accepted is refused else (", ".join(blamed), accepted)
