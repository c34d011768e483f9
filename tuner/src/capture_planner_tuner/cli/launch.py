"""``launch``: run an engine's own command under a plan, or with --auto under the best one known; and ``journal``."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from shutil import which

import click
from click.core import ParameterSource

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import Output, make_folder, read_document, show_notes
from capture_planner.cli.options import FILE, FiniteRange, flag, option
from capture_planner.engines import engines
from capture_planner.engines.command_line import script_command, started
from capture_planner.engines.launch import OBSERVE, PLAN, PROFILE, STARTED, STRICT
from capture_planner.engines.shell import split_variables, unset
from capture_planner.records._base import digest
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Spec
from capture_planner.report.printable import printable
from capture_planner_tuner.auto.decisions import StartDecision, TuneProposal, graphs_of
from capture_planner_tuner.auto.start import AutoLaunch, EngineStart, JournalFolder, held
from capture_planner_tuner.child import run_marked
from capture_planner_tuner.report.start import journal_report, start_lines

TUNE_SECONDS = 30.0
"""Most seconds that tuning may take before a start."""


def prepared_launch(
    path: Path, command: Sequence[str], *, dry_run: bool, seconds: float = TUNE_SECONDS
) -> tuple[EngineStart, int | None]:
    """Run an engine's command under the best plan that a folder has for it; return what ran, and its exit code.

    :param path: the folder; it is made where it does not exist.
    :param command: variables in front, program and arguments.
    :param dry_run: whether nothing is run or written; the exit code is None.
    :param seconds: most time that tuning may take before the start.
    :raises EngineError: the program cannot be started.
    """
    folder = JournalFolder(path.absolute())
    variables, words = split_variables(command)
    with nullcontext(False) if dry_run else held(path, _say) as writes:
        auto = AutoLaunch(
            folder=folder,
            variables=variables,
            words=words,
            writes=writes,
            tune=lambda run: tuned(folder, run, seconds),
            say=_say,
            announce=_announce,
        )
        prepared = auto.prepare()
        return prepared, None if dry_run else auto.run(prepared)


def tuned(folder: JournalFolder, number: int, seconds: float) -> TuneProposal | None:
    """Tune on the observation of a run, in a process of its own; a plan that is proposed is kept in the folder.

    :param seconds: most time that it may take; None is returned where it takes longer.
    """
    # In the folder, which is known to be writable; what a killed process leaves goes with it.
    with tempfile.TemporaryDirectory(dir=folder.path, prefix=".tuning.", ignore_cleanup_errors=True) as temporary:
        output = Path(temporary) / "tuned"
        words = ("tune", str(folder.run(number)), "-o", str(output), "--format", "json")
        try:
            # A process of its own can be stopped in time, and no error or memory of it reaches the engine.
            done = subprocess.run(
                [sys.executable, "-m", "capture_planner", *words],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        # 2: too little data, which is an answer too.
        if done.returncode not in (0, 2):
            error = next((line for line in done.stderr.splitlines() if "error" in line.lower()), "it says no reason")
            return TuneProposal(reason=f"nothing could be tuned: {error.removeprefix('error: ')}")
        answer = json.loads(done.stdout)
        if answer["verdict"] != "change" or not (output / "plan.yaml").exists():
            return TuneProposal(reason=answer["reason"])
        plan = codec.load_plan(output / "plan.yaml")
    # Only now: the folder of the tuning is gone, and the engine reads the plan by its digest.
    folder.keep(plan)
    return TuneProposal(
        reason=answer["reason"], plan=digest(plan), graphs=graphs_of(plan), promised=plan.promise is not None
    )


def _announce(decision: StartDecision, plan: Plan | None, observed_into: Path | None) -> None:
    for line in start_lines(decision, plan, observed_into):
        _say(line)


def _say(text: str) -> None:
    """Print a line on standard error, where an engine's log goes."""
    click.echo(f"auto: {printable(text)}", err=True)


@click.command()
@click.argument("folder", type=FILE)
@options.reports()
def journal(folder: Path, to: Output) -> None:
    """Show the journal of a FOLDER of launch --auto: each start, what it ran and why, and how it ended."""
    if not folder.is_dir():
        raise click.UsageError(f"{folder}: no such folder; name the one of launch --auto.")
    contents = JournalFolder(folder).read(live=True)
    if not any((folder / name).exists() for name in ("journal.jsonl", "runs")):
        raise click.UsageError(f"{folder} has no journal; name the folder of launch --auto.")
    show_notes(contents.problems)
    records = [codec.to_data(each) for each in contents.journal]
    to.show(lambda: {"records": records}, lambda: journal_report(contents.journal))


@click.command()
@click.argument("plan_file", metavar="PLAN", required=False)
@click.option("--observe", type=FILE, metavar="FOLDER", help="Write what ran into this folder, a file per worker.")
@flag("--profile", "Time each graph after capture; needs --observe.")
@flag("--strict", "Fail at start-up if the engine cannot follow the plan, instead of logging it.")
@click.option(
    "--auto",
    "auto_folder",
    type=FILE,
    metavar="FOLDER",
    help="Instead of PLAN: observe into this folder, tune on what was observed, and run the best plan that is known.",
)
@option(
    "--tune-seconds",
    type=FiniteRange(min=0),
    default=30.0,
    help="With --auto: most time that tuning takes before a start; after it, the plan that is known runs.",
)
@flag("--dry-run", "Print the environment and the command line, and run nothing.")
@click.argument("command", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
def launch(
    plan_file: str | None,
    observe: Path | None,
    profile: bool,
    strict: bool,
    auto_folder: Path | None,
    tune_seconds: float,
    dry_run: bool,
    command: tuple[str, ...],
) -> None:
    """Run an engine's own command under a plan: launch PLAN -- vllm serve MODEL.

    Adds the flags that the plan needs and the variables of the plugin inside the engine, prints the
    environment and the command line, one per line, and runs the command: as a child that takes its signals,
    and whose exit code it returns. If that ends before it has captured, it says how to start without the plan.
    Flags of the command that contradict the plan are errors. A Python script gets the environment only; its
    flags are notes. With --observe FOLDER and no PLAN, the engine runs by itself and is observed.

    With --auto FOLDER there is no PLAN: launch --auto FOLDER -- vllm serve MODEL. The first start observes and
    profiles. Each later one tunes on what was observed, runs the best plan that is known, and checks what it promised.
    """
    if auto_folder is not None:
        others = {"--observe": observe, "--profile": profile, "--strict": strict}
        # With no PLAN in front, click takes the first word of the command for it.
        words = _auto_words(auto_folder, (plan_file, *command), others)
        prepared, code = prepared_launch(auto_folder, words, dry_run=dry_run, seconds=tune_seconds)
        if code is None:
            _show(prepared.variables, prepared.words)
        click.get_current_context().exit(code or 0)
    if click.get_current_context().get_parameter_source("tune_seconds") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--tune-seconds goes with --auto, which alone tunes before a start.")
    if plan_file is None or _is_program(plan_file, command):
        if observe is None:
            raise click.UsageError(f"PLAN is missing: {_EXAMPLE}")
        command, plan_file = (*filter(None, [plan_file]), *command), None
    if not command:
        raise click.UsageError(f"the engine's command is missing: {_EXAMPLE}")
    # click takes the next option as the value where the folder is forgotten.
    if observe is not None and str(observe).startswith("-"):
        raise click.UsageError(f"--observe needs a FOLDER, got {observe}.")
    plan = None if plan_file is None else _plan_of(plan_file)
    if profile and observe is None:
        raise click.UsageError("--profile writes its times into the observation; give --observe FOLDER too.")
    command, said = _of_script(command)
    variables, own = split_variables(command)
    # What is exported reaches the engine, too.
    exported = {name: os.environ[name] for name in (OBSERVE, PROFILE, STRICT) if os.environ.get(name)}
    # Variables in front of the command win over exported ones, and this command's options over both.
    variables = {**exported, **variables}
    variables |= {PLAN: str(Path(plan_file).absolute())} if plan_file is not None else {}
    variables |= {OBSERVE: str(observe.absolute())} if observe is not None else {}
    variables |= {name: "1" for name, wanted in ((PROFILE, profile), (STRICT, strict)) if wanted}
    words, notes = _completed(plan, own)
    show_notes((*said, *notes))
    if not dry_run and variables.get(OBSERVE):
        # Hours of serving must not end without what was observed.
        make_folder(OBSERVE if observe is None else "--observe", Path(variables[OBSERVE]))
    _show(variables, words)
    if not dry_run:
        applied = None if plan is None else f"{plan_file} ({digest(plan)[:15]})"
        click.get_current_context().exit(_run(words, variables, applied, command))


def _plan_of(file: str) -> Plan:
    """Return the plan in a file; raises ``click.UsageError`` for what the engine could not read as one."""
    if file == "-" or file.startswith("/dev/") or Path(file).is_fifo():
        raise click.UsageError(f"{file} is read once, and the engine reads the plan itself; name its file.")
    document = read_document(file)
    if document.kind is Spec:
        raise click.UsageError(f"{file} is a spec; write its plan first: capture-planner plan {file} -o PLAN")
    return document.load(Plan)


def _show(variables: Mapping[str, str], words: Sequence[str]) -> None:
    """Print the environment and the command line, one per line."""
    for name, value in variables.items():
        click.echo(f"{name}={quoted(value)}")
    click.echo(" ".join(map(quoted, words)))


def quoted(word: str) -> str:
    """Quote a word for a shell, as bash reads it; no control character of it reaches a terminal."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = (
        chr(byte) if 32 < byte < 127 and chr(byte) not in "\\'" else f"\\x{byte:02x}"
        for byte in word.encode("utf-8", "surrogateescape")
    )
    return f"$'{''.join(escaped)}'"


_EXAMPLE = "capture-planner launch PLAN -- vllm serve MODEL"


def _auto_words(folder: Path, command: Sequence[str | None], others: Mapping[str, object]) -> list[str]:
    """Return the engine's command behind --auto; raises ``click.UsageError`` for options that do not go with it."""
    words = [word for word in command if word is not None]
    if str(folder).startswith("-"):
        raise click.UsageError(f"--auto needs a FOLDER, got {folder}.")
    if not split_variables(words)[1]:
        example = _EXAMPLE.replace("PLAN", "--auto FOLDER")
        raise click.UsageError(f"the engine's command is missing: {example}")
    given = next((name for name, value in others.items() if value), None)
    if given is not None:
        reason = (
            "which starts the engine in any case" if given == "--strict" else "which observes and profiles by itself"
        )
        raise click.UsageError(f"{given} goes without --auto, {reason}.")
    program = split_variables(words)[1][0]
    if which(program) is None and (Path(program).is_file() or program.endswith((".yaml", ".yml", ".json"))):
        raise click.UsageError(f"{program} is no command; --auto takes no PLAN, as it chooses the plan by itself.")
    return words


def _is_program(word: str, rest: Sequence[str]) -> bool:
    """Whether a word that should name a plan begins a command instead."""
    every = [item.value for item in engines().values()]
    runs = which(word) is not None
    if started([word, *rest], every) is not None or (runs and Path(word).name.startswith("python")):
        return True
    # Else a file wins: a plan may be named like a program.
    return not Path(word).exists() and (runs or bool(split_variables([word])[0]))


def _of_script(command: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the server's command in a shell script, with the variables that the script exports; else the command.

    Also returns notes. Raises ``click.UsageError`` for a variable that only a shell could expand.
    """
    own = split_variables(command)[1]
    found = script_command(own, [item.value for item in engines().values()])
    if found is None:
        return command, ()
    engine, line = found
    words = [*(f"{name}={value}" for name, value in line.variables.items()), *engine.programs[0].split(), *line.words]
    names = unset(words)
    if names or any("$(" in word or "`" in word for word in words):
        what = f"the variable {names[0]}" if names else "a substitution"
        raise click.UsageError(f"{shlex.join(own)} has {what}, which a shell expands; write its value there.")
    note = f"of {shlex.join(own)} only the line of {engine.name} is run: {shlex.join(words)}"
    return (*command[: len(command) - len(own)], *words), (note, *line.assumptions)


def _completed(plan: Plan | None, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the whole command, and notes; without a plan nothing is added."""
    every = [item.value for item in engines().values()]
    able = [engine for engine in every if engine.launch is not None]
    found = started(command, every)
    if found is not None:
        engine, count = found
        if engine.launch is None:
            names = ", ".join(engine.name for engine in able) or "no installed engines"
            raise click.UsageError(f"{engine.name} has no plugin that runs a plan or observes; {names} have one.")
        if plan is None:
            return list(command), []
        if "--" in command[count:]:
            raise click.UsageError(f"{shlex.join(command)}: words after -- are no flags, and the plan's go last.")
        added = engine.launch(plan, command[count:])
        return [*command, *added.arguments], list(added.notes)
    python = any(Path(word).name.startswith("python") for word in command)  # a shell has -c, too
    if not any(word.endswith(".py") or word == "-m" or (python and word == "-c") for word in command):
        programs = ", ".join(program for engine in able for program in engine.programs if " " in program)
        raise click.UsageError(f"{shlex.join(command)}: expected one of {programs}, or a Python script.")
    notes = []
    for engine in able if plan is not None else ():
        assert engine.launch is not None
        added = engine.launch(plan, [])
        notes += [f"a script that runs {engine.name} must set: {shlex.join(added.arguments)}", *added.notes]
    return list(command), notes


def _run(words: Sequence[str], variables: Mapping[str, str], applied: str | None, command: Sequence[str]) -> int:
    """Run the engine and return its exit code; where it failed before it had captured, say how to start it otherwise.

    :param applied: the plan, in words; None: it runs by itself.
    :param command: the command by itself.
    :raises EngineError: the program is not there.
    """
    # A plan that is exported is not the one of this launch, and the mark of another would be made by this engine.
    inherited = {name: value for name, value in os.environ.items() if name not in (PLAN, STARTED)}
    ended = run_marked(words, {**inherited, **variables})
    if ended.code and not ended.interrupted and not ended.captured:
        _explain(ended.code, words[0], applied, command)
    return ended.code


def _explain(code: int, program: str, applied: str | None, command: Sequence[str]) -> None:
    """Say under what an engine ran that ended early, and how to start it without."""
    ran, without = ("observed", "unobserved") if applied is None else (f"under the plan {applied}", "without the plan")
    click.echo(printable(f"{program} ended with exit code {code} before it had captured its graphs."), err=True)
    click.echo(printable(f"It ran {ran}. If it starts {without}, please report both logs."), err=True)
    given, own = split_variables(command)
    variables = (f"{name}={quoted(value)}" for name, value in given.items())
    click.echo(f"To start it {without}: {' '.join([*variables, *map(quoted, own)])}", err=True)
