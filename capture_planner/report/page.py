"""A report as one HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

from importlib import resources

from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode
from capture_planner.report.writing import Report, printable, ran


def page(report: Report) -> str:
    """Return the page: the sections that ``terminal.tables`` prints, with charts; below 2 MB at any length.

    Raises ``CapturePlannerError`` where jinja2 or matplotlib is not installed.
    """
    try:
        import jinja2
        import markupsafe

        pictures = report.charts()
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
    template = resources.files("capture_planner.report").joinpath("page.html.j2").read_text("utf-8")
    parts = {name: getattr(report, name) for name in ("kind", "title", "alert", "sections", "spec")}
    return environment.from_string(template).render(parts, charts=pictures, ran=ran, svg=markupsafe.Markup)
