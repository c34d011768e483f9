"""``tune``: sizes by measurements, next to what runs today."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import (
    FINDINGS,
    ChosenMachine,
    Output,
    OwnOptions,
    machine_named,
    plan_document,
    progress_bars,
    read_document,
)
from capture_planner.cli.options import FILE, POSITIVE, SIZE, FiniteRange, ParsedText
from capture_planner.cli.traffic import load_options, reading_bar, source_options
from capture_planner.codec import shipped as catalog
from capture_planner.engines import engines, find_engine, is_engine
from capture_planner.engines.command_line import started
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.shell import split_variables
from capture_planner.engines.spec_of import DerivedSpec
from capture_planner.records.observation import Observation
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Policy, Sizes, Spec
from capture_planner_tuner.report.tune import tune_report
from capture_planner_tuner.tuning.judgement import TuneVerdict
from capture_planner_tuner.tuning.session import (
    FILES,
    LAUNCH_FILE,
    PLAN_FILE,
    TuneOptions,
    TuneResult,
    TuneSubject,
    engine_subject,
    observed_subject,
    tuned,
)

TABLES = 14
"""About how many tables are planned and judged."""


def _command_words(word: str) -> list[str]:
    """Return the words of a command line that is one argument, such as ``"vllm serve MODEL"``; else the word itself."""
    try:
        words = shlex.split(word) if len(word.split()) > 1 else []
    except ValueError:  # Text with a quote in it, as of a flag.
        return [word]
    if words and is_engine(words[0]):
        return words
    # A quoted line may begin with the program, as people paste it; its engine is then named in front.
    program = started(split_variables(words)[1], map(find_engine, engines()))
    return [word] if program is None else [program[0].name, *words]


def subject_of(words: Sequence[str], environment: str | None, profile: Profile | None) -> TuneSubject:
    """Return the deployment that the words of the command name.

    :param profile: names the machine where ``environment`` does not.
    """
    if not words:
        raise click.UsageError("Missing argument 'ENGINE FLAGS... | SPEC | OBSERVATION'.")
    if is_engine(words[0]):
        machine = _machine(environment, profile)
        return engine_subject(words[0], words[1:], machine.environment, machine.assumptions)
    if len(words) > 1:
        raise click.UsageError(
            f"{shlex.join(words)}: expected one SPEC or OBSERVATION, or the command line of an engine, which starts "
            f"with one of {', '.join(engines())}."
        )
    document = read_document(words[0])
    if document.is_observation:
        named = None if environment is None else catalog.find_environment(environment)
        return observed_subject(document.load(Observation), "-" if words[0] == "/dev/stdin" else words[0], named)
    # A plan has its sizes already; the spec and the observation say what else could be chosen.
    if document.is_plan:
        raise click.UsageError(f"{words[0]} is a plan; tune its spec, or an observation of the engine that runs it.")
    spec, measured = document.load(Spec), codec.load_measurements(document)
    own = None if measured is None else measured.profile
    machine = _machine(environment, profile or own)
    plan = plan_document(document, ChosenMachine(machine.environment))
    return TuneSubject(
        name=words[0],
        today=emulation_of(plan),
        environment=machine.environment,
        derived=DerivedSpec(spec=spec),
        notes=machine.assumptions,
        file=words[0],
        profile=own,
    )


def _machine(name: str | None, profile: Profile | None) -> ChosenMachine:
    """Return the machine that is named, or else the one that the profile is of."""
    # Costs of a device are for a machine with that device.
    own = None if name is not None or profile is None else catalog.environment_of_device(profile.device.name)
    return machine_named(name) if own is None else ChosenMachine(own)


class TuneCommand(OwnOptions):
    """A command about a file, or about the command line of an engine."""

    def takes_foreign_words(self, args: Sequence[str]) -> bool:
        return any(is_engine(word) for word in args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = [word for each in args for word in _command_words(each)]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            # With an engine in front every unknown option is the engine's; a missing one is ours.
            if self.takes_foreign_words(args):
                raise
            hint = f"For an engine's command line, name it first: one of {', '.join(engines())}."
            raise click.UsageError(f"{error.format_message()} {hint}", ctx) from None


def _objective(text: str) -> str:
    Sizes(policy=Policy.MEASURED, objective=text)
    return text


@click.command(cls=TuneCommand)
@click.argument("words", metavar="ENGINE FLAGS... | SPEC | OBSERVATION", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--traffic",
    "sources",
    metavar="FILE",
    multiple=True,
    help="A traffic file, or any source that traffic reads; may be repeated. Default: the batches of OBSERVATION.",
)
@click.option(
    "--profile",
    "profile_file",
    metavar="FILE",
    help="Profile with costs. Default: of OBSERVATION or SPEC, else the nearest shipped one.",
)
@click.option("--max-graphs", type=POSITIVE, help="Most graphs.")
@click.option("--memory", type=SIZE, help="Most memory for graphs, such as 1GiB.")
@click.option("--seconds", type=FiniteRange(min=0, min_open=True), help="Most time to capture.")
@click.option(
    "--objective",
    type=ParsedText("token|mean|pNN|regret", _objective),
    metavar="token|mean|pNN|regret",
    help="Objective to minimize: the time between two outputs of a request, the mean step, a percentile such as p99, "
    "or the worst step against a graph of its size. Default: the spec's, or token.",
)
@load_options
@click.option("-o", "--output", type=FILE, metavar="FOLDER", help="Write spec, plan and launch line into this folder.")
@options.progress
@options.environment
@options.download
@options.reports()
def tune(words: tuple[str, ...], output: Path | None, to: Output, **values: Any) -> None:
    """Choose capture sizes by traffic and a profile, and compare them with what is captured today.

    Today is what an engine captures by itself with these flags, what it captured where it was observed, or the plan
    of SPEC as it is written. Proposed is the fastest measured table within the bounds, each graph at the price of 0.1%
    of a step, of which check does not warn, and with which no decode loses a full graph. Without bounds, it takes what
    today's graphs take, or up to 5% of the device's memory where that saves more than 2% of a step. Sizes are chosen by
    the first two thirds of the traffic, and both sides are judged on the last third.

    Of an observation with costs (CAPTURE_PLANNER_PROFILE=1), those are taken, and the figures can be promised. By
    any other profile than one of this deployment the answer is an estimate, and no batch loses its graph.

    The verdict is change, keep, over_budget or too_little_data. The last two have exit code 2. Only a change is
    written to FOLDER.
    """
    inside = to.html is not None and output is not None and to.html.absolute().parent == output.absolute()
    _refuse_folder(output, to.html if inside else None)
    name, sources = values["profile_file"], values["sources"]
    given = None if name is None else codec.load_profile(name)
    subject = subject_of(words, values["environment"], given)
    if not sources and subject.observation is None:
        raise click.UsageError("Missing option '--traffic'.")
    asked = TuneOptions(
        sources=tuple(sources),
        profile=given,
        profile_name=name,
        graphs=values["max_graphs"],
        memory=values["memory"],
        seconds=values["seconds"],
        objective=values["objective"],
        reads=source_options(values),
        churn=to.is_json,
    )
    # How many tables there will be is not known before.
    with progress_bars(values["progress"])("tables", TABLES) as advance:
        found = tuned(
            subject,
            asked,
            reading=lambda files, times: reading_bar(files, values["progress"], times=times),
            progress=advance,
        )
    if output is None and found.plan is not None:
        found = attrs.evolve(found, notes=(*found.notes, "nothing is written: give -o FOLDER for the plan"))
    line = None if output is None else found.launch(str(output / PLAN_FILE))
    if line is not None:
        commands = () if line.command is None else (line.command,)
        found = attrs.evolve(found, commands=commands, notes=(*found.notes, *line.notes))
    # The page goes into the folder; and a reader of the report may be gone before its end, as head is.
    written = None if output is None else _write(output, found)
    if output is not None and inside:
        output.mkdir(exist_ok=True)
    to.show(lambda: found, lambda: tune_report(found))
    if written is not None:
        # With --format json, standard output is the document and nothing else.
        click.echo(written, err=to.is_json)
    if found.tuning.verdict in (TuneVerdict.OVER_BUDGET, TuneVerdict.TOO_LITTLE_DATA):
        click.get_current_context().exit(FINDINGS)


def _refuse_folder(output: Path | None, page: Path | None) -> None:
    """Refuse a folder that cannot be written; ``page``: a file of ours in it."""
    own = () if page is None else (page.name,)
    if page is not None and page.name in FILES:
        raise click.UsageError(f"--html {page} is also a file of --output; name another.")
    problem = None if output is None else _folder_conflict(output, (*FILES, *own))
    if problem is not None:
        raise click.UsageError(f"--output {problem}.")


def _folder_conflict(folder: Path, files: Sequence[str]) -> str | None:
    """Return why files cannot be written into a folder without harm to others in it; None where they can.

    :param files: the names that it may have.
    """
    try:
        # Made and removed again: the only sure way to learn that it can be made, before minutes of work.
        if not folder.exists():
            folder.mkdir()
            folder.rmdir()
            return None
    # The error's own text would not say that the folder above is what is missing.
    except FileNotFoundError:
        return f"{folder}: no such folder to make it in"
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    if not folder.is_dir():
        return f"{folder} is a file; name a folder"
    others = sorted(each.name for each in folder.iterdir() if each.name not in files)
    return f"{folder} has other files, such as {others[0]}; name a new folder" if others else None


def _write(folder: Path, found: TuneResult) -> str:
    """Write what reproduces the plan, and the command that uses it; return what was written, in a sentence."""
    texts = found.texts()
    if not texts:
        return f"nothing is written to {folder}: no change is proposed"
    script = found.script()
    if script is not None:
        texts[LAUNCH_FILE] = script
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        codec.write(folder / name, text)
    return f"written to {folder}: {', '.join(texts)}"
