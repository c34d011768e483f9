"""``launch``: run an engine's own command under a plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which

import click

from capture_planner.cli.common import read_document, show_notes
from capture_planner.cli.options import FILE, flag
from capture_planner.engines import engines
from capture_planner.engines.engine import Engine
from capture_planner.engines.launch import OBSERVE, PLAN, PROFILE, STRICT, leading_variables, started
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Spec


@click.command(short_help="Run an engine's own command under a plan.")
@click.argument("plan_file", metavar="PLAN", required=False)
@click.option("--observe", type=FILE, metavar="FOLDER", help="Write what ran into this folder, a file per worker.")
@flag("--profile", "Time each graph after capture; needs --observe.")
@flag("--strict", "Fail at start-up if the engine cannot follow the plan, instead of logging it.")
@flag("--dry-run", "Print the environment and the command line, and run nothing.")
@click.argument("command", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
def launch(
    plan_file: str | None, observe: Path | None, profile: bool, strict: bool, dry_run: bool, command: tuple[str, ...]
) -> None:
    """Run an engine's own command under a plan: launch PLAN -- vllm serve MODEL.

    Adds the flags that the plan needs and the variables of the plugin inside the engine, prints the
    environment and the command line, one per line, and runs the command. Flags of the command that
    contradict the plan are errors. A Python script gets the environment only; its flags are notes.
    """
    if plan_file is None or _is_program(plan_file, command):
        raise click.UsageError(f"PLAN is missing: {_EXAMPLE}")
    if not command:
        raise click.UsageError(f"the engine's command is missing: {_EXAMPLE}")
    if observe is not None and str(observe).startswith("-"):
        raise click.UsageError(f"--observe needs a FOLDER, got {observe}.")
    document = read_document(plan_file)
    if document.kind is Spec:
        raise click.UsageError(f"{plan_file} is a spec; write its plan first: capture-planner plan {plan_file} -o PLAN")
    plan = document.load(Plan)
    if profile and observe is None:
        raise click.UsageError("--profile writes its times into the observation; give --observe FOLDER too.")
    count = leading_variables(command)
    variables = dict(word.split("=", 1) for word in command[:count])
    variables |= {PLAN: str(Path(plan_file).absolute())}
    variables |= {OBSERVE: str(observe.absolute())} if observe is not None else {}
    variables |= {name: "1" for name, wanted in ((PROFILE, profile), (STRICT, strict)) if wanted}
    words, notes = _completed(plan, command[count:])
    show_notes(notes)
    for name, value in variables.items():
        click.echo(f"{name}={shlex.quote(value)}")
    click.echo(shlex.join(words))
    if not dry_run:
        _replace_process(words, variables)


_EXAMPLE = "capture-planner launch PLAN -- vllm serve MODEL"


def _is_program(word: str, rest: Sequence[str]) -> bool:
    """Whether a word that should name a plan begins a command instead."""
    if Path(word).exists():
        return False
    every = [item.value for item in engines().values()]
    return bool(leading_variables([word])) or started([word, *rest], every) is not None or which(word) is not None


def _completed(plan: Plan, command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the whole command, and notes."""
    able = [item.value for item in engines().values() if item.value.launch is not None]
    found = started(command, able)
    if found is not None:
        engine, count = found
        added = engine.launch(plan, command[count:])
        return [*command, *added.arguments], list(added.notes)
    other = started(command, [item.value for item in engines().values()])
    if other is not None:
        raise click.UsageError(f"{other[0].name} has no plugin that runs a plan; {_names(able)} have one.")
    if not any(word.endswith(".py") or word in ("-m", "-c") for word in command):
        programs = ", ".join(program for engine in able for program in engine.programs if " " in program)
        raise click.UsageError(f"{shlex.join(command)}: expected one of {programs}, or a Python script.")
    return list(command), [note for engine in able for note in _notes(engine, plan)]


def _notes(engine: Engine, plan: Plan) -> list[str]:
    """Return the settings that a script must give itself, where it runs that engine."""
    assert engine.launch is not None
    added = engine.launch(plan, [])
    return [f"a script that runs {engine.name} must set: {shlex.join(added.arguments)}", *added.notes]


def _names(able: Sequence[Engine]) -> str:
    return ", ".join(engine.name for engine in able) or "no installed engines"


def _replace_process(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Become the engine's process; raises ``click.ClickException`` where its program is not there."""
    try:
        os.execvpe(words[0], list(words), {**os.environ, **variables})
    except OSError as error:
        raise click.ClickException(f"{words[0]}: {error.strerror or error}; activate its environment first.") from None
