"""Reads the plots of a page, and checks that each shows what it must."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest

from capture_planner.report.plots import Chart, Plot
from capture_planner.report.printable import printable
from capture_planner.report.writing import Grid, Section
from support.conformance_command import FEW

HERE = Path(__file__).parent.parent / "pages"
LOCKED = HERE.parents[1] / "plans" / "locked"
CHARTED: dict[str, tuple[str, ...]] = {
    "run": ("plan.yaml", "--requests", "12", "--drafter", "chance", "--clip", "--threads", "1"),
    "bench": ("plan.yaml", "--quick", "--load-requests", "3", "--prompt-tokens", "5", "--output-tokens", "6"),
    "tune": (
        "spec.yaml",
        "-e",
        "cpu",
        "--traffic",
        str(HERE / "tiny-traffic.yaml"),
        "--profile",
        str(HERE / "tiny-profile.yaml"),
    ),
    "conformance": ("reference", *FEW, "--threads", "1"),
}
"""Each command whose report has charts, with arguments for one of a tiny model on a CPU."""

PLAIN: dict[str, tuple[str, ...]] = {
    "plan": ("spec.yaml", "-e", "cpu", "-o", "again.cpu.yaml"),
    "show": ("plan.yaml",),
    "explain": ("plan.yaml", "--num-reqs", "3", "--query-len", "3"),
    "check": ("spec.yaml", "-e", "cpu", "--strict"),
    "diff": ("plan.yaml", str(LOCKED / "tiny-reference-cpu.cpu.yaml")),
    "backends": ("-e", "cpu"),
    "traffic": (str(HERE / "tiny-traffic.yaml"),),
    "profile": (str(LOCKED / "qwen3-8b-eagle3.h100.yaml"), "--from", "observation.yaml"),
    "ranks": ("plan.yaml", "--ranks", "2"),
    "engine": ("vllm", "--max-num-seqs", "8", "-e", "h100"),
    "compare": ("vllm --max-num-seqs 8", "vllm --max-num-seqs 12", "-e", "h100"),
    "export": (str(LOCKED / "llama-3.1-8b.h100.yaml"), "--to", "vllm"),
    "journal": ("journal",),
}
"""Every other command that prints a report, with arguments."""

VOID = {"meta", "br", "img", "link", "input", "hr"}
SHOWN = {"s": 1, "ms": 1e-3, "us": 1e-6, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "%": 0.01}
"""What one of a unit is in the unit that a plot takes; any other unit is 1."""
HEAD = re.compile(r"(.*) \((.*)\)", re.S)


def grids_of(section: Section) -> list[Grid]:
    """Return the tables of a section."""
    return [part for part in section.parts if isinstance(part, Grid)]


@attrs.define
class ReadFigure:
    """A plot as it stands in a page."""

    title: str = ""
    names: list[str] = attrs.Factory(list)
    """Accessible names of its picture."""
    labels: dict[str, str] = attrs.Factory(dict)
    """The texts of the axes' labels, by "x" and "y"."""
    key: list[str] = attrs.Factory(list)
    rows: list[list[str]] = attrs.Factory(list)
    """The cells of the table, its head first."""


class PageReader(HTMLParser):
    """Reads a page's figures; elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.figures: list[ReadFigure] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "figure":
            self.figures.append(ReadFigure())
        if tag not in VOID:
            self.open.append((tag, values.get("id", "")))
        if not any(tag == "figure" for tag, _ in self.open):
            return
        if values.get("role") == "img":
            self.figures[-1].names.append(values["aria-label"])
        if tag == "tr":
            self.figures[-1].rows.append([])
        if tag in ("td", "th"):
            self.figures[-1].rows[-1].append("")
        if tag == "li":
            self.figures[-1].key.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if "figure" not in tags:
            return
        figure = self.figures[-1]
        if tags[-1] == "figcaption":
            figure.title += data
        if tags[-1] in ("td", "th"):
            figure.rows[-1][-1] += data
        if tags[-1] == "li":
            figure.key[-1] += data
        for axis in "xy":
            if tags[-1] == "text" and any(name.endswith(f"-{axis}-label") for _, name in self.open):
                figure.labels[axis] = f"{figure.labels.get(axis, '')} {data}".strip()


def check_plots(charts: Iterable[Chart], text: str) -> None:
    """Check that a page has all plots of a report, each with title, labels, key, name and numbers."""
    plots = [plot for chart in charts for plot in chart.plots]
    figures = {figure.title: figure for figure in PageReader(text).figures}
    assert sorted(figures) == sorted(" ".join(printable(plot.title).split()) for plot in plots)
    for plot in plots:
        check_plot(plot, figures[plot.title])


def check_plot(plot: Plot, figure: ReadFigure) -> None:
    """Check one plot against what a page shows of it."""
    (x_unit, _), (y_unit, _) = plot.units()
    labels = f"{plot.x.label} ({x_unit})", f"{plot.y.label} ({y_unit})"
    drawn = (figure.labels["y"], figure.labels["x"]) if plot.has_bars else (figure.labels["x"], figure.labels["y"])
    # A line may begin within a long word.
    assert [squeezed(label) for label in drawn] == [squeezed(label) for label in labels]
    assert figure.names == [plot.alt]
    assert figure.key == ([one.name for one in plot.series] if len(plot.series) > 1 else [])
    head, *rows = figure.rows
    assert all(len(row) == len(head) for row in rows)
    points = [(one.name, x, y) for one in plot.series for x, y in one.points]
    found = tabled(plot, head, rows)
    assert [name for name, _, _ in found] == [name for name, _, _ in points]
    shown_values, values = ([value for _, *point in each for value in point] for each in (found, points))
    for shown, real in zip(shown_values, values, strict=True):
        if isinstance(real, int | float):
            assert shown == pytest.approx(real, rel=6e-4)  # four significant digits
        else:
            assert shown == (None if real is None else number(printable(real).strip(), ""))


def squeezed(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


def tabled(
    plot: Plot, head: list[str], rows: list[list[str]]
) -> list[tuple[str, float | str | None, float | str | None]]:
    """Return name, x and y of each point that a table has, in the units of the plot."""
    (x_unit, _), (y_unit, _) = plot.units()
    if head[0] == "series":
        at = head.index(f"{plot.x.label} ({x_unit})")
        return [(row[0], number(row[at], x_unit), number(row[at + 1], y_unit)) for row in rows]
    return [
        (one.name, number(row[0], x_unit), number(row[column], y_unit))
        for column, one in enumerate(plot.series, 1)
        for row in rows
    ]


def number(cell: str, unit: str) -> float | str | None:
    """Return the number of a cell, which may also be a name or "none"."""
    if cell == "none":
        return None
    try:
        return float(cell.replace(",", "")) * SHOWN.get(unit, 1)
    except ValueError:
        return cell
