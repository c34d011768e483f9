"""Plots as values: what a page draws, and the table behind it. Nothing here imports matplotlib.

A page draws each ``Plot`` of a ``Chart`` (``report.drawing``) and puts its numbers into a table below it
(``page.plot_grid``). A plot without a title, a label, a unit or a point cannot be made::

    Plot(
        title="Time of a step",
        x=PlotAxis("batch", "tokens", log=True),
        y=PlotAxis("time", "s", from_zero=True),
        series=(
            Series("today", Mark.STAIRS, [(8, 0.011), (16, 0.012)]),
            Series("proposed", Mark.POINTS, [(8, 0.010), (16, 0.012)]),
        ),
    )
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import attrs

from capture_planner.modes import GraphMode

MAX_POINTS = 200
"""Points of a series that a page can take: leave out some of more."""

Dash = Literal["-", "--", ":"]
"""Of a line: solid, dashed or dotted."""

Color = Literal["full", "piecewise", "none", "ink", "teal", "violet"]
"""A colour of the page, which has a variable of that name for light screens and for dark ones, and a marker."""

COLORS: tuple[Color, ...] = ("full", "piecewise", "none", "ink", "teal", "violet")
"""In the order in which the series of a plot take them."""

MODE_COLORS: dict[GraphMode, Color] = {GraphMode.FULL: "full", GraphMode.PIECEWISE: "piecewise", GraphMode.NONE: "none"}

Point = tuple[float | str, float | None]
"""x and y. x is text for bars, which stand at names; y is None where nothing was measured."""

# Units that follow the size of the numbers, largest first, each in the unit that values are given in.
_UNITS: dict[str, tuple[tuple[str, float], ...]] = {
    "s": (("s", 1), ("ms", 1e-3), ("us", 1e-6)),
    "B": (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)),
    "%": (("%", 0.01),),
}


class Mark(enum.StrEnum):
    """How the points of a series are drawn."""

    LINE = "line"
    """A line through the points, which are dots on it; a y of None interrupts it."""
    STAIRS = "stairs"
    """A staircase on which y holds from the x before to its x, as the cost of sizes that are padded up to."""
    POINTS = "points"
    """A marker at each point."""
    BARS = "bars"
    """Horizontal bars: one row per x, with a bar of each series. All series have the same x."""


# The converter of a field: attrs' plugin of mypy reads no generic one.
def _points(points: Iterable[Point]) -> tuple[Point, ...]:
    return tuple(points)


def _series(series: Iterable[Series]) -> tuple[Series, ...]:
    return tuple(series)


def _plots(plots: Iterable[Plot]) -> tuple[Plot, ...]:
    return tuple(plots)


def _is_text(_: Any, field: attrs.Attribute[str], text: str) -> None:
    if not text.strip():
        raise ValueError(f"the {field.name} of a plot is empty: expected words that a reader sees")


@attrs.frozen
class PlotAxis:
    """What an axis measures and in what unit; the label that is drawn is "label (unit)"."""

    label: str = attrs.field(validator=_is_text)
    unit: str = attrs.field(validator=_is_text)
    """Values in "s" (seconds) and "B" (bytes) are shown in the unit that fits the largest of them: s, ms or us; GiB to
    B. Values in "%" are shares of 0 to 1. Any other unit is shown as it is."""
    log: bool = attrs.field(default=False, kw_only=True)
    """Logarithmic; by powers of two where all values are integers. Values of 0 have a place."""
    from_zero: bool = attrs.field(default=False, kw_only=True)
    """Whether a linear axis begins at 0; bars always do."""

    def scale(self, values: Iterable[float]) -> tuple[str, float]:
        """Return the unit in which these values are shown, and what they are divided by for it."""
        units = _UNITS.get(self.unit, ((self.unit, 1),))
        most = max(map(abs, values), default=0.0)
        return next((unit for unit in units if most >= unit[1]), units[-1])


@attrs.frozen
class Series:
    """Points with a name; raises ``ValueError`` where counts are not one for each point."""

    name: str = attrs.field(validator=_is_text)
    mark: Mark
    points: tuple[Point, ...] = attrs.field(converter=_points)
    counts: tuple[int, ...] = attrs.field(default=(), kw_only=True)
    """Of POINTS: how often each occurred; a frequent one is larger."""
    color: Color | None = attrs.field(default=None, kw_only=True)
    """Default: the first of ``COLORS`` that no series before it has."""
    dash: Dash = attrs.field(default="-", kw_only=True)

    def __attrs_post_init__(self) -> None:
        # An omitted count would move all counts after it to other points.
        if len(self.counts) not in (0, len(self.points)):
            raise ValueError(
                f"the series {self.name!r} has {len(self.points)} points and {len(self.counts)} counts: "
                "expected one for each point, or none"
            )


@attrs.frozen(kw_only=True)
class Plot:
    """One pair of axes; raises ``ValueError`` for a plot without points or with series that do not fit together."""

    title: str = attrs.field(validator=_is_text)
    """Says what is plotted, not what to conclude."""
    x: PlotAxis
    y: PlotAxis
    series: tuple[Series, ...] = attrs.field(converter=_series)

    def __attrs_post_init__(self) -> None:
        if not any(y is not None for one in self.series for _, y in one.points):
            raise ValueError(f"the plot {self.title!r} has no point: leave it out")
        names = [one.name for one in self.series]
        if len(set(names)) < len(names):
            raise ValueError(f"the plot {self.title!r} has two series of one name: {', '.join(names)}")
        if self.has_bars and not (self.has_common_x and all(one.mark is Mark.BARS for one in self.series)):
            raise ValueError(f"the plot {self.title!r} has bars: expected bars of the same x in all its series")
        # A name has no place on an axis of numbers.
        if not self.has_bars and any(isinstance(x, str) for one in self.series for x, _ in one.points):
            raise ValueError(f"the plot {self.title!r} has names as x: only BARS stand at names")

    @property
    def has_bars(self) -> bool:
        """Whether it has bars, whose x is the vertical axis of the picture."""
        return any(one.mark is Mark.BARS for one in self.series)

    @property
    def has_common_x(self) -> bool:
        """Whether all series have the same x, so that a table has a row for each."""
        return len({tuple(x for x, _ in one.points) for one in self.series}) == 1

    @property
    def colors(self) -> tuple[Color, ...]:
        """The colour of each series: its own, or the first that no other has; they repeat when all are taken."""
        # A chosen colour means something on the page, such as a mode: no other series may look like it.
        free = [color for color in COLORS if color not in {one.color for one in self.series}] or list(COLORS)
        found, number = [], 0
        for one in self.series:
            found.append(one.color or free[number % len(free)])
            number += one.color is None
        return tuple(found)

    def units(self) -> tuple[tuple[str, float], tuple[str, float]]:
        """Return for x and for y the unit that is shown, and what values are divided by for it."""
        xs = (x for one in self.series for x, _ in one.points if not isinstance(x, str))
        ys = (y for one in self.series for _, y in one.points if y is not None)
        # An infinite value would choose the largest unit for all others.
        return self.x.scale(xs), self.y.scale(y for y in ys if math.isfinite(y))

    @property
    def alt(self) -> str:
        """The plot in one sentence, for readers who do not see it."""
        (x_unit, _), (y_unit, _) = self.units()
        names = ", ".join(one.name for one in self.series)
        return f"{self.title}: {self.y.label} in {y_unit} against {self.x.label} in {x_unit}; {names}"


@attrs.frozen(kw_only=True)
class Chart:
    """The plots of one section of a report, and what to look for in them."""

    name: str
    """An identifier, unique on the page."""
    plots: tuple[Plot, ...] = attrs.field(converter=_plots)
    """A chart without plots is left out (``drawn``)."""
    caption: str = attrs.field(validator=_is_text)
    section: str = attrs.field(default=attrs.Factory(lambda self: self.name, takes_self=True))
    """The section of the report that it belongs to. Default: the one of its name."""


def drawn(report: Any, drawers: Iterable[Callable[[Any], Chart | None]]) -> tuple[Chart, ...]:
    """Return the charts of a report; those that would be empty are left out."""
    return tuple(chart for draw in drawers if (chart := draw(report)) and chart.plots)
