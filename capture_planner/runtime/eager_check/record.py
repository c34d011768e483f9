"""What a comparison of graphs with eager forwards found. Plain data, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.records.text import counted


@attrs.frozen(kw_only=True)
class FieldSnapshot:
    """One field of a step's metadata, as the graph was given it."""

    name: str
    """With the group's name before it where a group's backend declared it."""
    real: Any
    """The values of the batch: nested lists, or a number."""
    padding: Any = None
    """What stands after them, as far as the graph reads; None for a number."""


@attrs.frozen(kw_only=True)
class Difference:
    """The first tensor of a forward that a graph and an eager forward do not agree on."""

    step: int
    role: Role
    entry: Entry
    draft_step: int | None
    """Which draft decode of the step, from 0; None for other roles."""
    layer: int | None
    """None where it is no layer's: a field before the first, a result after the last."""
    tensor: str
    row: int
    """The first row that differs; of a cache, the slot."""
    request: str | None
    """The request that the row belongs to; None: padding, or no request."""
    token: int | None
    """The row's position in its request."""
    graph: float | int | None
    """The number of that row that is furthest off, from the graph; None: not a finite number."""
    eager: float | int | None
    """The same from the eager forward; None also where it left the row alone."""
    error: float | None
    """The largest relative error of a row of this tensor; None: infinite."""
    tolerance: float
    rows: int
    """How many rows differ."""
    after: str | None
    """The last tensor before it that agrees; None: it is the first one."""
    num_tokens: int
    num_reqs: int
    padded_tokens: int
    """Rows of padding, on top of the real ones."""
    padded_reqs: int
    requests: tuple[str, ...]
    """The names of those in the batch, a row each."""
    fields: tuple[FieldSnapshot, ...]

    @property
    def where(self) -> str:
        return self.tensor if self.layer is None else f"layer {self.layer}, {self.tensor}"

    def __str__(self) -> str:
        whose = "padding" if self.request is None else f"{self.request}, token {self.token}"
        chain = "" if self.draft_step is None else f", draft decode {self.draft_step}"
        far = "no finite error" if self.error is None else f"a relative error of {self.error:.2g}"
        return (
            f"step {self.step}, {self.role.value}{chain}, {self.entry}: {self.where} differs, row {self.row} "
            f"({whose}): the graph has {shown(self.graph)}, eager {shown(self.eager)}; {far}, and "
            f"{self.tolerance:g} is allowed"
        )


def shown(value: float | int | None) -> str:
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


@attrs.frozen(kw_only=True)
class LargestError:
    """The largest error that was seen of one kind of tensor."""

    tensor: str
    error: float
    """Of a row, relative to the row's norm; of tokens, what the logit is short of, as a share."""
    tolerance: float
    role: Role
    layer: int | None


@attrs.frozen(kw_only=True)
class Comparison:
    """What was compared, and where it ended."""

    compared: Mapping[Role, int]
    """Forwards that a graph served, each held against an eager one; a chain is one."""
    eager: Mapping[Role, int]
    """Forwards that no graph served, so that there was nothing to compare."""
    steps: int
    """Steps with a forward that was compared."""
    largest: tuple[LargestError, ...]
    near_ties: int
    """Drafted tokens that differ though the states that they come from do not, in half precision: two
    tokens are as likely there. What such a chain goes on with is not compared."""
    difference: Difference | None

    @property
    def says(self) -> str:
        count = sum(self.compared.values())
        done = f"{counted(count, 'forward')} of {counted(self.steps, 'step')}"
        if self.difference is None:
            return f"compared: {done}, each the same from its graph and eager"
        return f"different from eager, after {done} that are not: {self.difference}"


@attrs.define(eq=False)
class ComparisonLog:
    """What all roles of a run add to; ``report`` sums it up at any time."""

    step: int = 0
    batch: Sequence[str] = ()
    """The names of the requests in the batch, a row each."""
    _pages: Mapping[str, Sequence[int]] = attrs.Factory(dict)
    _compared: Counter[Role] = attrs.Factory(Counter)
    _eager: Counter[Role] = attrs.Factory(Counter)
    _turns: Counter[Role] = attrs.Factory(Counter)
    _steps: set[int] = attrs.Factory(set)
    _largest: dict[str, LargestError] = attrs.Factory(dict)
    near_ties: int = 0
    difference: Difference | None = None

    def begin(self, step: int, batch: Sequence[str], pages: Mapping[str, Sequence[int]]) -> None:
        """Begin a step: the requests in its batch, a row each, and the pages of every live request."""
        self.step, self.batch, self._pages = step, batch, pages
        self._turns.clear()

    def turn(self, role: Role) -> int:
        """Return how often a role ran in this step before."""
        self._turns[role] += 1
        return self._turns[role] - 1

    def same(self, role: Role) -> None:
        self._compared[role] += 1
        self._steps.add(self.step)

    def ran_eager(self, role: Role) -> None:
        self._eager[role] += 1

    def saw(self, largest: LargestError) -> None:
        """Keep an error, if it is the largest one of its kind of tensor."""
        before = self._largest.get(largest.tensor)
        if before is None or largest.error > before.error:
            self._largest[largest.tensor] = largest

    def add_near_ties(self, count: int) -> None:
        """Count drafts that differ and are as likely as each other."""
        self.near_ties += count

    def end(self, difference: Difference) -> None:
        self.difference = difference

    def owner(self, slot: int, page_size: int) -> tuple[str | None, int | None]:
        """Return the request that a slot of the cache belongs to, and its token; None twice: a free slot."""
        page, offset = divmod(slot, page_size)
        for name, pages in self._pages.items():
            if page in pages:
                return name, pages.index(page) * page_size + offset
        return None, None

    def report(self) -> Comparison:
        return Comparison(
            compared=dict(self._compared),
            eager=dict(self._eager),
            steps=len(self._steps),
            largest=tuple(self._largest.values()),
            near_ties=self.near_ties,
            difference=self.difference,
        )
