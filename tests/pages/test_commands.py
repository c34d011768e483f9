"""The pages that are opened in a browser are all that the commands write."""

from __future__ import annotations

from capture_planner.cli import cli
from support.pages import COMMANDS


def test_every_command_that_writes_a_page_is_opened_in_a_browser() -> None:
    """A new one has its arguments in ``support.pages.COMMANDS``."""
    written = {
        (name, option)
        for name, command in cli.commands.items()
        for parameter in command.params
        if "HTML page" in (getattr(parameter, "help", None) or "")
        for option in parameter.opts
        if option.startswith("--")
    }
    assert written == {(name, option) for name, (option, _) in COMMANDS.items()}
