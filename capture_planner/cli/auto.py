"""``launch --auto``: the lines that it prints, the ``tune`` that it runs, around ``engines.auto``; and ``journal``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import click

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import Output, show_notes
from capture_planner.cli.options import FILE
from capture_planner.engines.auto.decisions import StartDecision, TuneProposal, graphs_of
from capture_planner.engines.auto.folder import JournalFolder, held
from capture_planner.engines.auto.start import AutoLaunch, EngineStart
from capture_planner.engines.shell import split_variables
from capture_planner.records._base import digest
from capture_planner.records.plan import Plan
from capture_planner.report.engine import journal_report, start_lines
from capture_planner.report.printable import printable

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
                [sys.executable, "-m", "capture_planner.cli", *words],
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
    show_notes(contents.problems)
    records = [codec.to_data(each) for each in contents.journal]
    to.show(lambda: {"records": records}, lambda: journal_report(contents.journal))
