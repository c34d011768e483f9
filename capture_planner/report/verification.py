"""The section of a run's report on its verification."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.codec import json_fields
from capture_planner.report.writing import Grid, Section
from capture_planner.runtime.verification.record import Deviation, LayerScale, OutputCheck, number

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
        lines=(
            f"reference: dense forwards in {check.reference} over the served tokens; noise: {'; '.join(check.runs)}",
            *check.measured[2:],
        ),
        grid=grid,
        warnings=check.faults,
    )
    nearest = sorted(check.scales, key=lambda scale: abs(scale.error) / scale.bound, reverse=True)
    if nearest:
        yield Section(
            name="scales",
            title="Scales of layers",
            grid=Grid.of(
                ("layer", "part", "served by", "rows", "error", "bound"),
                (
                    (str(s.layer), s.part, s.served_by, f"{s.rows:,}", f"{s.error:+.3%}", f"{s.bound:.3%}")
                    for s in nearest[:MAX_SCALES]
                ),
                text=3,
            ),
        )


def _deviation(found: Deviation) -> tuple[str, ...]:
    measured = (found.bound, found.worst, found.mean, found.noise_worst, found.noise_mean)
    return f"{found.compared:,}", f"{found.within:,}", *map(number, measured)
