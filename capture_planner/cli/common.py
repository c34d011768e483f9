"""What the commands share: options, output, and finding what an argument names."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType

from capture_planner import codec, engines
from capture_planner.codec import dumps_json
from capture_planner.codec import shipped as catalog
from capture_planner.engines.emulation import Emulation
from capture_planner.errors import InvalidDocument, PlanningError
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan

FINDINGS = 2
"""Exit code: the files are valid, and something in them wants attention."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell gives it."""

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


model_option = click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Folder of a Hugging Face causal model, or its config.json; without weights, random ones. "
    "Left out: a Llama of the plan's numbers with random weights.",
)
seed_option = click.option(
    "--seed",
    type=click.IntRange(0, (1 << 62) - 1),
    default=0,
    show_default=True,
    help="Of all that is random.",
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Threads of an operator; the number changes how sums are rounded.",
)
progress_option = click.option(
    "--progress/--no-progress", default=None, help="Show bars; left out: on a terminal."
)


def page_size_option(default: int | None, left_out: str = "") -> Callable[[F], F]:
    return click.option(
        "--page-size",
        type=click.IntRange(1, 1024),
        default=default,
        show_default=True,
        help=f"Tokens a page{left_out}.",
    )


def pages_option(left_out: str) -> Callable[[F], F]:
    return click.option(
        "--pages", type=click.IntRange(1), help=f"Pages of the KV cache; left out: {left_out}."
    )


def any_options(does: str) -> Callable[[F], F]:
    """Give the options that admit what is refused without them; ``does`` is the verb of the command."""

    def with_both(command: F) -> F:
        errors = click.option("--any-plan", is_flag=True, help=f"{does} although the lint finds errors.")
        other = click.option(
            "--any-environment", is_flag=True, help=f"{does} although the plan is for another machine."
        )
        return errors(other(command))

    return with_both


def environment_named(name: str | None, output: str | None = None) -> Environment:
    """Find the environment, and say which one it is where nobody named it."""
    stated = catalog.environment_of_output(output)
    if name is not None and stated not in (None, name):
        click.echo(f"note: {output} is named for {stated}, and this is for {name}", err=True)
    chosen = stated if name is None else name
    if chosen is None:
        chosen = catalog.DEFAULT_ENVIRONMENT
        click.echo(f"note: no --environment was named, so this is for {chosen}", err=True)
    return catalog.find_environment(chosen)


def emulated(name: str, flags: Sequence[str], environment: Environment) -> Emulation:
    """Emulate an engine, and say what the emulation had to assume."""
    found = engines.emulate(name, flags, environment)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    return found


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
        return make_plan(codec.load_spec(path), environment, registry.load_backends())
    except PlanningError as error:
        raise InvalidDocument(codec.placed(error.problems, node, path)) from None


def emit(form: str, data: Callable[[], Any], shown: Callable[[], RenderableType]) -> None:
    if form == "json":
        click.echo(dumps_json(data()))
    else:
        show_text(shown())


def emit_file(form: str, file: Path | None, text: Callable[[], str]) -> None:
    """Write a file where one was named, and say so, beside a document on the standard output if need be."""
    if file is not None:
        codec.write(file, text())
        click.echo(f"written to {file}", err=form == "json")


def is_plan_file(file: str) -> bool:
    return codec.is_plan(codec.parse(codec.read(file), file))


def refuse_places(read: str | None, places: Mapping[str, Path | None], what: str = "the plan") -> None:
    """Refuse, before any work is done, files that cannot be written where an option names them, or that
    would overwrite each other or the file that is read, which ``what`` names.
    """
    taken = {} if read is None else {what: Path(read)}
    for name, file in places.items():
        if file is None:
            continue
        if not file.absolute().parent.is_dir():
            raise click.UsageError(f"{name} {file}: there is no such folder to write it into.")
        if file.is_dir():
            raise click.UsageError(f"{name} {file} is a folder; name a file.")
        try:
            same = [other for other, path in taken.items() if path.resolve() == file.resolve()]
            _try_to_write(file.resolve())
        except (OSError, RuntimeError) as error:
            says = getattr(error, "strerror", None) or error
            raise click.UsageError(f"{name} {file} cannot be written: {says}.") from None
        if same:
            raise click.UsageError(f"{name} {file} is the file of {same[0]} too; name another.")
        taken[name] = file


def _try_to_write(target: Path) -> None:
    """Raise ``OSError`` where ``codec.write`` would not get its file into place; leave nothing behind."""
    if not target.exists() or target.is_file():
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            return
    if not os.access(target, os.W_OK):
        raise PermissionError(None, "Permission denied")


def prepare_torch(threads: int) -> None:
    """Let operators use so many threads, and transformers show no bars of its own."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(threads)
    disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]


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


class OwnOptions(click.Command):
    """A command that takes its own long options anywhere, and leaves every other word as it is.

    Engines have short flags of several letters (``-cc.mode=NONE``, ``-O3``), which click would take apart.
    """

    def takes_foreign_words(self, args: Sequence[str]) -> bool:
        """Say whether these words have some that are not ours."""
        return True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not self.takes_foreign_words(args):
            return super().parse_args(ctx, args)
        takes_value = {
            name: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
            if name.startswith("--") or name == "-h"
        }
        own, rest = split_words(args, takes_value)
        return super().parse_args(ctx, [*own, "--", *rest])


def split_words(args: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Part the words into options of ours, with their values, and all others.

    Raises ``click.UsageError`` for an option of ours that lacks its value.
    """
    own: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, _ = word.partition("=")
        if word == "--":
            rest += words
        elif name not in takes_value:
            rest.append(word)
        else:
            own.append(word)
            if takes_value[name] and not equals:
                value = next(words, None)
                if value is None:
                    raise click.UsageError(f"Option '{name}' requires an argument.")
                own.append(value)
    return own, rest
