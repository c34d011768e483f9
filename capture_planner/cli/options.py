"""The options that commands share, and the values that options take."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from capture_planner import codec
from capture_planner.cli.common import Output, OutputFile, refuse_outputs
from capture_planner.codec import hub
from capture_planner.errors import InvalidValue
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
POSITIVE = click.IntRange(1)


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """Declare an option whose default, where it has one, is shown in the help."""
    settings.setdefault("show_default", settings.get("default") is not None)
    return click.option(*names, **settings)


def flag(name: str, text: str) -> Callable[[F], F]:
    """Declare a switch that is off by default."""
    return click.option(name, is_flag=True, help=text)


def formats(*formats: str) -> Callable[[F], F]:
    """Declare ``--format``: text or JSON, or the given formats, the first one by default."""
    choices = formats or ("text", "json")
    return option("--format", "form", type=click.Choice(choices), default=choices[0], help="Output format.")


def output(text: str, kind: type[Plan] | type[Environment] | None = None) -> Callable[[F], F]:
    """Declare ``-o``: the file that a command makes; of a ``kind``, it replaces no file of another one."""
    return click.option("-o", "--output", cls=OutputFile, kind=kind, help=text)


def reports(*others: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare ``--html`` and ``--format``, as every command that prints a report has them: passed as one ``Output``.

    :param others: formats in addition to text and JSON.
    """

    def declare(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(*args: Any, form: str, html: Path | None, **values: Any) -> Any:
            # Before any work: measuring for an hour must not end with a page that cannot be written.
            refuse_outputs()
            if html is not None:
                from capture_planner.report.page import require_page

                require_page()
            return command(*args, to=Output(form, html), **values)

        html = click.option("--html", cls=OutputFile, help="Also write the report as an HTML page, with charts if any.")
        return html(formats("text", "json", *others)(called))

    return declare


environment = click.option(
    "-e",
    "--environment",
    metavar="NAME|FILE",
    help="Machine to plan for: a shipped environment or an environment file.",
)
model = click.option(
    "--model",
    type=FILE,
    help="Folder or config.json of a Hugging Face causal model; without weights, they are random. "
    "Default: a Llama of the plan's dimensions with random weights.",
)


def _fetch(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        # Fetching ends with the command.
        context.with_resource(hub.fetching())


download = click.option(
    "--download",
    is_flag=True,
    expose_value=False,
    callback=_fetch,
    help="Fetch the config.json of a model that is neither here nor in Hugging Face's cache; never its weights.",
)
seed = option("--seed", type=click.IntRange(0, (1 << 62) - 1), default=0, help="Random seed.")
threads = option(
    "--threads", type=click.IntRange(1, 256), default=1, help="CPU threads per operator; changes how sums are rounded."
)
progress = click.option(
    "--progress/--no-progress", default=None, help="Show progress bars. Default: on a terminal only."
)
batches = click.option(
    "--batches", type=click.File("rb"), help="Answer each batch of a JSON-lines file; - reads stdin."
)


def page_size(default: int | None, text: str = "") -> Callable[[F], F]:
    return option("--page-size", type=click.IntRange(1, 1024), default=default, help=f"Tokens per KV-cache page.{text}")


def pages(default: str) -> Callable[[F], F]:
    return click.option("--pages", type=POSITIVE, help=f"Number of KV-cache pages. Default: {default}.")


def admit(verb: str) -> Callable[[F], F]:
    """Declare the options that admit a plan that is refused without them; ``verb``: of the command."""
    errors = flag("--any-plan", f"{verb} the plan even if lint finds errors.")
    other = flag("--any-environment", f"{verb} the plan even if it is for another machine.")
    return lambda command: errors(other(command))


def stated(name: str) -> bool:
    """Say whether an option was given on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def dashed(name: str) -> str:
    """Return an option as it is written: ``--page-size``."""
    return f"--{name.replace('_', '-')}"


class FiniteRange(click.FloatRange):
    """A number of a range; NaN, which no comparison refuses, and infinity are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class ParsedText(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A value that a function reads from text; it raises ``ValueError`` or ``InvalidValue`` with the message."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value; a default may have been read already."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except (ValueError, InvalidValue) as error:
            self.fail(str(error), param, ctx)


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(map(float, text.split(",")))
    except ValueError:
        # No number, which the check below refuses with the same message.
        shares = (math.nan,)
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"{text!r} is not a comma-separated list of numbers from 0 to 1.")
    return shares


SHARES = ParsedText("P0,P1,...", _shares)
"""Comma-separated numbers from 0 to 1."""

SIZE = ParsedText("SIZE", codec.parse_bytes)
"""A number of bytes, such as ``512MiB``."""
