"""What the tuner adds to capture-planner: commands. Every start imports it, so it is cheap."""

from __future__ import annotations

from collections.abc import Iterable

from capture_planner.plugins import Command, hookimpl

HERE = "capture_planner_tuner.cli"


@hookimpl
def capture_planner_commands() -> Iterable[Command]:
    """Return the commands that tune, launch, compare and profile."""
    return (
        Command(
            name="tune", help="Choose sizes by measurements, and compare them with today's.", target=f"{HERE}.tune:tune"
        ),
        Command(name="launch", help="Run an engine's own command under a plan.", target=f"{HERE}.launch:launch"),
        Command(name="compare", help="Compare two deployments side by side.", target=f"{HERE}.compare:compare"),
        Command(name="journal", help="Show what launch --auto decided, and why.", target=f"{HERE}.launch:journal"),
        Command(
            name="profile",
            help="Measure what each size of graph costs on this machine.",
            target=f"{HERE}.profile:profile",
        ),
    )
