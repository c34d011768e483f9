"""Records of both checks: graphs against eager forwards, and output against the model. Plain data, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from capture_planner.modes import Role
from capture_planner.records.batch import Entry
from capture_planner.records.text import counted

LARGEST_SCALE = 0.01
"""Error of one layer that a verification must be able to see, as a share."""

MAX_FAULTS = 8
"""Faults that a verdict names; the rest is counted."""


def number(value: float | None) -> str:
    """Write a measured value with two digits; None is not finite."""
    return "not finite" if value is None else f"{value:.2g}"


def shown(value: float | int | None) -> str:
    """Write an element of a tensor; None is missing or not finite."""
    return "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


# Graphs against eager forwards --------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class FieldSnapshot:
    """One field of a step's metadata, as the graph was given it."""

    name: str
    """Name of the field, after the group's where a group's backend declared it."""
    real: Any
    """Values of the batch: nested lists, or a number."""
    padding: Any = None
    """Values after them, as far as the graph reads; None for a number."""


@attrs.frozen(kw_only=True)
class Difference:
    """The first tensor of a forward that differs between a graph and an eager forward."""

    step: int
    role: Role
    entry: Entry
    draft_step: int | None
    """Draft decode of the step, from 0; None for other roles."""
    layer: int | None
    """None for fields, which are before the first layer, and results, after the last."""
    tensor: str
    row: int
    """First row that differs; of a cache, the slot."""
    request: str | None
    """Owner of the row; None: padding, or no request."""
    token: int | None
    """Position of the row in its request."""
    graph: float | int | None
    """Element of that row that is furthest off, from the graph; None: not finite."""
    eager: float | int | None
    """The same element of the eager forward; None also where that did not write the row."""
    error: float | None
    """Largest relative error of a row of this tensor; None: infinite."""
    tolerance: float
    rows: int
    """Number of rows that differ."""
    after: str | None
    """Last tensor before it that agrees; None: it is the first one."""
    num_tokens: int
    num_reqs: int
    padded_tokens: int
    """Rows of padding, on top of the real ones."""
    padded_reqs: int
    requests: tuple[str, ...]
    """Names of the requests in the batch, by row."""
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


@attrs.frozen(kw_only=True)
class LargestError:
    """The largest error of one kind of tensor."""

    tensor: str
    error: float
    """Error of a row, relative to its norm; of tokens, the shortfall of the logit as a share."""
    tolerance: float
    role: Role
    layer: int | None


@attrs.frozen(kw_only=True)
class Comparison:
    """The forwards that were compared, and the first difference."""

    compared: Mapping[Role, int]
    """Forwards of graphs that were compared with eager ones; a chain is one."""
    eager: Mapping[Role, int]
    """Forwards without a graph, so that there was nothing to compare."""
    steps: int
    """Steps with a forward that was compared."""
    largest: tuple[LargestError, ...]
    near_ties: int
    """Drafted tokens that differ between equal states, in half precision: both are equally likely, and the rest of
    such a chain is not compared."""
    difference: Difference | None

    @property
    def passed(self) -> bool:
        return self.difference is None

    @property
    def verdict(self) -> str:
        count = sum(self.compared.values())
        done = f"{counted(count, 'forward')} of {counted(self.steps, 'step')}"
        if self.difference is None:
            return f"compared: {done}, each the same from its graph and eager"
        return f"different from eager, after {done} that are not: {self.difference}"


@attrs.define(eq=False)
class ComparisonLog:
    """Findings of all roles of a run so far; ``report`` sums them up at any time."""

    step: int = 0
    batch: Sequence[str] = ()
    """Names of the requests in the batch, by row."""
    _pages: Mapping[str, Sequence[int]] = attrs.Factory(dict)
    _compared: Counter[Role] = attrs.Factory(Counter)
    eager: Counter[Role] = attrs.Factory(Counter)
    """Forwards without a graph."""
    _turns: Counter[Role] = attrs.Factory(Counter)
    _steps: set[int] = attrs.Factory(set)
    _largest: dict[str, LargestError] = attrs.Factory(dict)
    near_ties: int = 0
    """Drafts that differ and are equally likely."""
    difference: Difference | None = None

    def begin(self, step: int, batch: Sequence[str], pages: Mapping[str, Sequence[int]]) -> None:
        """Begin a step with the requests of its batch by row, and the pages of every live request."""
        self.step, self.batch, self._pages = step, batch, pages
        self._turns.clear()

    def turn(self, role: Role) -> int:
        """Return how often a role ran in this step before."""
        self._turns[role] += 1
        return self._turns[role] - 1

    def add_equal(self, role: Role) -> None:
        """Count a forward whose tensors agree."""
        self._compared[role] += 1
        self._steps.add(self.step)

    def add_error(self, error: LargestError) -> None:
        """Keep an error, if it is the largest one of its kind of tensor."""
        before = self._largest.get(error.tensor)
        # One row for each kind of tensor, however long the run is.
        if before is None or error.error > before.error:
            self._largest[error.tensor] = error

    def owner(self, slot: int, page_size: int) -> tuple[str | None, int | None]:
        """Return the request and the token of a slot of the cache; None twice for a free slot."""
        page, offset = divmod(slot, page_size)
        # Only asked for a row that differs, so no index from pages to requests is kept.
        for name, pages in self._pages.items():
            if page in pages:
                return name, pages.index(page) * page_size + offset
        return None, None

    def report(self) -> Comparison:
        return Comparison(
            compared=dict(self._compared),
            eager=dict(self.eager),
            steps=len(self._steps),
            largest=tuple(self._largest.values()),
            near_ties=self.near_ties,
            difference=self.difference,
        )


# Output against the model -------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Deviation:
    """Distance of served values from the reference, and of exact runs of the model from it: the noise."""

    compared: int
    within: int
    """Number of values within the bound."""
    bound: float | None
    """Largest distance allowed for one value. None: an exact run is not finite, so there is no bound."""
    worst: float | None
    """Largest of the served values; None: not finite."""
    mean: float | None
    noise_worst: float | None
    """Largest of the exact runs in the model's dtype."""
    noise_mean: float | None

    def __str__(self) -> str:
        return f"worst {number(self.worst)}, mean {number(self.mean)}"

    @property
    def noise(self) -> str:
        """The distance of the exact runs, in words."""
        return f"exact runs: worst {number(self.noise_worst)}, mean {number(self.noise_mean)}"


@attrs.frozen(kw_only=True)
class LayerScale:
    """Estimated scale error of one layer part, from all rows of one kind of forward."""

    layer: int
    part: str
    """``attention``: its output; ``rest``: the layer's other contribution to the residual stream."""
    served_by: str
    """``all``, or the mode or the graph of these rows."""
    rows: int
    error: float
    """Share by which the part is too large: 0.01 for 1 %."""
    bound: float
    """Largest ``error`` that the noise of exact runs explains."""

    @property
    def is_within(self) -> bool:
        return abs(self.error) <= self.bound

    def __str__(self) -> str:
        name = "output of attention" if self.part == "attention" else "rest of the layer"
        where = "" if self.served_by == "all" else f" in {self.served_by}"
        return f"layer {self.layer}{where}: the {name} is off by {self.error:+.2%}, allowed ±{self.bound:.2%}"


@attrs.frozen(kw_only=True)
class OutputCheck:
    """The served tokens and hidden states against a dense forward over the same tokens."""

    reference: str
    """Dtype of the reference."""
    runs: tuple[str, ...]
    """Exact runs in the model's dtype, whose distance from the reference is the noise."""
    requests: int
    """Number of requests with tokens."""
    cut_off: int
    """Number of them that were not finished, and verified as far as they came."""
    tokens: Deviation
    """Distance of each served token's logit below the largest one of the reference; of sampled tokens, whether an
    eager run sampled another one."""
    equal: int
    """Served tokens that are the best token of the reference, or the one that an eager run sampled."""
    rows: Deviation
    """Norm of each hidden state's difference, relative to the norm of the reference's."""
    mean_bound: float | None
    """Largest mean of the rows that is allowed."""
    scales: tuple[LayerScale, ...]
    """Scales of each part of each layer, over all rows; of single graphs those beyond their bound. Empty in float32
    and float64, where the bound of rows alone is far below the errors looked for."""
    not_kept: int
    """Rows that were not compared because the memory for hidden states was used up."""
    faults: tuple[str, ...]
    """Sentences on what is wrong, worst first; empty: the run is verified."""
    differing: tuple[str, ...]
    """Names of the requests with a wrong token or row."""
    is_sampled: bool = False
    """Whether tokens are sampled, and compared with an eager run's."""

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def resolution(self) -> float | None:
        """The smallest error of one layer's attention output that would be seen in every layer; None: not measured."""
        return max((s.bound for s in self.scales if s.part == "attention" and s.served_by == "all"), default=None)

    @property
    def verdict(self) -> str:
        """The verdict in a few lines, with the numbers that it rests on."""
        total = counted(self.requests, "request")
        cut_off = f"; {self.cut_off} of them cut off, and verified up to there" if self.cut_off else ""
        if self.passed:
            verdict = f"verified: {total}, every token and row is within the noise of exact runs{cut_off}"
        else:
            differing = f"{len(self.differing)} of " if self.differing else ""
            verdict = f"not verified: {differing}{total}{cut_off}"
        # A wrong layer makes nearly every request a fault.
        listed = [f"  {fault}" for fault in self.faults[:MAX_FAULTS]]
        if len(self.faults) > MAX_FAULTS:
            listed.append(f"  and {counted(len(self.faults) - MAX_FAULTS, 'other fault')}")
        return "\n".join([verdict, *listed, *(f"  {line}" for line in self.measured)])

    @property
    def measured(self) -> tuple[str, ...]:
        """A line for each of the tests."""
        tokens, rows = self.tokens, self.rows
        lines = [
            f"tokens: {self.equal:,} of {tokens.compared:,} as sampled by an eager run with the same seeds"
            if self.is_sampled
            else f"tokens: {tokens.within:,} of {tokens.compared:,} within {number(tokens.bound)} of the best logit "
            f"({self.equal:,} are the best); {tokens}; {tokens.noise}",
            f"rows: {rows.within:,} of {rows.compared:,} within {number(rows.bound)} of their norm; "
            f"{rows} of at most {number(self.mean_bound)}; {rows.noise}",
        ]
        every = [scale for scale in self.scales if scale.served_by == "all"]
        if every and self.resolution is not None:
            worst = max(every, key=lambda scale: abs(scale.error) / scale.bound)
            lines.append(
                f"layers: {sum(scale.is_within for scale in every):,} of {len(every):,} scales within their bound; "
                f"worst: {worst}"
            )
            # A pass would say less than it seems to: the noise hides an error of this size.
            if self.resolution > LARGEST_SCALE:
                lines.append(
                    f"an error of {LARGEST_SCALE:.0%} in one layer may stay hidden: the noise of these "
                    f"{rows.compared:,} rows covers {self.resolution:.1%}; serve more or longer requests"
                )
        if self.not_kept:
            lines.append(f"not compared: {counted(self.not_kept, 'row')}, for which there was no memory")
        return tuple(lines)
