"""What the commands share: output, and reading what an argument names."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import attrs
import click
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from capture_planner import codec
from capture_planner.codec import Document, dumps_json
from capture_planner.codec import shipped as catalog
from capture_planner.codec.documents import node_of
from capture_planner.errors import CapturePlannerError, InvalidDocument, PlanningError, Problem
from capture_planner.measuring.workers import read_workers
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Policy, Spec
from capture_planner.report.plain import plain
from capture_planner.report.writing import printable, printable_lines

FINDINGS = 2
"""Exit code: the files are valid, and something in them wants attention."""


_ASSUMED = f"{__name__}.assumed"

NARROWEST = 80
"""Columns of a table on a terminal; a narrower one wraps lines itself, which is easier to read than broken words."""


@attrs.frozen
class PrintableReport:
    """A report whose texts may come from a file: no control character in them reaches the terminal."""

    report: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.report, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


def show_text(renderable: RenderableType) -> None:
    """Print for people: in colour on a terminal, plain and 120 wide elsewhere."""
    # No markup: sentences come from plans, and a plan may say "[/b]".
    terminal = Console(markup=False)
    if terminal.is_terminal and terminal.width < NARROWEST:
        terminal.width = NARROWEST
    plain_text = Console(width=120, color_system=None, markup=False)
    console = terminal if terminal.is_terminal else plain_text
    with console.capture() as capture:
        console.print(PrintableReport(renderable))
    lines = capture.get().splitlines()
    click.echo("\n".join(line.rstrip() for line in lines), color=terminal.is_terminal)


def show_lines(text: str, *, err: bool = False) -> None:
    """Print lines that may have text of a file in them; no control character reaches a terminal."""
    click.echo(printable_lines(text), err=err)


@attrs.frozen
class ChosenMachine:
    """The machine of a command, and what to note about the choice once it matters."""

    environment: Environment
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    """That the machine was not named, where answers depend on it."""


def show_notes(notes: Iterable[str]) -> None:
    """Print notes on standard error: late, so that none stands above an error that it has nothing to do with.

    Of several ranks (``RANK`` as torchrun sets it) the first one alone has them.
    """
    for note in notes if is_first_rank() else ():
        click.echo(f"note: {printable(note)}", err=True)


def is_first_rank() -> bool:
    """Say whether this is a process of its own, or the first of several ranks."""
    return os.environ.get("RANK", "0") == "0"


def machine_named(
    name: str | None, output: str | None = None, default: str = catalog.DEFAULT_ENVIRONMENT
) -> ChosenMachine:
    """Find the machine: that of the output's name where none was named, or else the default."""
    in_name = catalog.environment_of_output(output)
    if name is not None and in_name not in (None, name):
        notes: tuple[str, ...] = (f"{output} is named for {in_name}, but the plan is for {name}",)
    else:
        notes = ()
    assumed = (f"no --environment given; using {default}",) if name is None and in_name is None else ()
    chosen = in_name or default if name is None else name
    return ChosenMachine(catalog.find_environment(chosen), notes, assumed)


def read_document(path: str) -> Document:
    """Read and parse a plan or spec, once; ``-`` is standard input. Raises ``InvalidDocument``.

    A folder stands for the newest observations of an engine's workers in it, as one.
    """
    if path.strip() and Path(path).is_dir():
        return Document(path, node_of(codec.to_data(read_workers(path))))
    if path not in ("-", "/dev/stdin"):
        return Document.read(path)
    document = Document.parse(codec.read_stream(sys.stdin.buffer, "<stdin>"), "<stdin>")
    if document.node.value is None:
        raise InvalidDocument([Problem(file="<stdin>", message="standard input is empty")])
    return document


def plan_of(
    document: Document, environment: str | None, default: str = catalog.DEFAULT_ENVIRONMENT, *, answers: bool = False
) -> Plan:
    """Return the plan of a document: a plan itself, or what its spec is planned as.

    :param answers: whether the command prints ``assumed`` first.
    """
    if not document.is_plan:
        return plan_document(document, machine_named(environment, default=default), answers=answers)
    plan = document.load(Plan)
    if environment is not None:
        raise click.UsageError(
            f"{document.name} is a plan, for {plan.environment.name}; --environment goes with a spec."
        )
    return plan


def assumed() -> tuple[str, ...]:
    """Return what the answer of this command rests on, as far as plans were made for it; each sentence once."""
    return tuple(dict.fromkeys(click.get_current_context().meta.get(_ASSUMED, ())))


def plan_document(document: Document, machine: ChosenMachine, *, answers: bool = False) -> Plan:
    """Plan a spec; problems that planning finds have their place in the file too.

    :param answers: whether the command prints ``assumed`` first, so that a machine that was not named is no note.
    """
    spec = document.load(Spec)
    show_notes((*machine.notes, *(() if answers else machine.assumptions)))
    if answers:
        click.get_current_context().meta.setdefault(_ASSUMED, []).extend(machine.assumptions)
    try:
        measurements = codec.load_measurements(document)
        if measurements is not None:
            name, parallel = str(spec.sizes.profile), spec.parallel
            foreign = catalog.foreign_costs(name, measurements.profile, machine.environment, spec.model, parallel)
            show_notes([] if foreign is None else [foreign])
        if measurements is None and spec.sizes.policy is Policy.DEFAULT:
            measurements = catalog.near_measurements(machine.environment, spec.model)
        return make_plan(spec, machine.environment, registry.load_backends(), measurements)
    except PlanningError as error:
        raise InvalidDocument(document.place(error.problems)) from None


def emit(
    form: str, value: Callable[[], Any], text: Callable[[], RenderableType], assumptions: Sequence[str] | None = None
) -> None:
    """Print a value as JSON, or what people are shown of it.

    :param assumptions: what an answer rests on: its first lines, and ``assumptions`` in JSON. None: a record, which has
        no such field.
    """
    if form == "json":
        first = {} if assumptions is None else {"assumptions": list(assumptions)}
        click.echo(to_json(first | plain(value()) if first else value()))
    else:
        show_assumptions(assumptions or ())
        show_text(text())


def show_assumptions(assumptions: Sequence[str]) -> None:
    """Print what an answer rests on: its first lines."""
    if assumptions:
        show_text(Group(*(Text(f"assumption: {each}", style="yellow") for each in assumptions)))


def to_json(value: Any) -> str:
    """Return the one JSON form of a value as text."""
    return dumps_json(plain(value))


def emit_file(form: str, file: Path | None, text: Callable[[], str]) -> None:
    """Write a file where one was named, and say so; on standard error next to a JSON document."""
    if file is not None:
        codec.write(file, text())
        show_lines(f"written to {file}", err=form == "json")


def refuse_outputs(source: str | None, outputs: Mapping[str, Path | None], subject: str = "the plan") -> None:
    """Refuse output files that cannot be written, before any work is done.

    Nor may they overwrite each other or the ``source`` that is read, which messages call ``subject``.
    """
    files = {} if source is None else {subject: Path(source)}
    for name, file in outputs.items():
        if file is None:
            continue
        try:
            if not file.absolute().parent.is_dir():
                raise click.UsageError(f"{name} {file}: no such folder.")
            if file.is_dir():
                raise click.UsageError(f"{name} {file} is a folder; name a file.")
            same = [other for other, path in files.items() if path.resolve() == file.resolve()]
            _try_to_write(file)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise click.UsageError(f"{name} {file} cannot be written: {reason}.") from None
        if same:
            raise click.UsageError(f"{name} {file} is also the file of {same[0]}; name another.")
        files[name] = file


def make_folder(name: str, folder: Path | None) -> None:
    """Make the folder of an option, or refuse one that cannot be written, before any work is done."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _try_to_write(folder / "file")
    except FileExistsError:
        raise click.UsageError(f"{name} {folder} is a file; name a folder.") from None
    except OSError as error:
        raise click.UsageError(f"{name} {folder} cannot be written: {error.strerror or error}.") from None


def refuse_to_replace(output: str, kind: type[Plan] | type[Environment], source: str = "") -> None:
    """Keep --output from replacing a file of another kind: a typing error must not overwrite a spec.

    :param source: the file that is read.
    """
    if not output:
        raise click.UsageError("--output needs the name of a file.")
    target = Path(output)
    try:
        if not target.is_file() or target.stat().st_size == 0:
            return
    except OSError as error:
        raise click.UsageError(f"--output {output} cannot be written: {error.strerror}.") from None
    try:
        document = Document.read(output)
        replaceable = document.is_plan if kind is Plan else bool(document.load(kind))
    except InvalidDocument:
        replaceable = False
    if not replaceable:
        is_source = Path(source).exists() and target.samefile(source)
        subject = "the spec itself" if is_source else f"a file that is not {_KINDS[kind]}"
        raise CapturePlannerError(f"--output {output} is {subject}; name another file, or remove it first")


_KINDS = {Plan: "a plan", Environment: "an environment"}


def _try_to_write(target: Path) -> None:
    """Raise ``OSError`` where ``codec.write`` would not get its file into place; leave nothing behind."""
    if not codec.is_in_place(target):
        file = codec.replaceable(target)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".capture-planner."):
            return
    if not os.access(target, os.W_OK):
        raise PermissionError(None, "Permission denied")


def prepare_torch(threads: int) -> None:
    """Set the threads of an operator."""
    import torch

    torch.set_num_threads(threads)


def progress_bars(visible: bool | None) -> Any:
    """Return progress bars on standard error: shown on a terminal, unless ``visible`` decides.

    Of several ranks (``RANK`` as torchrun sets it) the first one alone has them.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    enabled = (sys.stderr.isatty() if visible is None else visible) and is_first_rank()

    @contextmanager
    def task(description: str, total: int) -> Iterator[Callable[[str], None]]:
        name, now = TextColumn("{task.description:12}"), TextColumn("{task.fields[now]}")
        columns = (name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), now)
        with Progress(*columns, console=console, disable=not enabled, transient=not visible) as bars:
            bar = bars.add_task(description, total=total, now="")
            yield lambda now: bars.update(bar, advance=1, now=now)

    return task


class OwnOptions(click.Command):
    """A command that takes its own long options anywhere, and passes every other word through.

    Engines have short flags of several letters (``-cc.mode=NONE``, ``-O3``), which click would take apart.
    """

    own_short: ClassVar[tuple[str, ...]] = ("-h",)
    """Our short options, which no engine has."""

    def takes_foreign_words(self, args: Sequence[str]) -> bool:
        """Say whether the words may include options of an engine."""
        return True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not self.takes_foreign_words(args):
            return super().parse_args(ctx, args)
        takes_value = {
            name: not option.is_flag
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
            if name.startswith("--") or name in self.own_short
        }
        own, rest = split_words(list(_environment_named(args)), takes_value)
        return super().parse_args(ctx, [*own, "--", *rest])


def _environment_named(args: Sequence[str]) -> Iterator[str]:
    """Yield the words with our ``-e`` written out: one that sets no variable, and is not a container's."""
    contained = False
    for word, value in zip(args, (*args[1:], "="), strict=True):
        contained = contained or word in _TAKE_VARIABLES
        yield "--environment" if word == "-e" and "=" not in value and not contained else word


_TAKE_VARIABLES = ("docker", "podman", "nerdctl")
"""Programs whose ``-e`` sets a variable, also without a value."""


def split_words(args: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Split words into our options, with their values, and all others.

    Raises ``click.UsageError`` for one of our options that lacks its value.
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
