"""Plots: none lacks a title, labels with units or its numbers; their text can be read."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib", reason="plots are drawn by matplotlib, which is not installed")

from capture_planner.report import drawing
from capture_planner.report.page import number, page
from capture_planner.report.plots import Chart, Mark, Plot, PlotAxis, Series
from capture_planner.report.writing import Report, Section
from support.pages import check_plots
from support.plots import plots

SOME = settings(max_examples=max(settings.default.max_examples // 2, 10))
X, Y = PlotAxis("batch", "tokens"), PlotAxis("time", "s")


def report_of(plot: Plot) -> Report:
    """Return a report with nothing but one plot."""
    chart = Chart(name="only", plots=(plot,), caption="One plot.")
    sections = (Section(name="only"),)
    return Report(kind="test", title="A test", sections=sections, charts=lambda: (chart,))


@SOME
@given(plots())
def test_a_page_has_title_labels_units_key_name_and_numbers_of_any_plot(plot: Plot) -> None:
    """As text that can be selected, found and read aloud."""
    check_plots(report_of(plot).charts(), page(report_of(plot)))


WIDE = Plot(
    title="W",
    x=PlotAxis("W" * 19, "requests"),
    y=PlotAxis("W" * 13, "s"),
    series=(Series("W", Mark.LINE, [*((n, 0) for n in range(8)), (8, 9615385)]),),
)
"""A label in the middle of an axis that begins far to the right."""


@SOME
@given(plots())
@example(WIDE)
def test_text_of_any_plot_neither_overlaps_nor_is_cut_off(plot: Plot) -> None:
    """Measured as matplotlib draws it; ``tox -e pages`` measures it in a browser."""
    figure = drawing.figure(plot)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [axes.xaxis.label, axes.yaxis.label]
    ticks = [tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in (*labels, *ticks, *axes.texts) if text.get_text()]
    assert [a for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)] == []
    frame = figure.bbox
    assert [
        text
        for text, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > frame.width + 1 or box.y1 > frame.height + 1
    ] == []


@SOME
@given(plots())
def test_any_plot_has_ticks_on_both_axes(plot: Plot) -> None:
    """At least one of each axis has its number or name, so that a mark has a value."""
    (axes,) = drawing.figure(plot).axes
    for axis in (axes.xaxis, axes.yaxis):
        assert any(tick.label1.get_text() for tick in axis.get_major_ticks())


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), min_size=3, max_size=40, unique=True))
def test_marks_are_where_their_numbers_are(points: list[tuple[int, int]]) -> None:
    """On linear axes the place of a mark in the picture is an affine function of its numbers."""
    svg = drawing.svg(Plot(title="a", x=X, y=PlotAxis("b", "c"), series=(Series("d", Mark.POINTS, points),)), "e")
    uses = re.findall(r'<use xlink:href="#e-\w+" x="([\d.]+)" y="([\d.]+)" style="[^"]*fill-opacity', svg)
    assert len(uses) == len(points)
    for axis in (0, 1):
        places = sorted((point[axis], float(use[axis])) for point, use in zip(points, uses, strict=True))
        (low, start), (high, end) = places[0], places[-1]
        scale = (end - start) / (high - low) if high > low else 0
        assert [place for _, place in places] == pytest.approx(
            [start + (at - low) * scale for at, _ in places], abs=0.1
        )


@given(plots())
def test_series_have_colours_of_their_own(plot: Plot) -> None:
    """What is not given a colour takes one that no other series has, while there are any."""
    free = [color for one, color in zip(plot.series, plot.colors, strict=True) if one.color is None]
    assert len(set(free)) == len(free)
    assert not set(free) & {one.color for one in plot.series}


@given(st.integers(-(10**14), 10**14) | st.floats(-1e14, 1e14))
def test_a_number_is_written_with_four_digits(value: float) -> None:
    """Integers in full; thousands are separated."""
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=0 if float(value).is_integer() else 5.1e-4)


ONE = Series("a", Mark.LINE, [(1, 2.0)])
REFUSED = {
    "no-unit": (lambda: PlotAxis("time", " "), "unit of a plot is empty"),
    "no-label": (lambda: PlotAxis("", "s"), "label of a plot is empty"),
    "no-title": (lambda: Plot(title="", x=X, y=Y, series=(ONE,)), "title of a plot is empty"),
    "no-name": (lambda: Series("", Mark.LINE, ()), "name of a plot is empty"),
    "no-series": (lambda: Plot(title="a", x=X, y=Y, series=()), "no point"),
    "nothing-measured": (lambda: Plot(title="a", x=X, y=Y, series=[Series("b", Mark.BARS, [(1, None)])]), "no point"),
    "one-name": (lambda: Plot(title="a", x=X, y=Y, series=(ONE, ONE)), "two series of one name"),
    "counts": (lambda: Series("a", Mark.POINTS, [(1, 2), (3, 4)], counts=(1,)), "2 points and 1 counts"),
    "names-as-x": (lambda: Plot(title="a", x=X, y=Y, series=[Series("b", Mark.LINE, [("c", 1)])]), "names as x"),
    "bars-apart": (
        lambda: Plot(title="a", x=X, y=Y, series=[Series(n, Mark.BARS, [(n, 1)]) for n in "bc"]),
        "the same x",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plot_that_could_not_be_read_is_refused(name: str) -> None:
    """When it is made, with the reason."""
    make, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        make()
