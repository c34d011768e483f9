"""A report as one HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

from importlib import resources

from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode
from capture_planner.report.plot_tables import plot_grid
from capture_planner.report.plots import COLORS
from capture_planner.report.writing import Report, printable, ran


def page(report: Report) -> str:
    """Return the page: the sections that ``terminal.tables`` prints, with charts; each plot has its
    numbers in a table below it. Below 2 MB at any length.

    Raises ``CapturePlannerError`` where jinja2 or matplotlib is not installed.
    """
    try:
        import jinja2
        import markupsafe

        from capture_planner.report.drawing import svg
    except ModuleNotFoundError as error:
        raise CapturePlannerError(
            f"the page of a {report.kind} needs {error.name}, which is not installed; install the extra `run`, "
            "from a clone with: python -m pip install '.[run]'"
        ) from error
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, markupsafe.Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["mode"] = lambda cell: isinstance(cell, GraphMode)
    environment.filters["svg"] = lambda plot, name: markupsafe.Markup(svg(plot, name))
    environment.filters["grid"] = plot_grid
    template = resources.files("capture_planner.report").joinpath("page.html.j2").read_text("utf-8")
    parts = {name: getattr(report, name) for name in ("kind", "title", "alert", "sections", "spec")}
    return environment.from_string(template).render(parts, charts=report.charts(), colors=COLORS, ran=ran)
