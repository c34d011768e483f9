"""The commands: those of the core, those of plugins, and what to install for those of the other distributions.

They are declared here and imported when they are used: help and completion need the sentences only, and a third of the
start of any command would be modules of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import click

from capture_planner.errors import CapturePlannerError
from capture_planner.plugins import Command, hookspecs
from capture_planner.plugins.discovery import duplicate, guarded, implementations, left_out

CORE = {
    name: Command(name=name, help=text, target=f"capture_planner.cli.{place}")
    for name, place, text in (
        ("plan", "files:plan", "Make the plan of a spec."),
        ("show", "files:show", "Show a plan, an observation, traffic or a profile as tables."),
        ("explain", "files:explain", "Explain which graph serves a batch, and why."),
        ("check", "check:check", "Check plans, specs, observations or an engine's flags."),
        ("diff", "files:diff", "Show what changes from one plan, observation or run to another."),
        ("backends", "files:backends", "List the installed attention backends and what they support."),
        ("schema", "files:schema", "Print the JSON Schema of a kind of file."),
        ("traffic", "traffic:traffic", "Count the batches of logs, metrics, observations or traces."),
        ("init", "engine:init", "Write a commented spec from a model's configuration."),
        ("ranks", "ranks:ranks", "Show what data-parallel ranks run together."),
        ("engine", "engine:engine", "Show what an engine captures with its own flags."),
        ("spec", "engine:spec", "Write the spec of an engine's command line."),
        ("export", "engine:export", "Export a plan as the flags of an engine."),
        ("new-backend", "new_backend:new_backend", "Start a new attention backend from a template."),
    )
}
"""The commands of the core by name, with module and function of each, and its sentence in the help."""

RUNNER = "capture-planner-runner"
"""The distribution that executes plans."""

CONFORMANCE = "capture-planner-conformance"
"""The distribution that tests backends, with the runner."""

TUNER = "capture-planner-tuner"
"""The distribution that tunes, launches, compares and profiles."""

OF_DISTRIBUTIONS = {
    RUNNER: ("run", "bench", "environment"),
    CONFORMANCE: ("conformance",),
    TUNER: ("tune", "launch", "compare", "journal", "profile"),
}
"""Their commands: the only ones that are known where they are not installed, so that the error says what to install."""


def install_command(distribution: str) -> str:
    """Return what installs a distribution of the repository from a clone."""
    # No package index has the runner, so pip is told where it is.
    needed = (RUNNER,) if distribution == CONFORMANCE else ()
    folders = [f"./{each.removeprefix('capture-planner-')}" for each in (*needed, distribution)]
    return f"python -m pip install {' '.join(folders)}"


def needs(subject: str, distribution: str) -> CapturePlannerError:
    """Return the error of what only one distribution can do, where it is not installed or does not load."""
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        reason = "which is not installed; install it from a clone with"
    else:
        reason = "which is installed but brought no such command; install it again from a clone with"
    return CapturePlannerError(f"{subject} needs {distribution}, {reason}: {install_command(distribution)}")


@functools.cache
def installed_commands() -> Mapping[str, Command]:
    """Return the commands of the installed plugins by name; the plugins are loaded at the first call.

    What is broken is left out with a ``PluginWarning``, and so is a command of a name that is taken.
    """
    # No plugin replaces a command of the core.
    first = dict.fromkeys(CORE, "capture-planner")
    found: dict[str, Command] = {}
    error = CapturePlannerError
    for item in implementations(hookspecs, "capture_planner_commands", error):
        with left_out(error), guarded(f"the plugin {item.distribution}", error):
            if not isinstance(item.value, Command):
                raise error(f"{item.distribution}: {item.value!r} is not a capture_planner.plugins.Command")
            name = item.value.name
            if name in first:
                raise error(duplicate("command", name, first[name], item.distribution))
            first[name], found[name] = item.distribution, item.value
    return found


class LazyCommands(Mapping[str, click.Command]):
    """All commands by name; each is imported when it is first used."""

    def __getitem__(self, name: str) -> click.Command:
        # The core first: its own commands start without a look at plugins.
        return (CORE.get(name) or installed_commands()[name]).load()

    def __contains__(self, name: object) -> bool:
        return name in CORE or name in installed_commands()

    def __iter__(self) -> Iterator[str]:
        return iter((*CORE, *installed_commands()))

    def __len__(self) -> int:
        return len(CORE) + len(installed_commands())


class CommandGroup(click.Group):
    """The program, whose help imports no command."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; raises ``CapturePlannerError`` for one of a distribution that is not installed."""
        for distribution, names in OF_DISTRIBUTIONS.items():
            # Other names that are unknown are left to click.
            if cmd_name in names and cmd_name not in self.commands:
                raise needs(cmd_name, distribution)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an interruption is click's own, which would print an empty line for it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their sentences, and those that an installation would add."""
        declared = CORE | dict(installed_commands())
        with formatter.section("Commands"):
            formatter.write_dl([(name, declared[name].help) for name in sorted(declared)])
        for distribution, names in OF_DISTRIBUTIONS.items():
            missing = sorted(set(names) - set(declared))
            if missing:
                install = install_command(distribution)
                with formatter.section(f"Commands of {distribution}, which is not installed ({install})"):
                    formatter.write_text(", ".join(missing))
