"""Every error that a user can see::

    CapturePlannerError
     +- InvalidValue          a value breaks a rule; carries one Problem per broken rule
     |   +- InvalidDocument   the same, for a file: each Problem has a line and a column
     |   +- FlagError         an engine rejects its flags, or they are not emulated; each Problem names one
     |       +- NotEmulated   the flags are not emulated, though the engine may accept them
     +- PlanningError         a valid spec has no plan; carries the Problems
     +- BackendError          a backend is unknown, named twice, or broke its contract
     +- EngineError           an engine is not installed, named twice, or broke its contract
     +- DispatchError         the plan does not have the role, or counts of a batch are no numbers
     +- RunError              a plan cannot be executed on this machine, this model or these requests
         +- CaptureError      a forward cannot be captured
         +- GuardError        something that a graph depends on has moved; names what
         +- DifferenceError   a graph computed something else than an eager forward; carries where
         +- RankError         a rank is missing, died, or does something else than the others; names the ranks

An installed plugin that is broken is a ``PluginWarning``: it stops only what uses it.
Errors carry objects; text is made where it is shown. Assertions are for what cannot happen.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs


@attrs.frozen(kw_only=True)
class Problem:
    """One thing that is wrong, where it is, and how to fix it.

    ``path`` leads from the top of the value to the place: keys and list positions. ``file``, ``line``
    and ``column`` (from 1) are set for a value that was read from a file.
    """

    message: str
    path: tuple[str | int, ...] = ()
    remedy: str = ""
    file: str | None = None
    line: int | None = None
    column: int | None = None

    def under(self, prefix: tuple[str | int, ...], *, skip: int = 0) -> Problem:
        """Return this problem as a container reports it: ``prefix`` replaces the first ``skip`` parts."""
        return attrs.evolve(self, path=prefix + self.path[skip:])

    @property
    def where(self) -> str:
        """``file:line:column: path``, without the parts that are not known."""
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        return ": ".join(part for part in (place, format_path(self.path)) if part)

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}; {self.remedy}" if self.remedy else text


def format_path(path: Iterable[str | int]) -> str:
    """Write a path as ``roles.target.groups[0].name``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            # A key of a file may be anything, and is shown on a terminal.
            name = part if part.isprintable() else ascii(part)[1:-1]
            name = name if len(name) <= 80 else f"{name[:77]}..."
            text += f".{name}" if text else name
    return text


class CapturePlannerError(Exception):
    """The base of all errors that capture-planner raises on purpose."""

    exit_code = 1
    """Exit code of a command that ends with it."""


def one_line(error: BaseException) -> str:
    """Return the message of an error without its line breaks, to be quoted in another."""
    return " ".join(str(error).split())


def class_and_message(error: BaseException) -> str:
    """Return the class and the message of an error in one line."""
    try:
        return f"{type(error).__name__}: {one_line(error)}".rstrip()
    except Exception:  # the code of an exception may fail, too
        return f"{type(error).__name__}: (its message cannot be shown)"


class PluginWarning(UserWarning):
    """An installed plugin is broken and left out; an error only for what uses it."""


class InvalidValue(CapturePlannerError):
    """A value breaks one or more rules."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        # A traceback, and a log, show the text too.
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InvalidDocument(InvalidValue):
    """A file cannot be read: all of its problems, with their places."""


class FlagError(InvalidValue):
    """Flags that an engine rejects, or that are not emulated.

    ``path`` of a Problem is the flag, as in ``("--max-num-seqs",)``, or leads into its JSON value;
    ``message`` gives the engine's own reason first, then ours; ``remedy`` the flags to use instead.
    """


class NotEmulated(FlagError):
    """Flags that are not emulated, though the engine may accept them."""


class PlanningError(InvalidValue):
    """A valid spec has no plan for this environment with these backends."""


class BudgetError(PlanningError):
    """A budget leaves no graphs for passes that a profile has no eager times of."""


class BackendError(CapturePlannerError):
    """A backend is unknown, registered twice under a name, or broke its contract."""


class EngineError(CapturePlannerError):
    """An engine is not installed, registered twice under a name, or broke its contract."""


class DispatchError(CapturePlannerError):
    """A plan does not have the role, or counts of a batch are no numbers."""


class RunError(CapturePlannerError):
    """A plan cannot be executed: wrong machine, wrong model, or requests that it cannot serve."""


class CaptureError(RunError):
    """A forward cannot be captured; it reads a device value on the host, for example."""


class GuardError(RunError):
    """Something that a graph depends on is no longer what it was at capture."""


class DifferenceError(RunError):
    """A graph computed something else than an eager forward of the same batch.

    ``difference`` is the ``Difference`` of ``capture_planner_runner.numerics.record``.
    """

    def __init__(self, message: str, difference: object) -> None:
        self.difference = difference
        super().__init__(message)


class RankError(RunError):
    """A rank of a plan with several is missing, died, does not answer, or does something else than the others.

    ``ranks``: the ranks that are the cause.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)
