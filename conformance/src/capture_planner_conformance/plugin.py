"""What the conformance suite adds to capture-planner: its command. Every start imports it, so it is cheap."""

from __future__ import annotations

from collections.abc import Iterable

from capture_planner.plugins import Command, hookimpl


@hookimpl
def capture_planner_commands() -> Iterable[Command]:
    """Return the command that tests a backend."""
    return (
        Command(
            name="conformance",
            help="Test a backend under captured graphs.",
            target="capture_planner_conformance.cli.conformance:conformance",
        ),
    )
