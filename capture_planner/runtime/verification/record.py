"""What a verification measured, and its verdict. Plain data, no torch."""

from __future__ import annotations

import attrs

from capture_planner.records.text import counted

LARGEST_SCALE = 0.01
"""The error of one layer that a verification must be able to see."""
MAX_FAULTS = 8
"""Faults that the verdict names; the rest is counted."""


@attrs.frozen(kw_only=True)
class Deviation:
    """How far served values are from the reference, and how far exact runs of the model are from it."""

    compared: int
    within: int
    """How many are within the bound."""
    bound: float | None
    """What one may be off. None: an exact run is not finite, so there is no bound."""
    worst: float | None
    """The largest of the served values; None: not finite."""
    mean: float | None
    noise_worst: float | None
    """The largest of the exact runs in the model's dtype."""
    noise_mean: float | None


@attrs.frozen(kw_only=True)
class LayerScale:
    """By how much one part of one layer seems to be scaled, from all rows of one kind of forward."""

    layer: int
    part: str
    """``attention``: its output; ``rest``: what the layer adds to the residual stream besides."""
    served_by: str
    """``all``, or the mode or the graph whose rows these are."""
    rows: int
    error: float
    """0.01 where the part is 1 % too large."""
    bound: float
    """The largest ``error`` that the noise of exact runs explains."""

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
    """The dtype of the reference."""
    runs: tuple[str, ...]
    """The exact runs in the model's dtype whose distance from the reference is the noise."""
    requests: int
    """How many requests with tokens were verified."""
    cut_off: int
    """How many of them were not finished, and verified as far as they came."""
    tokens: Deviation
    """Of each served token: by how much its logit is below the largest one of the reference."""
    equal: int
    """Served tokens that are the best token of the reference."""
    rows: Deviation
    """Of each hidden state: the norm of the difference, relative to the norm of the reference's."""
    mean_bound: float | None
    """What the mean of the rows may be."""
    scales: tuple[LayerScale, ...]
    """Of each part of each layer, over all rows; of single graphs those that are beyond their bound. Empty in float32
    and float64, where the bound of rows alone is far below the errors looked for."""
    not_kept: int
    """Rows that were not compared because the memory for hidden states was used up."""
    faults: tuple[str, ...]
    """What is wrong, worst first; empty: the run is verified."""
    differing: tuple[str, ...]
    """The names of the requests with a wrong token or row."""

    @property
    def passed(self) -> bool:
        return not self.faults

    @property
    def resolution(self) -> float | None:
        """The smallest error of one layer's attention output that would be seen in every layer; None: not measured."""
        return max((s.bound for s in self.scales if s.part == "attention" and s.served_by == "all"), default=None)

    @property
    def says(self) -> str:
        """The verdict in a few lines, with the numbers that it rests on."""
        total = counted(self.requests, "request")
        cut_off = f"; {self.cut_off} of them cut off, and verified up to there" if self.cut_off else ""
        if self.passed:
            verdict = f"verified: {total}, every token and row is within the noise of exact runs{cut_off}"
        else:
            differing = f"{len(self.differing)} of " if self.differing else ""
            verdict = f"not verified: {differing}{total}{cut_off}"
        listed = [f"  {fault}" for fault in self.faults[:MAX_FAULTS]]
        if len(self.faults) > MAX_FAULTS:
            listed.append(f"  and {counted(len(self.faults) - MAX_FAULTS, 'other fault')}")
        return "\n".join([verdict, *listed, *(f"  {line}" for line in self.measured)])

    @property
    def measured(self) -> tuple[str, ...]:
        """A line for each of the tests."""
        tokens, rows = self.tokens, self.rows
        lines = [
            f"tokens: {tokens.within:,} of {tokens.compared:,} within {number(tokens.bound)} of the best logit "
            f"({self.equal:,} are the best); worst {number(tokens.worst)}, mean {number(tokens.mean)}; "
            f"exact runs: worst {number(tokens.noise_worst)}, mean {number(tokens.noise_mean)}",
            f"rows: {rows.within:,} of {rows.compared:,} within {number(rows.bound)} of their norm; "
            f"worst {number(rows.worst)}, mean {number(rows.mean)} of at most {number(self.mean_bound)}; "
            f"exact runs: worst {number(rows.noise_worst)}, mean {number(rows.noise_mean)}",
        ]
        every = [scale for scale in self.scales if scale.served_by == "all"]
        if every and self.resolution is not None:
            worst = max(every, key=lambda scale: abs(scale.error) / scale.bound)
            lines.append(
                f"layers: {sum(scale.is_within for scale in every):,} of {len(every):,} scales within their bound; "
                f"worst: {worst}"
            )
            if self.resolution > LARGEST_SCALE:
                lines.append(
                    f"an error of {LARGEST_SCALE:.0%} in one layer may stay hidden: the noise of these "
                    f"{rows.compared:,} rows covers {self.resolution:.1%}; serve more or longer requests"
                )
        if self.not_kept:
            lines.append(f"not compared: {counted(self.not_kept, 'row')}, for which there was no memory")
        return tuple(lines)


def number(value: float | None) -> str:
    """Write a measured value with two digits; a missing one is not finite."""
    return "not finite" if value is None else f"{value:.2g}"
