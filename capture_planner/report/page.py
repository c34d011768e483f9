"""The report as one HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

import math
from functools import cache
from importlib import resources
from importlib.util import find_spec
from typing import Any

from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode
from capture_planner.report.plots import COLORS, Plot
from capture_planner.report.printable import printable
from capture_planner.report.writing import Cell, Grid, Report, ran, tone_of

NEEDED = ("jinja2", "markupsafe", "matplotlib")
"""What the extra ``pages`` installs."""

DIGITS = 4
"""Significant digits of a number behind a plot that is not an integer."""


def require_page() -> None:
    """Raise ``CapturePlannerError`` where what pages need is not installed, before anything is computed."""
    missing = next((name for name in NEEDED if find_spec(name) is None), None)
    if missing is not None:
        raise CapturePlannerError(
            f"an HTML page needs {missing}, which is not installed; install the extra `pages`, "
            "from a clone with: python -m pip install '.[pages]'"
        )


def page(report: Report) -> str:
    """Return the page: the sections that ``terminal.tables`` prints, with charts and their numbers in tables.

    Below 2 MB at any length. Raises ``CapturePlannerError`` where jinja2 or matplotlib is not installed.
    """
    require_page()
    parts = {
        name: getattr(report, name) for name in ("kind", "title", "alert", "proved", "assumptions", "sections", "spec")
    }
    return str(_template().render(parts, charts=report.charts(), colors=COLORS))


@cache
def _template() -> Any:
    """Return the template of jinja2, which takes longer to compile than to fill in."""
    import jinja2
    import markupsafe

    def svg(plot: Plot, name: str) -> markupsafe.Markup:
        from capture_planner.report.drawing import svg  # a page without plots needs no second for matplotlib

        return markupsafe.Markup(svg(plot, name))

    # Whatever a plan or an engine says reaches the page as text: escaped, and without control characters.
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, markupsafe.Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["mode"] = lambda tone: isinstance(tone, GraphMode)
    environment.tests["text"] = lambda part: isinstance(part, str)
    environment.filters |= {"svg": svg, "grid": plot_grid, "tone": tone_of}
    environment.filters["written"] = lambda cell: ran(cell) if isinstance(cell, GraphMode) else cell
    template = resources.files("capture_planner.report").joinpath("page.html.j2").read_text("utf-8")
    return environment.from_string(template)


def number(value: float | str | None) -> str:
    """Write a number with ``DIGITS`` significant digits; integers in full, text as it is, None as "none"."""
    if isinstance(value, str):
        return value
    if value is None or not math.isfinite(value):
        return "none"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    # Written out, such a number is mostly zeros.
    if not 1e-6 <= abs(value) < 1e15:
        return f"{value:.{DIGITS - 1}e}"
    return f"{value:,.{max(0, DIGITS - 1 - math.floor(math.log10(abs(value))))}f}"


def plot_grid(plot: Plot) -> Grid:
    """Return the table of a plot: a row for each x where all series have the same, else a row for each point."""
    (x_unit, x_scale), (y_unit, y_scale) = plot.units()
    x_head, y_head = f"{plot.x.label} ({x_unit})", f"{plot.y.label} ({y_unit})"

    def x_text(x: float | str) -> str:
        return x if isinstance(x, str) else number(x / x_scale)

    def y_text(y: float | None) -> str:
        return number(None if y is None else y / y_scale)

    # Counts differ by series, so each point needs a row of its own.
    if plot.has_common_x and not any(one.counts for one in plot.series):
        heads = [y_head] if len(plot.series) == 1 else [f"{one.name} ({y_unit})" for one in plot.series]
        columns = zip(*(one.points for one in plot.series), strict=True)
        rows: list[tuple[Cell, ...]] = [(x_text(row[0][0]), *(y_text(y) for _, y in row)) for row in columns]
        return Grid.of((x_head, *heads), rows, text=1 if plot.has_bars else 0)
    rows = []
    for one in plot.series:
        for (x, y), count in zip(one.points, one.counts or (None,) * len(one.points), strict=True):
            rows.append((one.name, x_text(x), y_text(y), "" if count is None else number(count)))
    heads = ["series", x_head, y_head]
    if not any(one.counts for one in plot.series):
        return Grid.of(heads, [row[:-1] for row in rows], text=1)
    return Grid.of([*heads, "count"], rows, text=1)
