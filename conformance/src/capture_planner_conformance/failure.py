"""The laws that the suite checks, and the record of one that does not hold."""

from __future__ import annotations

import contextlib
import enum
import linecache
import sys
import traceback
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Self

import attrs

from capture_planner.errors import CaptureError, GuardError, class_and_message
from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Entry, batch_text


class Law(enum.Enum):
    """A law, or a line of a contract; none is about one bug. ``law`` is its sentence."""

    law: str

    def __new__(cls, value: str, law: str) -> Self:
        """Keep the law with the member, whose value is its name in files."""
        member = object.__new__(cls)
        member._value_, member.law = value, law
        return member

    def violation(self, message: str, **where: Any) -> Violation:
        """Return the violation of this law, to be raised; ``where`` are other values of its ``Failure``."""
        return Violation(Failure(check=self, message=message, **where))


class Check(Law):
    """The laws that the suite checks."""

    DECLARED = "declared", "declarations are well formed, and the same each time they are asked for"
    PLANNED = "planned", "the lint finds no error in the plan"
    FILLED = "filled", "the padding of each field holds its declared fill, as far as the graph reads"
    BOUNDED = "bounded", "each index, real or padding, is within bounds"
    ROWS = "rows", "a replay computes attention for real rows, whatever the padding holds"
    EAGER = "eager", "an eager step computes attention for real rows"
    STORED = "stored", "keys and values of the batch are in its slots"
    UNTOUCHED = "untouched", "no other slot changes"
    WRITTEN = "written", "attention writes every row of its output, padding included"
    UNSPOILED = "unspoiled", "a forward changes no output and no persistent buffer that is not its own"
    BORN = "born", "no tensor that a capture makes outlives it"
    RECOVERED = "recovered", "an error inside a capture session names its entry, and leaves no graph"
    FROZEN = "frozen", "pointers, frozen scalars and plan layouts are those of the capture"
    STATE = "state", "a draft forward updates the draft state of its own requests, and no other"
    TOKENS = "tokens", "each served token is the model's greedy choice"
    RAN = "ran", "capture and replay raise no error"


@attrs.frozen(kw_only=True)
class Failure:
    """A law that does not hold, and where."""

    check: Law
    message: str
    role: Role | None = None
    entry: Entry | None = None
    batch: str = ""
    """The real batch, described."""
    field: str = ""
    """The metadata field that causes it, if known."""
    axis: str = ""
    causes: tuple[str, ...] = ()
    """Sources of garbage without any one of which the failure is gone."""
    notes: tuple[str, ...] = ()
    """What else is known of it, in sentences."""
    failed: tuple[int, int] | None = None
    """In how many of how many runs its case failed, if not in all: nothing is blamed then."""
    case: str = ""
    """The scene and steps that reproduce it, as ``scene.loads`` reads them."""
    command: str = ""
    """A command that reproduces it."""

    def __str__(self) -> str:
        where = [self.role.value if self.role else "", str(self.entry or ""), self.batch]
        text = f"{self.check.value}: {self.message}"
        if place := "; ".join(part for part in where if part):
            text += f" ({place})"
        if self.field:
            text += f"; field {self.field}" + (f", along {self.axis}" if self.axis else "")
        if self.causes:
            text += f"; seen only with garbage in {' and '.join(self.causes)}"
        return "; ".join([text, *self.notes, *([self.frequency] if self.frequency else [])])

    @property
    def frequency(self) -> str:
        """How often its case failed, if not at every run."""
        return "" if self.failed is None else "its case failed in {} of {} runs".format(*self.failed)


class Violation(AssertionError):
    """Raised by a check; ``failure`` says which law does not hold, and where."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(str(failure))

    @classmethod
    def of(cls, error: Exception, **where: Any) -> Violation:
        """Return the violation that an exception of a capture or a step is; ``where`` are values of its ``Failure``."""
        if isinstance(error, Violation):
            return cls(attrs.evolve(error.failure, **where))
        # What is no violation of another law is still an error that a capture or a step raised.
        check: Law = Check.RAN
        if isinstance(error, GuardError):
            check = Check.FROZEN
        # Out of range or of bounds, as torch says of an index; a lack of memory is no wrong index.
        elif isinstance(error, (IndexError, RuntimeError)) and "out of" in str(error) and "memory" not in str(error):
            check = Check.BOUNDED
        message = class_and_message(error)
        if check is Check.BOUNDED:
            message = f"an index is beyond what it indexes ({message})"
        message += _place(error)
        # The device refuses an operation inside a capture; the backend must do it before.
        if isinstance(error, CaptureError):
            message = f"not capturable: {message}"
        return cls(Failure(check=check, message=message[:600], **where))


def origins(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, the first one last; one that is its own cause is there once."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def _place(error: BaseException) -> str:
    """Return the line in which an error was raised: of a backend's code, or else of a check that it broke."""
    found, is_check = "", False
    for frame, number in traceback.walk_tb(origins(error)[-1].__traceback__):
        name = str(frame.f_globals.get("__name__"))
        package = name.partition(".")[0]
        line = linecache.getline(frame.f_code.co_filename, number).strip()
        place = f"`{line}` ({PurePath(frame.f_code.co_filename).name}, line {number})"
        # A frame without source has no line to show.
        if line and package not in _NOT_BACKENDS and package not in sys.stdlib_module_names:
            found, is_check = f" at {place}", False
        elif name in _CHECKS:
            found = f" in a check of the suite, whose values have another shape or range than they may, at {place}"
            is_check = True
        # Called on from a check into the runner: the error is not about the check's values.
        elif package in _OURS and is_check:
            found, is_check = "", False
    return found


_CHECKS = frozenset(f"{__package__}.{name}" for name in ("steps", "watch", "served_rows", "memory"))
"""Modules that compare what a forward did."""

_OURS = frozenset({"capture_planner_runner", "capture_planner_conformance"})
_NOT_BACKENDS = _OURS | {"capture_planner", "torch", "numpy", "attr", "hypothesis"}


@contextlib.contextmanager
def located(batch: Batch, entry: Entry | None) -> Iterator[None]:
    """Raise every error in the block as a violation by this forward."""
    try:
        yield
    except Exception as error:
        raise Violation.of(error, role=batch.role, entry=entry, batch=batch_text(batch)) from error
