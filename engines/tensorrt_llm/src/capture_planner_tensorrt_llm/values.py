"""Values from flags and files, converted as the engine's own configuration classes convert them.

They are lax: a number may be given as a string, a boolean as a word. Each reader records what is wrong and
goes on, so that one run names every problem.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from capture_planner.engines.history import OldName
from capture_planner.engines.parsing import did_you_mean, number_remedy
from capture_planner.errors import FlagError, NotEmulated, Problem

Path = tuple[str | int, ...]

_WORDS = dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True) | dict.fromkeys(
    ("0", "false", "f", "no", "n", "off"), False
)


@attrs.define
class Problems:
    """What is wrong with a command line so far."""

    refused: list[Problem] = attrs.Factory(list)
    """What the engine refuses."""
    not_emulated: list[Problem] = attrs.Factory(list)
    """What the engine accepts, and whose graphs are not known here."""

    def __len__(self) -> int:
        return len(self.refused) + len(self.not_emulated)

    def refuse(self, path: Path, reason: str, remedy: str) -> None:
        """Record that the engine refuses a value."""
        self.refused.append(Problem(path=path, message=f"TensorRT-LLM refuses it: {reason}", remedy=remedy))

    def skip(self, path: Path, reason: str, remedy: str = "leave it out") -> None:
        """Record that a value is not emulated."""
        message = f"TensorRT-LLM accepts it, and it is not emulated: {reason}"
        self.not_emulated.append(Problem(path=path, message=message, remedy=remedy))

    def error(self, placed: Callable[[Iterable[Problem]], list[Problem]]) -> FlagError:
        """Return the error: ``NotEmulated`` where the engine refuses nothing."""
        kind = FlagError if self.refused else NotEmulated
        return kind(placed([*self.refused, *self.not_emulated]))


def integer(value: Any, path: Path, problems: Problems, *, low: int | None = None) -> int | None:
    """Return an integer, given as a number, boolean or string; None, with a problem, for anything else."""
    number: int | None = None
    # As pydantic's lax mode takes them: True is 1, and 8.0 is 8.
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
    elif isinstance(value, str):
        try:
            number = int(value.strip())
        except ValueError:
            number = None
    if number is None:
        remedy = (number_remedy(value) if isinstance(value, str) else "") or "give a whole number, in digits"
        problems.refuse(path, f"expected an integer, got {shown(value)}", remedy)
    elif low is not None and number < low:
        problems.refuse(path, f"expected at least {low}, got {number}", f"give {low} or more")
        return None
    return number


def boolean(value: Any, path: Path, problems: Problems) -> bool:
    """Return a boolean, given as one, as 0 or 1, or as a word; False, with a problem, for anything else."""
    # pydantic's lax mode takes 0 and 1 of each type of number.
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    word = _WORDS.get(value.lower()) if isinstance(value, str) else None
    if word is None:
        problems.refuse(path, f"expected true or false, got {shown(value)}", "give true or false")
    return bool(word)


def mapping(value: Any, path: Path, problems: Problems) -> Mapping[str, Any] | None:
    """Return a mapping; None, with a problem, for anything else."""
    if isinstance(value, Mapping):
        return value
    problems.refuse(path, f"expected a mapping, got {shown(value)}", "write key: value on lines below it")
    return None


def only(
    data: Mapping[Any, Any],
    known: Iterable[str],
    path: Path,
    problems: Problems,
    older: Mapping[str, OldName] | None = None,
) -> None:
    """Record each unknown key; ``older``: keys of other releases."""
    names = sorted(known)
    # The full list is too long for an error message.
    listed = f"known are {', '.join(names)}" if len(names) <= 20 else "leave it out"
    for key, value in data.items():
        if key not in names:
            old = (older or {}).get(str(key))
            remedy = old.remedy_of(json.dumps(value, default=str)) if old else did_you_mean(str(key), names, listed)
            problems.refuse((*path, str(key)), "unknown key", remedy)


def shown(value: Any) -> str:
    """Write a value, cut where it is long."""
    # A value can be a whole mapping of the file.
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
