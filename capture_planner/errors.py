"""Every error a user can meet.

    CapturePlannerError
     +- InvalidValue          a value breaks a rule; carries one Problem per broken rule
     |   +- InvalidDocument   the same, for a file: each Problem has a line and a column
     |   +- FlagError         an engine would refuse its flags, or we cannot follow one; each Problem names it
     |       +- NotEmulated   we cannot follow them, whatever the engine does with them
     +- PlanningError         a valid spec for which there is no plan; carries the Problems
     +- BackendError          a backend is unknown, named twice, or broke its contract
     +- EngineError           an engine is not installed, named twice, or broke its contract
     +- DispatchError         a question the plan cannot be asked, such as an unknown role
     +- RunError              a plan cannot be executed here, or not on this model or these requests
         +- CaptureError      a forward did what no graph can hold
         +- GuardError        something that a graph counts on has moved; names what
         +- DifferenceError   a graph computed something else than an eager forward; carries where

Errors carry objects; text is made where it is shown. Asserts are for what cannot happen.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs


@attrs.frozen(kw_only=True)
class Problem:
    """One thing that is wrong, where it is, and what to do about it.

    ``path`` leads from the top of the value to the place: field names and list positions.
    ``file``, ``line`` and ``column`` (from 1) are known when the value came from a file.
    """

    message: str
    path: tuple[str | int, ...] = ()
    remedy: str = ""
    file: str | None = None
    line: int | None = None
    column: int | None = None

    def under(self, prefix: tuple[str | int, ...], *, skip: int = 0) -> Problem:
        """Return this problem as seen from outside: its path grows by ``prefix``."""
        return attrs.evolve(self, path=prefix + self.path[skip:])

    @property
    def where(self) -> str:
        """``file:line:column: path``, as far as each is known."""
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        return ": ".join(part for part in (place, format_path(self.path)) if part)

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}; {self.remedy}" if self.remedy else text


def format_path(path: Iterable[str | int]) -> str:
    """Write a path the way people do: ``roles.target.groups[0].name``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if len(part) <= 80 else f"{part[:77]}..."
            text += f".{name}" if text else name
    return text


class CapturePlannerError(Exception):
    """The root: catch this to catch everything that capture-planner raises on purpose."""


class InvalidValue(CapturePlannerError):
    """A value breaks one or more rules."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InvalidDocument(InvalidValue):
    """A file cannot be read as what it should be; all of its problems, with their places."""


class FlagError(InvalidValue):
    """Flags of an engine that it would refuse, or that are not emulated.

    ``path`` of a Problem is the flag, as in ``("--max-num-seqs",)``, or leads into its JSON value;
    ``message`` gives the engine's own reason first, then ours; ``remedy`` what to give instead.
    """


class NotEmulated(FlagError):
    """Flags that the engine may take, and that are not emulated."""


class PlanningError(InvalidValue):
    """A valid spec has no plan on this environment with these backends."""


class BackendError(CapturePlannerError):
    """A backend is unknown, registered twice under a name, or broke its contract."""


class EngineError(CapturePlannerError):
    """An engine is not installed, registered twice under a name, or broke its contract."""


class DispatchError(CapturePlannerError):
    """A plan was asked about a role that it does not have."""


class RunError(CapturePlannerError):
    """A plan cannot be executed: another machine, another model, requests that it cannot serve."""


class CaptureError(RunError):
    """A forward did what no graph can hold, such as reading a device value on the host."""


class GuardError(RunError):
    """Something that a graph counts on is no longer what it was at capture."""


class DifferenceError(RunError):
    """A graph computed something else than an eager forward of the same batch.

    ``difference`` is the ``Difference`` of ``capture_planner.runtime.eager_check.record``.
    """

    def __init__(self, message: str, difference: object) -> None:
        self.difference = difference
        super().__init__(message)
