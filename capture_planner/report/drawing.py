"""Draws a plot as SVG that stands inside a page; the only module that imports matplotlib.

Colours are CSS variables of the page, so that one picture serves a light screen, a dark one and paper.
The modes' colours also differ in lightness, as in Paul Tol's high-contrast scheme, and have markers of their own.
Titles and keys are HTML of the page, which wraps them. A picture is as wide as a column of a page on a phone:
its text is not smaller there than on the page.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from capture_planner.report.plots import COLORS, Color, Mark, Plot, PlotAxis, Series
from capture_planner.report.printable import printable

# Stand-ins that no drawing has by chance; ``svg`` puts the page's variables in their place.
_LINE = "#d3c4b5"
_INKS: dict[Color, str] = dict(
    zip(COLORS, ("#1a4b8c", "#d9a63b", "#b9546a", "#0a1b2c", "#0b7a6c", "#7c4d9b"), strict=True)
)
_VARIABLES = {_LINE: "--line"} | {ink: f"--{color}" for color, ink in _INKS.items()}
_MARKERS: dict[Color, str] = dict(zip(COLORS, "osD^vP", strict=True))

_WIDTH, _HEIGHT = 4.6, 2.5
"""Inches of 72 units of the picture."""

_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.labelpad": 7,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _INKS["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.5,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _INKS["ink"],
    "ytick.labelcolor": _INKS["ink"],
    "text.color": _INKS["ink"],
    "text.parse_math": False,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",
    "svg.hashsalt": "capture-planner",
}


def svg(plot: Plot, name: str) -> str:
    """Return the picture of a plot as an element of a page that may hold others: its ids start with ``name``.

    Text that would overlap another is not drawn; ``page.plot_grid`` has all numbers.
    """
    drawing = figure(plot)
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        # `savefig` would draw it twice: first to lay out what is laid out.
        canvas: Any = FigureCanvasSVG(drawing)
        canvas.print_svg(buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    # An XML declaration and a doctype cannot be inside a page.
    text = text[text.index("<svg") :]
    # Ids, and references to them, must differ between the plots of a page.
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for ink, variable in _VARIABLES.items():
        text = text.replace(ink, f"var({variable})")
    return text.replace("<svg ", '<svg aria-hidden="true" ', 1).strip()


@matplotlib.rc_context(_STYLE)
def figure(plot: Plot) -> Figure:
    """Return the picture of a plot as matplotlib has it; its texts neither overlap nor leave it."""
    height = _bars_height(plot) if plot.has_bars else _HEIGHT
    # 72 units an inch, as SVG has: text is measured in what it is drawn in.
    figure = Figure(figsize=(_WIDTH, height), dpi=72)
    figure.patch.set_visible(False)
    axes = figure.subplots()
    axes.patch.set_visible(False)
    (x_unit, x_scale), (y_unit, y_scale) = plot.units()
    shown = [_scaled(one, x_scale, y_scale) for one in plot.series]
    (_bars if plot.has_bars else _marks)(axes, plot, shown)
    labels = f"{plot.x.label} ({x_unit})", f"{plot.y.label} ({y_unit})"
    _wrap(axes.xaxis.label, labels[plot.has_bars], 72 * _WIDTH - 110)
    _wrap(axes.yaxis.label, labels[not plot.has_bars], 72 * height - 40)
    axes.xaxis.label.set_gid("x-label")
    axes.yaxis.label.set_gid("y-label")
    _drop_overlaps(figure, axes)
    return figure


def _scaled(series: Series, x_scale: float, y_scale: float) -> list[tuple[float | str, float]]:
    """Return the points in the units that are shown; a value that was not measured is not a number."""
    return [
        (x if isinstance(x, str) else x / x_scale, math.nan if y is None else y / y_scale) for x, y in series.points
    ]


def _wrap(label: Text, text: str, room: float) -> None:
    """Write the label of an axis in as many lines as it needs to be no longer than its axis."""
    for width in range(60, 4, -4):
        label.set_text(textwrap.fill(printable(text), width))
        # The y label is turned, so its length is its height.
        box = label.get_window_extent()
        if max(box.width, box.height) <= room:
            return


def _names(plot: Plot, x_scale: float = 1.0) -> list[str]:
    """Write the x of each row of bars, names in as many lines as they need."""
    xs = (x for x, _ in plot.series[0].points)
    return [textwrap.fill(printable(x), 26) if isinstance(x, str) else _tick(x / x_scale) for x in xs]


def _bars_height(plot: Plot) -> float:
    """Return the inches that the names and the bars of all rows need."""
    names = _names(plot)
    lines = max(name.count("\n") + 1 for name in names)
    return max(1.6, 0.8 + len(names) * (0.1 + max(0.18 * lines, 0.12 * len(plot.series))))


def _bars(axes: Axes, plot: Plot, shown: Sequence[Sequence[tuple[float | str, float]]]) -> None:
    thickness, rows = 0.8 / len(shown), range(len(shown[0]))
    for index, (points, color) in enumerate(zip(shown, plot.colors, strict=True)):
        # The bars of a row are centred on its tick.
        shift = (index - (len(shown) - 1) / 2) * thickness
        places, widths = [row + shift for row in rows], [y for _, y in points]
        axes.barh(places, widths, thickness * 0.92, color=_INKS[color], linewidth=0)
    axes.set_yticks(rows, labels=_names(plot, plot.units()[0][1]))
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top, and room for bars that were not measured
    axes.yaxis.labelpad = 14  # names may be wider in a browser
    axes.grid(False, axis="y")
    known = [y for points in shown for _, y in points if not math.isnan(y)]
    axes.set_xlim(0, 1.03 * max(known) or 1)
    _linear_ticks(axes.xaxis, known)


def _marks(axes: Axes, plot: Plot, shown: Sequence[Sequence[tuple[float | str, float]]]) -> None:
    for one, points, color in zip(plot.series, shown, plot.colors, strict=True):
        xs, ys, ink = [float(x) for x, _ in points], [y for _, y in points], _INKS[color]
        if one.mark is Mark.POINTS:
            # Counts differ by orders of magnitude.
            most = math.log(max(one.counts, default=1) + 2)
            sizes = [(3.0 + 1.5 * min(2, int(3 * math.log(count + 1) / most))) ** 2 for count in one.counts] or 4.5**2
            axes.scatter(xs, ys, sizes, marker=_MARKERS[color], linewidths=0, alpha=0.8, color=ink)
        elif one.mark is Mark.LINE:
            axes.plot(xs, ys, one.dash, marker=_MARKERS[color], markersize=2.5, markeredgewidth=0, color=ink)
        else:
            axes.step(xs, ys, one.dash, where="pre", color=ink)
    _fit(axes.xaxis, plot.x, [float(x) for points in shown for x, _ in points])
    _fit(axes.yaxis, plot.y, [y for points in shown for _, y in points if not math.isnan(y)])


def _tick(value: float) -> str:
    """Write a value on an axis: integers in full, the rest with few digits."""
    # Written in full these would overlap their neighbours.
    if abs(value) >= 1e9:
        return str(EngFormatter(sep="")(value))
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def _fit(axis: Axis, wanted: PlotAxis, values: Sequence[float]) -> None:
    """Set scale, limits and ticks of an axis to the values."""
    low, high = min(values), max(values)
    if not wanted.log or high <= 0 or low < 0 or low == high:
        zero = low >= 0 and wanted.from_zero
        # Equal values span nothing, and need a margin all the same.
        margin = 0.04 * (high - low) or abs(high) * 0.1
        _limits(axis, 0 if zero else low - (margin or 0.02), high + (margin or 1))
        _linear_ticks(axis, values)
        return
    whole = all(float(value).is_integer() for value in values)
    base, least = 2 if whole else 10, min(value for value in values if value > 0)
    # Not plain log where a value is 0: an idle rank has batches of 0.
    set_scale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
    set_scale("symlog", base=base, linthresh=least) if low == 0 else set_scale("log", base=base)
    margin = (high / least) ** 0.04
    _limits(axis, -0.3 * least if low == 0 else low / margin, high * margin)
    axis.set_ticks(ticks := _log_ticks(low, least, high, base), labels=map(_tick, ticks))
    # Matplotlib writes labels at the minor ticks of short logarithmic axes.
    axis.set_ticks([], minor=True)


def _limits(axis: Axis, low: float, high: float) -> None:
    (axis.axes.set_xlim if axis is axis.axes.xaxis else axis.axes.set_ylim)(low, high)


def _linear_ticks(axis: Axis, values: Iterable[float]) -> None:
    low, high = sorted(axis.get_view_interval())
    whole = all(float(value).is_integer() for value in values)
    ticks = MaxNLocator(5, integer=whole).tick_values(low, high)
    ticks = [float(tick) for tick in ticks if low <= tick <= high]
    axis.set_ticks(ticks, labels=map(_tick, ticks))


def _log_ticks(low: float, least: float, high: float, base: int) -> list[float]:
    """Return at most 8 ticks: powers of the base, or round numbers where the values span few powers."""
    first, last = math.floor(math.log(least, base)), math.ceil(math.log(high, base))
    ticks = [float(base) ** power for power in range(first, last + 1)]
    if last - first < 3 and base == 10:
        ticks = [digit * tick for tick in ticks for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if least * 0.999 <= tick <= high * 1.001]
    if len(ticks) < 2:
        ticks = [float(tick) for tick in MaxNLocator(4).tick_values(least, high) if least <= tick <= high]
    return [0.0] * (low == 0) + ticks[:: 1 + len(ticks) // 8]


def _drop_overlaps(figure: Figure, axes: Axes) -> None:
    """Lay the picture out, and remove ticks' labels that would overlap text before them or leave the picture."""
    ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06).execute(figure)
    axes.get_tightbbox()  # the labels of the axes follow
    frame = Bbox.from_extents(0, 0, figure.bbox.width, figure.bbox.height)
    taken = [axes.xaxis.label.get_window_extent(), axes.yaxis.label.get_window_extent()]

    def is_free(box: Bbox) -> bool:
        # Browsers take a font of their own, which may be wider, and higher lines.
        box = box.expanded(1.1, 1.0).padded(2, 1.5)
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        if free := inside and not any(box.overlaps(other) for other in taken):
            taken.append(box)
        return free

    for axis in (axes.xaxis, axes.yaxis):
        ticks = [(tick.get_loc(), tick.label1) for tick in axis.get_major_ticks()]
        texts = [text.get_text() if is_free(text.get_window_extent()) else "" for _, text in ticks]
        axis.set_ticks([place for place, _ in ticks], labels=texts)
