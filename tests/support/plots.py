"""Strategies for plots: of every mark, with values of every size, gaps and long names."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from capture_planner.report.plots import COLORS, Mark, Plot, PlotAxis, Series

words = st.text("abcmW _", min_size=1, max_size=40).map(lambda text: " ".join(text.split())).filter(bool)
units = st.sampled_from(("s", "B", "%", "tokens", "requests"))
flags = st.booleans()
axes = st.builds(PlotAxis, words, units, log=flags, from_zero=flags)
values = st.integers(0, 1 << 40) | st.integers(0, 300) | st.floats(1e-9, 1e4) | st.sampled_from((0.0, 0.5))


@st.composite
def plots(draw: st.DrawFn) -> Plot:
    """Any plot."""
    kind = draw(st.sampled_from(Mark))
    marks = [kind] if kind is Mark.BARS else [mark for mark in Mark if mark is not Mark.BARS]
    names = draw(st.lists(words, min_size=1, max_size=4, unique=True))
    texts = kind is Mark.BARS and draw(flags)
    count = draw(st.integers(1, 12) | st.integers(1, 60))
    xs: list[Any] = draw(st.lists(words if texts else values, min_size=count, max_size=count, unique=True))
    xs = xs if texts else sorted(xs)
    series: list[Series] = []
    for name in names:
        ys = draw(st.lists(values if not series else st.none() | values, min_size=count, max_size=count))
        mark = draw(st.sampled_from(marks))
        options: dict[str, Any] = {"color": draw(st.none() | st.sampled_from(COLORS))}
        if mark is Mark.POINTS and draw(flags):
            options["counts"] = tuple(draw(st.lists(st.integers(1, 1 << 20), min_size=count, max_size=count)))
        series.append(Series(name, mark, zip(xs, ys, strict=True), **options))
    return Plot(title=draw(words), x=draw(axes), y=draw(axes), series=series)
