"""The command line: thin over the library. Exit codes: 0 fine, 1 error, 2 findings."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NoReturn

import click

import capture_planner
from capture_planner.cli.commands import CommandGroup, LazyCommands
from capture_planner.cli.ending import exit_code_of, terminable
from capture_planner.errors import CapturePlannerError, PluginWarning
from capture_planner.report.printable import printable


def main() -> NoReturn:
    """Run the command line; errors of users end as text and exit code 1, interruptions with 130 or 143."""
    arguments = sys.argv[1:]
    _show_plugin_warnings()

    def work() -> object:
        # None where the parent process closed the descriptor.
        if sys.stdout is None:
            raise CapturePlannerError("standard output is closed; redirect it to /dev/null to discard it")
        # Not standalone: click would end the process by itself, with codes of its own.
        return cli.main(args=arguments, prog_name="capture-planner", standalone_mode=False, obj=interruption)

    with terminable() as interruption:
        # From the words themselves, because an error in them comes before any option is parsed.
        code = exit_code_of(
            work, as_json=any(word in ("--format=json", "json") for word in arguments), interruption=interruption
        )
    sys.exit(code)


def _show_plugin_warnings() -> None:
    """Show broken plugins as one line each; other warnings as before."""
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *others: Any, **named: Any) -> None:
        if issubclass(category, PluginWarning):
            click.echo(f"warning: {printable(str(message))}", err=True)
        else:
            show_others(message, category, *others, **named)

    warnings.showwarning = show


@click.group(cls=CommandGroup, commands=LazyCommands(), context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(capture_planner.__version__, prog_name="capture-planner")
def cli() -> None:
    """Plan, check and explain which CUDA graphs a serving engine captures.

    A SPEC states what is wanted; a PLAN states what was decided, and why. Commands that take
    a plan, except launch, also take a spec, and plan it first; - is standard input. No GPU is needed.
    """
