"""The report of a run as one HTML page that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING

from capture_planner.errors import CapturePlannerError
from capture_planner.modes import GraphMode
from capture_planner.report.sections import alert, sections
from capture_planner.report.summary import summary
from capture_planner.report.writing import Section, printable
from capture_planner.runtime.ledger import RunReport

if TYPE_CHECKING:
    from capture_planner.report.drawing import Chart


def run_page(report: RunReport) -> str:
    """Return the page: the numbers of ``run_tables`` with pictures. It stays below 2 MB, however long the run.

    Raises ``CapturePlannerError`` where jinja2 or matplotlib is not installed.
    """
    numbers = summary(report)

    def drawn() -> Sequence[Chart]:
        from capture_planner.report.charts import charts

        return charts(report)

    return rendered(
        "run",
        title=report.model,
        alert=alert(report, numbers),
        sections=sections(report, numbers),
        charts=drawn,
        spec=report.plan.spec_digest,
    )


def rendered(
    kind: str,
    *,
    title: str,
    alert: str | None,
    sections: Sequence[Section],
    charts: Callable[[], Sequence[Chart]],
    spec: str | None,
) -> str:
    """Return the page of one kind of report. ``charts`` draws; it is asked where matplotlib may be missing.
    ``spec`` is None where the report is not of one plan.

    Raises ``CapturePlannerError`` where jinja2 or matplotlib is not installed.
    """
    try:
        import jinja2
        import markupsafe

        pictures = charts()
    except ModuleNotFoundError as error:
        raise CapturePlannerError(
            f"the page of a {kind} needs {error.name}, which is not installed; "
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
    return environment.from_string(template).render(
        kind=kind,
        title=title,
        alert=alert,
        sections=sections,
        charts=pictures,
        svg=markupsafe.Markup,
        spec=spec,
    )
