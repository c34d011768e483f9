"""How every picture of a report looks: colours, figures, SVG that stands inside a page.

Colours are CSS variables of the page, so that one picture serves a light screen, a dark one and paper.
The modes' colours also differ in lightness, as in Paul Tol's high-contrast scheme, and have markers of their own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from capture_planner.modes import GraphMode
from capture_planner.report.writing import MODES, Chart
from capture_planner.runtime.ledger import Step

MAX_POINTS = 200
"""Most points, bars or buckets of one series."""

# Stand-ins that no drawing has by chance; ``as_svg`` puts the page's variables in their place.
INK, LINE = "#0a1b2c", "#d3c4b5"
COLORS = {GraphMode.FULL: "#1a4b8c", GraphMode.PIECEWISE: "#d9a63b", GraphMode.NONE: "#b9546a"}
_VARIABLES = {INK: "--ink", LINE: "--line"} | {color: f"--{mode.value.lower()}" for mode, color in COLORS.items()}

MARKERS = {GraphMode.FULL: "o", GraphMode.PIECEWISE: "s", GraphMode.NONE: "D"}

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "capture-planner",
}
_WIDTH = 9.8

Of = TypeVar("Of")


def charts_of(report: Of, drawers: Iterable[Callable[[Of], Chart | None]]) -> tuple[Chart, ...]:
    """Return the pictures of a report in one style; those that would be empty are left out."""
    with matplotlib.rc_context(STYLE):
        return tuple(chart for draw in drawers if (chart := draw(report)) is not None)


def new_figure(rows: int, columns: int, height: float, *, sharex: bool = False) -> tuple[Figure, list[list[Axes]]]:
    figure = Figure(figsize=(_WIDTH, rows * height), layout=ConstrainedLayoutEngine(h_pad=0.09))
    figure.patch.set_visible(False)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex)
    for one in axes.flat:
        one.patch.set_visible(False)
    return figure, [list(row) for row in axes]


def as_svg(figure: Figure, name: str) -> str:
    """Return the figure as an element of a page that may hold others: its ids start with ``name``."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    return text.replace("<svg ", '<svg aria-hidden="true" ', 1).strip()


def chart(
    figure: Figure, name: str, *, alt: str, caption: str, section: str = "", modes: tuple[GraphMode, ...] = MODES
) -> Chart:
    """Return the figure as the picture of a section, by default the one of its name."""
    svg = as_svg(figure, name)
    return Chart(name=name, section=section or name, svg=svg, alt=alt, caption=caption, modes=modes)


def draw_marks(plot: Axes, points: Sequence[tuple[float, float]], mode: GraphMode, size: float) -> None:
    """Draw points in the colour and with the marker of a mode."""
    style: dict[str, Any] = {"color": COLORS[mode], "markersize": size, "markeredgewidth": 0, "alpha": 0.75}
    plot.plot([x for x, _ in points], [y for _, y in points], MARKERS[mode], **style)


def draw_rows(plot: Axes, names: Sequence[str], parts: Iterable[tuple[str, Sequence[int]]], xlabel: str) -> None:
    """Draw a horizontal bar for each name, of parts in their colours, from the top down."""
    starts = [0] * len(names)
    for color, widths in parts:
        plot.barh(range(len(names)), widths, 0.7, left=starts, color=color, linewidth=0)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    plot.set_yticks(range(len(names)), labels=names)
    plot.invert_yaxis()
    plot.set_xlabel(xlabel)
    plot.grid(False, axis="y")


def in_percent(axis: Axis) -> None:
    """Write the shares of an axis in percent."""
    axis.set_major_formatter(PercentFormatter(1, decimals=0))


def cumulative(values: Iterable[float]) -> tuple[list[float], list[float]]:
    """Return x and y of the share of values up to x, at most MAX_POINTS steps; the extremes are exact."""
    ordered = sorted(values)
    last = len(ordered) - 1
    steps = min(MAX_POINTS, last) or 1
    at = sorted({round(step * last / steps) for step in range(steps + 1)})
    return [ordered[0], *(ordered[i] for i in at)], [0.0, *((i + 1) / len(ordered) for i in at)]


def draw_cumulative(plot: Axes, values: Sequence[float], color: str, dash: str, label: str) -> None:
    """Draw the share of values up to x, in percent."""
    x, y = cumulative(values)
    in_percent(plot.yaxis)
    plot.set_ylim(0, 1.03)
    plot.step(x, y, where="post", color=color, linestyle=dash, label=label)


def thinned(counts: Mapping[tuple[int, int], int]) -> list[tuple[tuple[int, int], int]]:
    """Return at most MAX_POINTS points with their counts: of neighbours, the most frequent for all."""
    points = sorted(counts.items(), key=lambda point: point[0][::-1])
    width = -(-len(points) // MAX_POINTS)
    return [
        (max(group, key=lambda point: point[1])[0], sum(count for _, count in group))
        for start in range(0, len(points), width or 1)
        if (group := points[start : start + width])
    ]


@attrs.frozen(kw_only=True)
class Buckets:
    """Steps in at most MAX_POINTS buckets of equally many neighbours; the last may have fewer."""

    first: int
    width: int
    """Steps in a bucket."""
    steps: tuple[int, ...]
    """How many steps were taken in each."""

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Buckets:
        """Lay buckets over at least one step."""
        first, last = min(step.index for step in steps), max(step.index for step in steps)
        width = -(-(last - first + 1) // MAX_POINTS)
        counts = [0] * -(-(last - first + 1) // width)
        for step in steps:
            counts[(step.index - first) // width] += 1
        return cls(first=first, width=width, steps=tuple(counts))

    @property
    def edges(self) -> list[int]:
        """The number of the first step of each bucket, and the end of the last one."""
        return [self.first + self.width * index for index in range(len(self.steps) + 1)]

    def means(self, values: Iterable[tuple[int, float]]) -> list[float]:
        """Return the mean over the steps of each bucket of ``(step, value)`` pairs, which may be many a step."""
        totals = [0.0] * len(self.steps)
        for number, value in values:
            index = (number - self.first) // self.width
            # A step that was cut off has forwards and no end: it is in no bucket.
            if 0 <= index < len(totals):
                totals[index] += value
        return [total / max(count, 1) for total, count in zip(totals, self.steps, strict=True)]
