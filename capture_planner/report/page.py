"""The report of a run as one HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

from importlib import resources

from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode
from capture_planner.report.sections import alert, printable, sections
from capture_planner.report.summary import summary
from capture_planner.runtime.ledger import RunReport


def run_page(report: RunReport) -> str:
    """Return the page: the numbers of ``run_tables`` with pictures. It stays below 2 MB, however long the run.

    Raises ``CapturePlannerError`` where jinja2 or matplotlib is not installed.
    """
    try:
        import jinja2
        import markupsafe

        from capture_planner.report.charts import charts
    except ModuleNotFoundError as error:
        raise CapturePlannerError(
            f"the page of a run needs {error.name}, which is not installed; "
            "install it with: pip install capture-planner[run]"
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
    numbers = summary(report)
    return environment.from_string(template).render(
        title=report.model,
        alert=alert(report, numbers),
        sections=sections(report, numbers),
        charts=charts(report),
        svg=markupsafe.Markup,
        spec=report.plan.spec,
    )
