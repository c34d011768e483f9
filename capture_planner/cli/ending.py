"""How a program of ours ends: every error a user can make as text and exit code 1, an interruption with 130 or 143."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import click

from capture_planner.cli.signals import Interruption
from capture_planner.codec import dumps_json
from capture_planner.errors import CapturePlannerError, InvalidValue
from capture_planner.report.writing import printable, printable_lines

Say = Callable[[str], None]
"""Shows one line of an error."""


def say_error(line: str) -> None:
    """Show one line of an error on standard error."""
    click.echo(f"error: {printable_lines(line)}", err=True)


def exit_code_of(
    work: Callable[[], object], *, as_json: bool, say: Say = say_error, interruption: Interruption | None = None
) -> int:
    """Return the exit code of what ``work`` returns or raises, once its error is shown.

    :param as_json: whether an error is printed as JSON, too.
    """
    code: object = 1
    interruption = interruption or Interruption()
    try:
        code = work()
    except click.exceptions.Exit as end:
        code = end.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = interruption.code
    except click.ClickException as error:
        error.show(file=(text := io.StringIO()))
        click.echo(printable_lines(text.getvalue()), nl=False, err=True)
    except CapturePlannerError as error:
        _show(error, as_json=as_json, say=say)
    except BrokenPipeError:
        sys.stderr.close()
    except OSError as error:
        say(f"{printable(str(error.filename or 'standard output'))}: {error.strerror or error}")
    return code if isinstance(code, int) else 0


def _show(error: CapturePlannerError, *, as_json: bool, say: Say) -> None:
    problems = error.problems if isinstance(error, InvalidValue) else ()
    for line in [str(problem) for problem in problems] or [str(error)]:
        say(line)
    if as_json:
        keep = ("message", "remedy", "file", "line", "column")
        listed: list[dict[str, Any]] = [
            {"path": list(p.path)} | {name: getattr(p, name) for name in keep} for p in problems
        ]
        click.echo(dumps_json({"errors": listed or [{"message": str(error)}]}))
