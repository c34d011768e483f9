"""The pages in headless Chromium: self-contained, and legible on a phone and on a wide screen, by day and by night."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

NEEDS = "opening pages needs {}: run tox -e pages, on a machine with Chromium"
api = pytest.importorskip("playwright.sync_api", reason=NEEDS.format("playwright, which is not installed"))
pytest.importorskip("matplotlib", reason=NEEDS.format("matplotlib, which is not installed"))

from capture_planner.report.page import page as page_of  # noqa: E402
from capture_planner.report.plots import Chart, Plot  # noqa: E402
from capture_planner.report.writing import Report, Section  # noqa: E402
from capture_planner_runner.report.run import run_report  # noqa: E402
from support import ledgers  # noqa: E402
from support.commands import Run, spec_for  # noqa: E402
from support.pages import CHARTED  # noqa: E402
from support.plots import plots  # noqa: E402

CHECKS = (Path(__file__).parent / "checks.js").read_text("utf-8")
NAMES = ("chromium", "chromium-browser", "google-chrome")
FEW = settings(max_examples=max(settings.default.max_examples // 10, 3))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return headless Chromium: the one that CHROMIUM names, one on PATH, or Playwright's own."""
    named = os.environ.get("CHROMIUM")
    found = named or next((path for name in NAMES if (path := shutil.which(name))), None)
    with api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=found)
        except api.Error as error:
            if found:
                raise
            pytest.skip(
                "opening pages needs Chromium: install the system's package chromium, run `playwright install "
                f"chromium`, or name a program in CHROMIUM ({str(error).splitlines()[0]})"
            )
        yield chromium
        chromium.close()


def problems_of(browser: Any, file: Path) -> list[str]:
    """Open a page in each width and colour scheme, and return what is wrong."""
    found = []
    for width, scheme in product((400, 1600), ("light", "dark")):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        problems = dict.fromkeys(problems_in(context, file.as_uri()))
        found += [f"{width} pixels, {scheme}: {problem}" for problem in problems]
        context.close()
    return found


def problems_in(context: Any, url: str) -> list[str]:
    """Open a page, first with its tables shut and then open; nothing but the page itself is fetched."""
    tab, found = context.new_page(), []

    def fetch(route: Any) -> None:
        if route.request.url == url:
            route.continue_()
        else:
            found.append(f"fetches {route.request.url}")
            route.abort()

    context.route("**/*", fetch)
    tab.on("console", lambda message: found.append(f"console: {message.type}: {message.text}"))
    tab.on("pageerror", lambda error: found.append(f"error: {error}"))
    tab.goto(url)
    found += tab.evaluate(CHECKS)
    tab.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found += tab.evaluate(CHECKS)
    for title in tab.locator("figcaption").all_inner_texts():
        figure = tab.get_by_role("figure", name=title, exact=True)
        if figure.get_by_role("img").count() != 1 or figure.get_by_role("table").count() != 1:
            found.append(f"no picture and table can be reached by the name {title!r}")
    return found


@pytest.mark.parametrize("command", CHARTED)
def test_the_page_of_a_command_can_be_read(browser: Any, executing: Callable[[str, str], Run], command: str) -> None:
    """Written by the command itself, with a tiny model on the CPU."""
    ran = executing(command, spec_for(4))(*CHARTED[command], "--html", "page.html")
    assert ran.code == 0, ran.err
    assert "<svg" in Path("page.html").read_text("utf-8")
    assert problems_of(browser, Path("page.html").resolve()) == []


@FEW
@given(report=ledgers.reports())
def test_the_page_of_any_run_can_be_read(browser: Any, tmp_path_factory: Any, report: Any) -> None:
    """Of any plan and length, with names of any kind."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(page_of(run_report(report)), "utf-8")
    assert problems_of(browser, file) == []


def report_of(drawn: list[Plot]) -> Report:
    """Return a report with nothing but plots, a chart for each."""
    charts = tuple(
        Chart(name=f"chart{n}", plots=(plot,), caption=plot.alt, section="all") for n, plot in enumerate(drawn)
    )
    return Report(kind="test", title="Plots", sections=(Section(name="all"),), charts=lambda: charts)


@FEW
@given(drawn=st.lists(plots(), min_size=1, max_size=8, unique_by=lambda plot: plot.title))
def test_any_plot_can_be_read(browser: Any, tmp_path_factory: Any, drawn: list[Plot]) -> None:
    """Of every mark, with values of every size, gaps and long names."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(page_of(report_of(drawn)), "utf-8")
    assert problems_of(browser, file) == []


SMALL = '<svg viewBox="0 0 900 90" width="360"><text x="9" y="40" font-size="9">small</text></svg>'
FAULTY = {
    "small text": (SMALL, "pixels high"),
    "cut off": ('<svg width="90" height="40"><text x="70" y="20">cut off</text></svg>', "is cut off"),
    "overlap": ('<svg><text x="9" y="40">one</text><text x="15" y="42">two</text></svg>', 'overlaps "two"'),
    "overflow": ('<p style="width: 1700px">wide</p>', "pixels wide in a window of"),
    "pale": ('<p style="color: #aaa; background: #fff">pale</p>', "has a contrast of"),
    "bare": ("<svg></svg>", "has no title"),
    "no axes": ("<svg></svg>", "has no unit on its y axis"),
    "no table": ("<svg></svg>", "has no table"),
    "outside": ('<img src="https://example.org/a.png">', "fetches https://example.org/a.png"),
    "script": ("<script>console.warn('careful'); missing()</script>", "console: warning: careful"),
    "error": ("<script>missing()</script>", "error: missing is not defined"),
    "unnamed": ("<figure><figcaption>a</figcaption></figure>", "no picture and table can be reached by the name 'a'"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_page_is_found(browser: Any, tmp_path: Path, fault: str) -> None:
    """Each check can fail."""
    html, problem = FAULTY[fault]
    colors = "".join(f"--{name}: #000;" for name in ("full", "piecewise", "none", "ink", "teal", "violet"))
    file = tmp_path / "page.html"
    file.write_text(f"<!DOCTYPE html><meta charset=utf-8><style>:root {{ {colors} }}</style>{html}", "utf-8")
    assert [each for each in problems_of(browser, file) if problem in each]
