"""The command line: thin over the library. Exit codes: 0 fine, 1 error, 2 findings."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any, NoReturn

import click

import capture_planner
from capture_planner.cli import files
from capture_planner.cli.bench import bench
from capture_planner.cli.compare import compare
from capture_planner.cli.conformance import conformance
from capture_planner.cli.engine import engine
from capture_planner.cli.environment import environment
from capture_planner.cli.export import export
from capture_planner.cli.init import init
from capture_planner.cli.launch import launch
from capture_planner.cli.new_backend import new_backend
from capture_planner.cli.profile import profile
from capture_planner.cli.ranks import ranks
from capture_planner.cli.run import run
from capture_planner.cli.signals import Interruption, terminable
from capture_planner.cli.spec import spec
from capture_planner.cli.traffic import traffic
from capture_planner.cli.tune import tune
from capture_planner.codec import dumps_json
from capture_planner.errors import CapturePlannerError, InvalidValue, PluginWarning
from capture_planner.report.writing import printable, printable_lines


def main() -> NoReturn:
    """Run the command line; errors of users end as text and exit code 1, interruptions with 130 or 143."""
    arguments = sys.argv[1:]
    code: object = 1
    interruption = Interruption()
    _show_plugin_warnings()
    try:
        if sys.stdout is None:
            raise CapturePlannerError("standard output is closed; redirect it to /dev/null to discard it")
        with terminable() as interruption:
            code = cli.main(args=arguments, prog_name="capture-planner", standalone_mode=False, obj=interruption)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = interruption.code
    except click.ClickException as error:
        error.show(file=(text := io.StringIO()))
        click.echo(printable_lines(text.getvalue()), nl=False, err=True)
    except CapturePlannerError as error:
        _show_error(error, as_json=any(word in ("--format=json", "json") for word in arguments))
    except BrokenPipeError:
        sys.stderr.close()
    except OSError as error:
        click.echo(f"error: {printable(str(error.filename or 'standard output'))}: {error.strerror or error}", err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _show_plugin_warnings() -> None:
    """Show broken plugins as one line each; other warnings as before."""
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *others: Any, **named: Any) -> None:
        if issubclass(category, PluginWarning):
            click.echo(f"warning: {printable(str(message))}", err=True)
        else:
            show_others(message, category, *others, **named)

    warnings.showwarning = show


def _show_error(error: CapturePlannerError, *, as_json: bool) -> None:
    problems = error.problems if isinstance(error, InvalidValue) else ()
    for line in [str(problem) for problem in problems] or [str(error)]:
        click.echo(f"error: {printable_lines(line)}", err=True)
    if as_json:
        keep = ("message", "remedy", "file", "line", "column")
        listed: list[dict[str, Any]] = [
            {"path": list(p.path)} | {name: getattr(p, name) for name in keep} for p in problems
        ]
        click.echo(dumps_json({"errors": listed or [{"message": str(error)}]}))


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
