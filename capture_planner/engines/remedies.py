"""Changes of a command line that remove a finding: each is emulated before it is advised, and has its price."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence

import attrs

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.price import change_text
from capture_planner.errors import InvalidValue

MOST_TRIED = 6
"""Changes that are emulated for one finding."""


@attrs.frozen
class FlagChange:
    """Flags to give, in place of what the command line says; written as in ``give --max-num-seqs 64``.

    A name without dashes is a key of the engine's file, and its value one of YAML.
    """

    flags: tuple[tuple[str, tuple[str, ...]], ...]
    instead: bool = False
    """Whether it gives something up, such as requests at once, in place of more graphs."""

    @classmethod
    def of(cls, flag: str, *values: object, instead: bool = False) -> FlagChange:
        """Return the change of one flag."""
        return cls(((flag, tuple(map(str, values))),), instead)

    def __str__(self) -> str:
        return "give " + " and ".join(
            shlex.join((flag, *values)) if flag.startswith("-") else f"{flag}: {values[0]} in the file of --config"
            for flag, values in self.flags
        )


def adding(sizes: Iterable[int], flag: str) -> str:
    """Return in words the change of a list by more sizes."""
    return f"add {' '.join(map(str, sizes))} to {flag}, and keep the others"


def appended(command: Sequence[str], change: FlagChange) -> list[str]:
    """Return a command line with the flags behind the others; where the last one counts, that is enough."""
    return [*command, *(word for flag, values in change.flags for word in (flag, *values))]


def remedy(before: Emulation, changes: Iterable[FlagChange], removed: Callable[[FlagChange], Emulation | None]) -> str:
    """Return the first change that removes a finding, and the first that does so otherwise, with their prices; or "".

    :param removed: emulates the command line with a change, and returns None where the finding is still there; may
        raise ``FlagError``.
    """
    found: dict[bool, str] = {}
    for each in list(changes)[:MOST_TRIED]:
        if each.instead in found:
            continue
        try:
            after = removed(each)
        except InvalidValue:
            continue
        if after is not None:
            found[each.instead] = f"{each} ({change_text(before, after)})"
    return "; or ".join(found[instead] for instead in (False, True) if instead in found)
