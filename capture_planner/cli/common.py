"""What the commands share: options, output, and finding what an argument names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType

from capture_planner import catalog, codec, registry
from capture_planner.codec import dumps_json
from capture_planner.environment import Environment
from capture_planner.errors import InvalidDocument, PlanningError, RunError
from capture_planner.plan import Plan
from capture_planner.planner import plan as make_plan

FINDINGS = 2
"""Exit code: the files are valid, and something in them wants attention."""

NEEDED = {"torch": "torch", "transformers": "transformers", "safetensors": "safetensors", "numpy": "numpy"}
"""Packages that executing needs, by the module that is looked for."""

F = TypeVar("F", bound=Callable[..., Any])


def show_text(shown: RenderableType) -> None:
    """Print for people: in colour on a terminal, plain and 120 wide elsewhere."""
    # No markup: sentences come from plans, and a plan may say "[/b]".
    terminal = Console(markup=False)
    plain = Console(width=120, color_system=None, markup=False)
    console = terminal if terminal.is_terminal else plain
    with console.capture() as capture:
        console.print(shown)
    lines = capture.get().splitlines()
    click.echo("\n".join(line.rstrip() for line in lines), color=terminal.is_terminal)


def format_option(*formats: str) -> Callable[[F], F]:
    return click.option(
        "--format",
        "form",
        type=click.Choice(formats or ("text", "json")),
        default=formats[0] if formats else "text",
        show_default=True,
        help="How to print the result.",
    )


environment_option = click.option(
    "-e",
    "--environment",
    metavar="NAME|FILE",
    help="The machine to plan for: a shipped environment or a file.",
)


def environment_named(name: str | None, output: str | None = None) -> Environment:
    """Find the environment, and say which one it is where nobody named it."""
    stated = catalog.environment_of_output(output)
    if name is not None and stated not in (None, name):
        click.echo(f"note: {output} is named for {stated}, and this is for {name}", err=True)
    chosen = name or stated
    if chosen is None:
        chosen = catalog.DEFAULT_ENVIRONMENT
        click.echo(f"note: no --environment was named, so this is for {chosen}", err=True)
    return catalog.find_environment(chosen)


def plan_of(path: str, environment: str | None) -> Plan:
    """Read a plan, or read a spec and plan it."""
    if not is_plan_file(path):
        return planned(path, environment_named(environment))
    value = codec.load_plan(path)
    if environment is not None:
        raise click.UsageError(
            f"{path} is a plan, for {value.environment.name}; --environment goes with a spec."
        )
    return value


def planned(path: str, environment: Environment) -> Plan:
    """Read a spec and plan it; what is wrong with it as a plan has its place in the file too."""
    node = codec.parse(codec.read(path), path)
    try:
        return make_plan(codec.load_spec(path), environment, registry.load())
    except PlanningError as error:
        raise InvalidDocument(codec.placed(error.problems, node, path)) from None


def emit(form: str, data: Callable[[], Any], shown: Callable[[], RenderableType]) -> None:
    if form == "json":
        click.echo(dumps_json(data()))
    else:
        show_text(shown())


def is_plan_file(file: str) -> bool:
    return codec.is_plan(codec.parse(codec.read(file), file))


def refuse_missing() -> None:
    """Refuse to execute anything where a package is missing, and say what to install."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise RunError(
            f"executing a plan needs {', '.join(missing)}; install the extra `run`, from a clone with: "
            "python -m pip install '.[run]'"
        )


def refuse_unwritable(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written where it is named, before any work is done."""
    if file is not None and not file.absolute().parent.is_dir():
        raise click.UsageError(f"{option} {file}: there is no such folder to write it into.")
    if file is not None and file.is_dir():
        raise click.UsageError(f"{option} {file} is a folder; name a file.")


def progress_bars(wanted: bool | None) -> Any:
    """Return bars on standard error: on a terminal, or as wanted."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    shown = sys.stderr.isatty() if wanted is None else wanted

    @contextmanager
    def task(what: str, total: int) -> Iterator[Callable[[str], None]]:
        columns = (
            TextColumn("{task.description:12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
        )
        with Progress(*columns, console=console, disable=not shown, transient=not wanted) as bars:
            bar = bars.add_task(what, total=total, now="")
            yield lambda now: bars.update(bar, advance=1, now=now)

    return task
