"""The table behind a plot: the numbers that are drawn, in the units of its axes."""

from __future__ import annotations

import math

from capture_planner.report.plots import Plot
from capture_planner.report.writing import Cell, Grid

DIGITS = 4
"""Significant digits of a number that is not an integer."""


def number(value: float | str | None) -> str:
    """Write a number with ``DIGITS`` significant digits; integers in full, text as it is, None as "none"."""
    if value is None or isinstance(value, str):
        return "none" if value is None else value
    if not math.isfinite(value):
        return "none"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:.{DIGITS - 1}e}"
    return f"{value:,.{max(0, DIGITS - 1 - math.floor(math.log10(abs(value))))}f}"


def plot_grid(plot: Plot) -> Grid:
    """Return the table: a row for each x where all series have the same, else a row for each point."""
    (x_unit, x_scale), (y_unit, y_scale) = plot.units()
    x_head, y_head = f"{plot.x.label} ({x_unit})", f"{plot.y.label} ({y_unit})"

    def x_text(x: float | str) -> str:
        return x if isinstance(x, str) else number(x / x_scale)

    def y_text(y: float | None) -> str:
        return number(None if y is None else y / y_scale)

    if plot.has_common_x and not any(one.labels or one.counts for one in plot.series):
        heads = [y_head] if len(plot.series) == 1 else [f"{one.name} ({y_unit})" for one in plot.series]
        columns = zip(*(one.points for one in plot.series), strict=True)
        rows: list[tuple[Cell, ...]] = [(x_text(row[0][0]), *(y_text(y) for _, y in row)) for row in columns]
        return Grid.of((x_head, *heads), rows, text=1 if isinstance(plot.series[0].points[0][0], str) else 0)
    labelled, counted = (any(getattr(one, name) for one in plot.series) for name in ("labels", "counts"))
    heads = ["series", *["point"] * labelled, x_head, y_head, *["count"] * counted]
    rows = []
    for one in plot.series:
        labels, counts = one.labels or ("",) * len(one.points), one.counts or (None,) * len(one.points)
        for (x, y), label, count in zip(one.points, labels, counts, strict=True):
            last = ("" if count is None else number(count),)
            rows.append((one.name, *(label,) * labelled, x_text(x), y_text(y), *last * counted))
    return Grid.of(heads, rows, text=1 + labelled)
