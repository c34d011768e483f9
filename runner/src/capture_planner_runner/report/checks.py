"""The sections of a run's report on its checks: the comparison with eager forwards, and the verification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capture_planner.codec import json_fields
from capture_planner.modes import Role
from capture_planner.records.text import counted
from capture_planner.report.writing import Grid, Section, warned
from capture_planner_runner.numerics.record import (
    Comparison,
    Deviation,
    Difference,
    FieldSnapshot,
    LayerScale,
    OutputCheck,
    number,
    shown,
)

MAX_VALUES = 8
"""Values of a field that are shown; the rest is counted."""


def comparison_sections(comparison: Comparison | None) -> Iterator[Section]:
    """Yield what was compared, and what differs where something does; nothing where nothing was to be."""
    if comparison is None:
        return
    difference = comparison.difference
    if difference is not None:
        yield _difference(difference)
        yield _metadata(difference.fields)
    lines = [
        f"{_counts(comparison.compared)} of {counted(comparison.steps, 'step')} compared with eager, and the same",
        f"{_counts(comparison.eager)} not compared: no graph served them",
    ]
    if comparison.near_ties:
        lines.append(
            f"{counted(comparison.near_ties, 'drafted token')} differ where no state does: two were as likely, "
            "and what came after in such a chain is not compared"
        )
    rows = [
        (
            error.tensor,
            f"{error.error:.1e}" if error.error else "0",
            f"{error.tolerance:g}",
            error.role.value,
            "" if error.layer is None else str(error.layer),
        )
        for error in comparison.largest
    ]
    columns = ("tensor", "largest error", "allowed", "role", "layer")
    grid = Grid(columns=columns, right=frozenset({"largest error", "allowed"}), rows=tuple(rows))
    yield Section(name="comparison", parts=(*tuple(lines), grid))


def _counts(forwards: Mapping[Role, int]) -> str:
    total = sum(forwards.values())
    parts = ", ".join(f"{count:,} {role.value}" for role, count in forwards.items() if count)
    return counted(total, "forward") + (f" ({parts})" if parts else "")


def _difference(difference: Difference) -> Section:
    token = "" if difference.token is None else f", token {difference.token}"
    whose = "padding, or no request's" if difference.request is None else f"{difference.request}{token}"
    error = "infinite" if difference.error is None else f"{difference.error:.2g}"
    chain = "" if difference.draft_step is None else f", draft decode {difference.draft_step}"
    tokens = f"{difference.padded_tokens} tokens after {difference.num_tokens}"
    facts = [
        ("where", difference.where),
        ("after", difference.after or "nothing: it is the first that is compared"),
        ("step", f"{difference.step}, {difference.role.value}{chain}"),
        ("entry", str(difference.entry)),
        ("padding", f"{tokens}, {difference.padded_reqs} requests after {difference.num_reqs}"),
        ("first row", f"row {difference.row}: {whose}"),
        ("graph", shown(difference.graph)),
        ("eager", shown(difference.eager)),
        ("largest error", f"{error}, and {difference.tolerance:g} is allowed; {counted(difference.rows, 'row')}"),
        ("requests", _short(difference.requests)),
    ]
    return Section(
        name="difference",
        title="First wrong tensor",
        parts=(*warned(f"{difference.where}: the graph and an eager forward differ"), Grid.facts(facts)),
    )


def _metadata(fields: Sequence[FieldSnapshot]) -> Section:
    rows = ((field.name, _short(field.real), _short(field.padding or ())) for field in fields)
    grid = Grid.of(("field", "batch", "padding"), rows)
    return Section(name="metadata", title="Metadata of that forward", parts=(grid,))


def _short(values: Any) -> str:
    """Write the first values of a list, rows of a table each in brackets; nothing for an empty one."""
    if not isinstance(values, list | tuple):
        return str(values)
    if not values:
        return ""
    more = [f"({len(values) - MAX_VALUES} more)"] if len(values) > MAX_VALUES else []
    return f"[{' '.join([*map(_short, values[:MAX_VALUES]), *more])}]"


# Verification -----------------------------------------------------------------------------------


MAX_SCALES = 8
"""Scales that are shown, the nearest to their bounds first."""

json_fields(OutputCheck, "passed", "resolution")
json_fields(LayerScale, "is_within")


def verification_sections(check: OutputCheck | None) -> Iterator[Section]:
    """Yield what was verified, with the numbers that the verdict rests on; nothing where nothing was to be."""
    if check is None:
        return
    rows = (("tokens", _deviation(check.tokens)), ("hidden states", _deviation(check.rows)))
    columns = ("verified", "compared", "within", "bound", "worst", "mean", "noise, worst", "noise, mean")
    grid = Grid.of(columns, ((name, *values) for name, values in rows), text=1)
    yield Section(
        name="verification",
        title="Verification",
        parts=(
            *warned(*check.faults),
            f"reference: dense forwards in {check.reference} over the served tokens; noise: {'; '.join(check.runs)}",
            *check.measured[2:],
            grid,
        ),
    )
    nearest = sorted(check.scales, key=lambda scale: abs(scale.error) / scale.bound, reverse=True)
    if nearest:
        yield Section(
            name="scales",
            title="Scales of layers",
            parts=(
                Grid.of(
                    ("layer", "part", "served by", "rows", "error", "bound"),
                    (
                        (str(s.layer), s.part, s.served_by, f"{s.rows:,}", f"{s.error:+.3%}", f"{s.bound:.3%}")
                        for s in nearest[:MAX_SCALES]
                    ),
                    text=3,
                ),
            ),
        )


def _deviation(found: Deviation) -> tuple[str, ...]:
    measured = (found.bound, found.worst, found.mean, found.noise_worst, found.noise_mean)
    return f"{found.compared:,}", f"{found.within:,}", *map(number, measured)
