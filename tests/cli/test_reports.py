"""What every command that prints a report has: a page, JSON, and outputs that mean the same."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest

from capture_planner import codec
from capture_planner.cli import cli
from capture_planner.cli.common import OutputFile
from capture_planner.records._base import replace
from capture_planner_tuner.auto.start import JournalFolder
from capture_planner_tuner.journal import Event, JournalRecord
from support.commands import Run, spec_for
from support.observing import observation_of
from support.pages import LOCKED, PLAIN

NO_REPORT = {"schema", "spec", "environment"}
"""Commands that print one file, and have ``--format`` for it."""


class Words(HTMLParser):
    """The text of a page, without its style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self._hidden = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden = tag == "style"

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else f" {data}"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Run) -> Run:
    """A folder with what the commands read: a spec, its plan, an observation and a journal."""
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(spec_for(4), "utf-8")
    assert call("plan", "spec.yaml", "-e", "cpu", "-o", "plan.yaml").code == 0
    plan = codec.load_plan(LOCKED / "qwen3-8b-eagle3.h100.yaml")
    observation = replace(observation_of(plan), device=plan.environment.device.name)
    timed = [
        replace(role, graphs=tuple(replace(graph, milliseconds=2.5, mib=8.0, seconds=0.25) for graph in role.graphs))
        for role in observation.roles
    ]
    codec.write("observation.yaml", codec.dumps(replace(observation, roles=tuple(timed))))
    Path("journal").mkdir()
    record = JournalRecord(time="2026-01-01T00:00:00Z", run=1, decision=Event.OBSERVE, reason="nothing is known")
    JournalFolder(tmp_path / "journal").append([record])
    return call


def declared(command: click.Command) -> dict[str, click.Parameter]:
    """Return the options of a command by their long name."""
    return {each.opts[-1]: each for each in command.params if isinstance(each, click.Option)}


@pytest.mark.parametrize("name", list(cli.commands))
def test_options_for_output_mean_the_same_everywhere(name: str) -> None:
    """Who has --format for a report has --html; both, and -o, are declared once and refused before any work."""
    options = declared(cli.commands[name])
    assert ("--html" in options) == ("--format" in options and name not in NO_REPORT)
    assert "--page" not in options
    for option in ("--html", "--output"):
        if option in options and options[option].metavar != "FOLDER":
            assert isinstance(options[option], OutputFile)
    if "--output" in options:
        assert options["--output"].opts == ["-o", "--output"]
    if "--html" in options:
        choices = options["--format"].type
        assert isinstance(choices, click.Choice)
        assert list(choices.choices)[:2] == ["text", "json"]


@pytest.mark.parametrize("command", PLAIN)
def test_a_report_is_text_json_and_a_page(files: Run, command: str) -> None:
    """All words of the text are on the page, which changes nothing of the text; JSON is one document."""
    text = files(command, *PLAIN[command])
    assert text.code in (0, 2), text.err
    page = files(command, *PLAIN[command], "--html", "page.html")
    assert page.code == text.code
    written = "written to page.html\n"
    # A profile records its command line.
    assert page.out.replace(written, "").replace(" --html page.html", "") == text.out
    assert written in page.out
    shown = "".join(Words(Path("page.html").read_text("utf-8")).text.split())
    lines = [line for line in text.out.splitlines() if not line.startswith("written to ")]
    assert [word for line in lines for word in line.split() if word not in shown] == []
    as_json = files(command, *PLAIN[command], "--format", "json", "--html", "page.html")
    assert as_json.code == text.code
    assert json.loads(as_json.out)
    assert written in as_json.err


@pytest.mark.parametrize("command", PLAIN)
def test_a_page_replaces_nothing_that_is_read(files: Run, command: str) -> None:
    """Nor is it written where there is no folder: nothing is computed before."""
    read = next((word for word in PLAIN[command] if Path(word).is_file()), None)
    before = None if read is None else Path(read).read_bytes()
    for file in (read, "nowhere/page.html"):
        if file is not None:
            ran = files(command, *PLAIN[command], "--html", file)
            assert (ran.code, ran.out) == (1, "")
    assert read is None or Path(read).read_bytes() == before
