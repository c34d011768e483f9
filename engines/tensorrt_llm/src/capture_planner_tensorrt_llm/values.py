"""Values from flags and files, converted as the engine's own configuration classes convert them.

They are lax: a number may come as text, a truth as a word. Each reader notes what is wrong and goes
on, so that one run names every problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from capture_planner.engines.parsing import did_you_mean, number_remedy
from capture_planner.errors import Problem

Path = tuple[str | int, ...]

_WORDS = dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True) | dict.fromkeys(
    ("0", "false", "f", "no", "n", "off"), False
)


@attrs.define
class Problems:
    """What is wrong, as far as it was found."""

    found: list[Problem] = attrs.Factory(list)

    def refused(self, path: Path, engine: str, ours: str = "", *, remedy: str) -> None:
        """Note what the engine refuses: its reason, then ours, and what to give instead."""
        message = f"TensorRT-LLM refuses it: {engine}" + (f"; {ours}" if ours else "")
        self.found.append(Problem(path=path, message=message, remedy=remedy))

    def unfollowed(self, path: Path, ours: str, *, remedy: str) -> None:
        """Note what the engine takes and this does not follow."""
        message = f"TensorRT-LLM takes it, and it is not emulated: {ours}"
        self.found.append(Problem(path=path, message=message, remedy=remedy))


def integer(value: Any, path: Path, problems: Problems, *, low: int | None = None) -> int | None:
    """Return a whole number, given as a number, a truth or text; None, with a problem, for anything else."""
    number: int | None = None
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
    elif isinstance(value, str):
        try:
            number = int(value.strip())
        except ValueError:
            number = None
    if number is None:
        problems.refused(path, f"it is not a whole number, but {shown(value)}", remedy=_number_remedy(value))
    elif low is not None and number < low:
        problems.refused(path, f"it is {number}, and has to be at least {low}", remedy=f"give {low} or more")
        return None
    return number


def _number_remedy(value: Any) -> str:
    return (number_remedy(value) if isinstance(value, str) else "") or "give a whole number, in digits"


def _some_of(known: list[str]) -> str:
    return f"known are {', '.join(known)}" if len(known) <= 20 else "leave it out"


def truth(value: Any, path: Path, problems: Problems) -> bool:
    """Return a truth, given as one, as 0 or 1, or as a word; False, with a problem, for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    found = _WORDS.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        problems.refused(
            path, f"it is neither true nor false, but {shown(value)}", remedy="give true or false"
        )
    return bool(found)


def mapping(value: Any, path: Path, problems: Problems) -> Mapping[str, Any] | None:
    """Return a mapping; None, with a problem, for anything else."""
    if isinstance(value, Mapping):
        return value
    problems.refused(
        path, f"it is not a mapping, but {shown(value)}", remedy="write key: value on lines below it"
    )
    return None


def only(data: Mapping[Any, Any], known: Iterable[str], path: Path, problems: Problems) -> None:
    """Note each key that is not known: the engine takes none beside its own."""
    known = sorted(known)
    for key in data:
        if key not in known:
            remedy = did_you_mean(str(key), known, _some_of(known))
            problems.refused((*path, str(key)), "it knows no such key", remedy=remedy)


def shown(value: Any) -> str:
    """Write a value, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
