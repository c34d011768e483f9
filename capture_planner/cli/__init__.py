"""The command line: thin over the library. Exit codes: 0 fine, 1 error, 2 findings."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NoReturn

import click

import capture_planner
from capture_planner.cli import files
from capture_planner.cli.bench import bench
from capture_planner.cli.compare import compare
from capture_planner.cli.conformance import conformance
from capture_planner.cli.ending import exit_code_of
from capture_planner.cli.engine import engine
from capture_planner.cli.environment import environment
from capture_planner.cli.export import export
from capture_planner.cli.init import init
from capture_planner.cli.launch import launch
from capture_planner.cli.new_backend import new_backend
from capture_planner.cli.profile import profile
from capture_planner.cli.ranks import ranks
from capture_planner.cli.run import run
from capture_planner.cli.spec import spec
from capture_planner.cli.traffic import traffic
from capture_planner.cli.tune import tune
from capture_planner.errors import CapturePlannerError, PluginWarning
from capture_planner.report.writing import printable


def main() -> NoReturn:
    """Run the command line; every error a user can make ends as text and exit code 1, an interruption with 130."""
    arguments = sys.argv[1:]
    _show_plugin_warnings()

    def work() -> object:
        if sys.stdout is None:
            raise CapturePlannerError("standard output is closed; redirect it to /dev/null to discard it")
        return cli.main(args=arguments, prog_name="capture-planner", standalone_mode=False)

    sys.exit(exit_code_of(work, as_json=any(word in ("--format=json", "json") for word in arguments)))


def _show_plugin_warnings() -> None:
    """Show broken plugins as one line each; other warnings as before."""
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *others: Any, **named: Any) -> None:
        if issubclass(category, PluginWarning):
            click.echo(f"warning: {printable(str(message))}", err=True)
        else:
            show_others(message, category, *others, **named)

    warnings.showwarning = show


FILES = [files.plan, files.show, files.explain, files.check, files.diff, files.backends, files.schema]
MEASURING = [traffic, profile, tune]
OTHERS = [init, ranks, engine, spec, compare, export, launch, run, bench, conformance, environment, new_backend]


@click.group(commands=[*FILES, *MEASURING, *OTHERS], context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(capture_planner.__version__, prog_name="capture-planner")
def cli() -> None:
    """Plan, check and explain which CUDA graphs a serving engine captures.

    A SPEC states what is wanted; a PLAN states what was decided, and why. Commands that take
    a plan, except launch, also take a spec, and plan it first; - is standard input. No GPU is needed.
    """
