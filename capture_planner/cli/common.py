"""What the commands share: output, and reading what an argument names."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import click

from capture_planner import codec
from capture_planner.codec import Document, dumps_json
from capture_planner.codec import shipped as catalog
from capture_planner.codec.documents import node_of
from capture_planner.errors import CapturePlannerError, InvalidDocument, PlanningError, Problem
from capture_planner.records.environment import Environment
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Policy, Spec
from capture_planner.report.plain import plain
from capture_planner.report.printable import printable, printable_lines
from capture_planner.report.writing import Report

FINDINGS = 2
"""Exit code: the files are valid, and something in them wants attention."""


_ASSUMED = f"{__name__}.assumed"

NARROWEST = 80
"""Columns of a table on a terminal; a narrower one wraps lines itself, which is easier to read than broken words."""


def show_text(report: Report) -> None:
    """Print for people: in colour on a terminal, plain and 120 wide elsewhere."""
    # What a program reads needs no rich, which is a twentieth of the start.
    from rich.console import Console

    from capture_planner.report.terminal import tables

    # No markup: sentences come from plans, and a plan may say "[/b]".
    terminal = Console(markup=False)
    if terminal.is_terminal and terminal.width < NARROWEST:
        terminal.width = NARROWEST
    plain_text = Console(width=120, color_system=None, markup=False)
    console = terminal if terminal.is_terminal else plain_text
    with console.capture() as capture:
        # Not cropped: a path that is too long for the terminal is printed whole.
        console.print(tables(report), crop=False)
    lines = capture.get().splitlines()
    # rich fills lines with spaces.
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
    """Print notes on standard error, by the first rank alone; late, so that none is above an error of another cause."""
    for note in notes if is_first_rank() else ():
        click.echo(f"note: {printable(note)}", err=True)


def is_first_rank() -> bool:
    """Say whether this is a process of its own, or the first of several ranks (``RANK`` as torchrun sets it)."""
    return os.environ.get("RANK", "0") == "0"


def machine_named(
    name: str | None, output: str | None = None, default: str = catalog.DEFAULT_ENVIRONMENT
) -> ChosenMachine:
    """Find the machine: that of the output's name where none was named, or else the default."""
    in_name = catalog.environment_of_output(output)
    # A note, not an error: the option is explicit, and a file may have any name.
    is_other = name is not None and in_name not in (None, name)
    notes = (f"{output} is named for {in_name}, but the plan is for {name}",) if is_other else ()
    assumed = (f"no --environment given; using {default}",) if name is None and in_name is None else ()
    chosen = in_name or default if name is None else name
    return ChosenMachine(catalog.find_environment(chosen), notes, assumed)


def read_document(path: str) -> Document:
    """Read and parse a plan or spec, once; ``-`` is standard input. Raises ``InvalidDocument``.

    A folder stands for the newest observations of an engine's workers in it, as one.
    """
    # ``Path("")`` is a folder, the working directory.
    if path.strip() and Path(path).is_dir():
        from capture_planner.measuring.workers import read_workers

        return Document(path, node_of(codec.to_data(read_workers(path))))
    if path not in ("-", "/dev/stdin"):
        return Document.read(path)
    document = Document.parse(codec.read_stream(sys.stdin.buffer, "<stdin>"), "<stdin>")
    if document.node.value is None:
        raise InvalidDocument([Problem(file="<stdin>", message="standard input is empty, or was read before")])
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


def observation_of(document: Document, environment: str | None) -> Observation:
    """Return the observation in a document; raises ``click.UsageError`` where a machine is named, too."""
    observation = document.load(Observation)
    if environment is not None:
        raise click.UsageError(f"{document.name} is an observation of a machine; --environment goes with a spec.")
    return observation


def assumed() -> tuple[str, ...]:
    """Return what the answer of this command rests on, as far as plans were made for it; each sentence once."""
    return tuple(dict.fromkeys(click.get_current_context().meta.get(_ASSUMED, ())))


def plan_document(document: Document, machine: ChosenMachine, *, answers: bool = False) -> Plan:
    """Plan a spec; problems that planning finds have their place in the file too.

    :param answers: whether the command prints ``assumed`` first, so that a machine that was not named is no note.
    """
    # An engine's line is answered without them.
    from capture_planner.planning.planner import plan as make_plan
    from capture_planner.plugins import registry

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
        # Without data of its own, a spec takes the sizes that measurements of a near deployment would give.
        if measurements is None and spec.sizes.policy is Policy.DEFAULT:
            measurements = catalog.near_measurements(machine.environment, spec.model)
        return make_plan(spec, machine.environment, registry.load_backends(), measurements)
    except PlanningError as error:
        raise InvalidDocument(document.place(error.problems)) from None


@attrs.frozen
class Output:
    """Where the answer of a command goes: ``--format`` and ``--html``, as ``options.reports`` declares them."""

    form: str = "text"
    html: Path | None = None

    @property
    def is_json(self) -> bool:
        """Whether standard output is one JSON document, so that remarks go to standard error."""
        return self.form == "json"

    def show(
        self,
        data: Callable[[], Any],
        report: Callable[[], Report],
        assumptions: Sequence[str] | None = None,
        text: Callable[[], object] | None = None,
    ) -> None:
        """Print a value as JSON, or what people are shown of it; and write that as a page where one is named.

        :param assumptions: what an answer rests on: its first lines, and ``assumptions`` in JSON. None: a record, which
            has no such field.
        :param text: prints the answer in place of the report, in any format but JSON.
        """
        if self.is_json:
            first = {} if assumptions is None else {"assumptions": list(assumptions)}
            click.echo(to_json(first | plain(data()) if first else data()))
        elif text is not None:
            text()
        # A report may walk all admissible batches: it is made only where it is shown.
        if self.html is None and (self.is_json or text is not None):
            return
        shown = attrs.evolve(report(), assumptions=tuple(assumptions or ()))
        if not self.is_json and text is None:
            show_text(shown)
        if self.html is not None:
            from capture_planner.report.page import page

            self.write(self.html, lambda: page(shown))

    def write(self, file: Path | None, text: Callable[[], str]) -> None:
        """Write a file where one was named, and say so."""
        if file is not None:
            codec.write(file, text())
            self.note_written(file)

    def note_written(self, file: Path | None) -> None:
        """Say that a file was written, where one was named: on standard error next to what a program reads."""
        if file is not None:
            show_lines(f"written to {file}", err=self.form != "text")

    def refuse_batches(self) -> None:
        """Refuse ``--html`` for answers that are JSON lines."""
        if self.html is not None:
            raise click.UsageError("--html is for a report; the answers to a file of batches are JSON lines.")


def record_text(file: Path, value: Any) -> str:
    """Return a plan, spec, environment, traffic or profile as a file has it: JSON if it is named so, else YAML."""
    return to_json(value) + "\n" if file.suffix == ".json" else codec.dumps(value)


def to_json(value: Any) -> str:
    """Return the one JSON form of a value as text."""
    return dumps_json(plain(value))


def refuse_outputs() -> None:
    """Refuse files to write (``options.OutputFile``) that cannot be written, before any work is done.

    Nor may they overwrite each other, what the command reads, or a file of another kind.
    """
    context = click.get_current_context()
    values = [(each, context.params.get(each.name or "")) for each in context.command.params]
    taken = [
        (parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.human_readable_name, Path(word))
        for parameter, value in values
        if not isinstance(parameter, OutputFile)
        for word in _file_names(value)
    ]
    sources = [path for _, path in taken]
    # A folder that the command makes itself, with its files.
    made = [value.absolute() for each, value in values if value is not None and each.metavar == "FOLDER"]
    for option, file in values:
        if not isinstance(option, OutputFile) or file is None:
            continue
        # Nothing of it is there yet that could be overwritten, or that could refuse a file.
        if file.absolute().parent in made and not file.absolute().parent.exists():
            continue
        name = option.opts[-1]
        try:
            if not file.absolute().parent.is_dir():
                raise click.UsageError(f"{name} {file}: no such folder.")
            if file.is_dir():
                raise click.UsageError(f"{name} {file} is a folder; name a file.")
            if option.kind is not None:
                _refuse_to_replace(file, option.kind, sources)
            # First whether it can be written: a link in a circle has no other name to compare.
            _try_to_write(file)
            same = [other for other, path in taken if path.resolve() == file.resolve()]
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise click.UsageError(f"{name} {file} cannot be written: {reason}.") from None
        if same:
            raise click.UsageError(f"{name} {file} is also the file of {same[0]}; name another.")
        taken.append((name, file))


def _file_names(value: Any) -> Iterator[str]:
    """Yield the words in the value of a parameter that name a file which exists."""
    for each in value if isinstance(value, tuple) else (value,):
        # An open file has its name; @FILE is how --case names one.
        word = str(getattr(each, "name", each)).removeprefix("@")
        try:
            if (isinstance(each, str | Path) or hasattr(each, "read")) and Path(word).is_file():
                yield word
        # No name that a file can have.
        except (OSError, ValueError):
            continue


class OutputFile(click.Option):
    """An option that names a file to write; ``refuse_outputs`` looks at all of a command."""

    def __init__(self, *args: Any, kind: type[Plan] | type[Environment] | None = None, **settings: Any) -> None:
        super().__init__(*args, **{"type": click.Path(path_type=Path), "metavar": "FILE", **settings})
        self.kind = kind
        """What a file that is there must be to be replaced: a typing error must not overwrite a spec."""


def make_folder(name: str, folder: Path | None) -> None:
    """Make the folder of an option, or refuse one that cannot be written, before any work is done."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            # A folder that exists may refuse files.
            _try_to_write(folder / "file")
    except FileExistsError:
        raise click.UsageError(f"{name} {folder} is a file; name a folder.") from None
    except OSError as error:
        raise click.UsageError(f"{name} {folder} cannot be written: {error.strerror or error}.") from None


def _refuse_to_replace(file: Path, kind: type[Plan] | type[Environment], sources: Iterable[Path]) -> None:
    """Keep an output from replacing a file that is not of its kind; ``sources``: the files that are read."""
    # An empty file has nothing to lose: mktemp leaves one.
    if not file.is_file() or file.stat().st_size == 0:
        return
    try:
        document = Document.read(str(file))
        replaceable = document.is_plan if kind is Plan else bool(document.load(kind))
    except InvalidDocument:
        replaceable = False
    if not replaceable:
        is_source = any(file.samefile(source) for source in sources)
        called = "a plan" if kind is Plan else "an environment"
        subject = "the spec itself" if is_source else f"a file that is not {called}"
        raise CapturePlannerError(f"--output {file} is {subject}; name another file, or remove it first")


def _try_to_write(target: Path) -> None:
    """Raise ``OSError`` where ``codec.write`` would not get its file into place; leave nothing behind."""
    if not codec.is_in_place(target):
        file = codec.replaceable(target)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".capture-planner."):
            return
    # It is not opened: that would wait for the reader of a pipe.
    if not os.access(target, os.W_OK):
        raise PermissionError(None, "Permission denied")


def machine_plan(document: Document, environment: str | None, here: Callable[[], Environment | None]) -> Plan:
    """Return the plan of a document; a spec is planned for this very machine, unless another is named.

    :param here: describes this machine; None: it has no GPU, and a spec is planned for the processor.
    """
    machine = None if environment is not None or document.is_plan else here()
    if machine is None:
        return plan_of(document, environment, default="cpu")
    return plan_document(document, ChosenMachine(machine, ("no --environment given; using this machine",)))


def command_line() -> str:
    """Return the command line for a record, which is shared: absolute paths without their folders."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["capture-planner", *words])


def progress_bars(visible: bool | None) -> Any:
    """Return progress bars on standard error, of the first rank alone: on a terminal, unless ``visible`` decides."""
    from rich.console import Console
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
            # The ``-e`` of a container sets a variable: ``_environment_named`` tells the two apart.
            if name != "-e"
        }
        own, rest = split_words(list(_environment_named(args)), takes_value)
        # Behind ``--`` click takes every word as an argument.
        return super().parse_args(ctx, [*own, "--", *rest])


def _environment_named(args: Sequence[str]) -> Iterator[str]:
    """Yield the words with our ``-e`` written out: one that sets no variable, and is not a container's."""
    contained = False
    # The = leaves an ``-e`` that is the last word as it is.
    for word, value in zip(args, (*args[1:], "="), strict=True):
        # The ``-e`` of these programs sets a variable, also without a value.
        contained = contained or word in ("docker", "podman", "nerdctl")
        yield "--environment" if word == "-e" and "=" not in value and not contained else word


def split_words(args: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Split words into our options, with values, and all others; raises ``click.UsageError`` for a missing value."""
    own: list[str] = []
    rest: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, _ = word.partition("=")
        if word == "--":
            # Behind it every word is the engine's, ours by name too.
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
