"""What the suite checks, and what it says where something does not hold."""

from __future__ import annotations

import enum
from typing import Any

import attrs

from capture_planner.errors import CaptureError, GuardError
from capture_planner.modes import Role
from capture_planner.records.batch import Entry


class Check(enum.Enum):
    """Every invariant that is held to. None is about one bug: each is a law, or a line of a contract."""

    DECLARED = "declared"
    """What a backend declares is well formed and pure: asked again, it says the same."""
    PLANNED = "planned"
    """The lint finds no error in the plan."""
    DISPATCHED = "dispatched"
    """The entry is the cheapest compatible one over all entries (law 3), and decodes alone are uniform
    (law 5)."""
    MADE = "made"
    """The values that the runner makes for a batch are those that its requests have."""
    FILLED = "filled"
    """What stands behind the real values of a field is its fill, as far as the graph reads."""
    BOUNDED = "bounded"
    """Each index, real or padding, is inside what it indexes."""
    ROWS = "rows"
    """What a graph computes for real rows is what attention is defined as, whatever is in the padding."""
    EAGER = "eager"
    """The same of a step without a graph."""
    STORED = "stored"
    """Keys and values of the batch are in its slots."""
    PLACED = "placed"
    """Each token's slot is where its position is in the pages of its request."""
    UNTOUCHED = "untouched"
    """No other slot has changed; padding writes to the null page."""
    WRITTEN = "written"
    """Every row of an attention output is written, padding included."""
    FROZEN = "frozen"
    """Pointers, frozen scalars and plan layouts are those of the capture."""
    STATE = "state"
    """What drafts hand on is that of the batch's own requests; that of others is as it was."""
    TOKENS = "tokens"
    """Each token that is served is what the model says greedily, whatever was drafted."""
    COUNTED = "counted"
    """The session has every forward of what was served, with what it ran from or why it ran eager."""
    RAN = "ran"
    """Capture and replay end without an error."""
    AGREED = "agreed"
    """Every rank decides the same from the gathered vector (law 8)."""

    @property
    def law(self) -> str:
        """What it holds to, in a sentence."""
        return _LAWS[self]


_LAWS = {
    Check.DECLARED: "declarations are well formed, and the same whenever they are asked for",
    Check.PLANNED: "the lint finds no error in the plan",
    Check.DISPATCHED: "dispatch returns the cheapest compatible graph over all of them",
    Check.MADE: "the values that the runner makes for a batch are those that its requests have",
    Check.FILLED: "behind the real values of each field stands its fill, as far as the graph reads",
    Check.BOUNDED: "each index, real or padding, is inside what it indexes",
    Check.ROWS: "real rows of a replay are what attention is defined as, whatever padding holds",
    Check.EAGER: "real rows of an eager step are what attention is defined as",
    Check.STORED: "keys and values of the batch are in its slots",
    Check.PLACED: "each token's slot is where its position is in the pages of its request",
    Check.UNTOUCHED: "no other slot changes",
    Check.WRITTEN: "every row of an attention output is written, padding included",
    Check.FROZEN: "pointers, frozen scalars and plan layouts are those of the capture",
    Check.STATE: "draft state is that of the batch's own requests, and that of others is left alone",
    Check.TOKENS: "each served token is what the model says greedily",
    Check.COUNTED: "every forward is written down, with what it ran from or why it ran eager",
    Check.RAN: "capture and replay end without an error",
    Check.AGREED: "every rank decides the same",
}


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that does not hold, and where."""

    check: Check
    says: str
    role: Role | None = None
    entry: Entry | None = None
    batch: str = ""
    """The real batch, in words."""
    field: str = ""
    """The field of metadata that it comes from, where that is known."""
    axis: str = ""
    causes: tuple[str, ...] = ()
    """What must be spoilt for it to be seen: sources of garbage without each of which it is gone."""
    case: str = ""
    """The scene and steps that show it, as ``scene.loads`` reads them."""
    command: str = ""
    """A command that shows it again."""

    def __str__(self) -> str:
        where = [self.role.value if self.role else "", str(self.entry or ""), self.batch]
        text = f"{self.check.value}: {self.says}"
        if place := "; ".join(part for part in where if part):
            text += f" ({place})"
        if self.field:
            text += f"; field {self.field}" + (f", along {self.axis}" if self.axis else "")
        if self.causes:
            text += f"; seen only with garbage in {' and '.join(self.causes)}"
        return text


class Violation(AssertionError):
    """Raised where an invariant does not hold; ``finding`` says which and where."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(str(finding))


def broke(error: Exception, **where: Any) -> Finding:
    """Return the finding that an exception of a capture or a step is."""
    check = Check.RAN
    if isinstance(error, GuardError):
        check = Check.FROZEN
    elif isinstance(error, (IndexError, RuntimeError)) and "out of" in str(error):
        check = Check.BOUNDED
    says = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, CaptureError):
        says = f"not capturable: {says}"
    return Finding(check=check, says=says[:600], **where)
