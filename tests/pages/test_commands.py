"""The pages that are opened in a browser are those of all commands with charts."""

from __future__ import annotations

from capture_planner.cli import cli
from capture_planner.cli.common import OutputFile
from support.pages import CHARTED, PLAIN


def test_every_command_that_writes_a_page_has_arguments_here() -> None:
    """A new one has its arguments in ``support.pages``: with charts it is opened in a browser."""
    written = {
        name
        for name, command in cli.commands.items()
        if any(isinstance(each, OutputFile) and each.name == "html" for each in command.params)
    }
    assert written == {*CHARTED, *PLAIN}
