"""The command ``check``: what to fix in an engine's flags; files are for ``check_files``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

import click

import capture_planner
from capture_planner.analysis.lint import RULES, Severity
from capture_planner.cli import options
from capture_planner.cli.common import (
    FINDINGS,
    Output,
    OwnOptions,
    assumed,
    machine_named,
    show_lines,
    show_notes,
    to_json,
)
from capture_planner.cli.components import EngineName, refuse_several, show_each
from capture_planner.cli.options import POSITIVE, ParsedText, flag
from capture_planner.engines import Component, components, emulate, find_engine
from capture_planner.engines.check import ENGINE_RULES, OBSERVED_RULES, ChangeTrials, fixed_together
from capture_planner.engines.check import check as check_flags
from capture_planner.engines.load import EngineLoad, load_text, ranked, reached_graphs
from capture_planner.report.engine import findings_report
from capture_planner.report.findings import Drift, FileFinding, as_github, as_sarif, check_report


class FileOrEngineCommand(OwnOptions):
    """A command about files, or with ``--engine`` about the flags of an engine."""

    def takes_foreign_words(self, args: Sequence[str]) -> bool:
        # Without an engine no word is foreign, and click reports those that it does not know.
        return any(word.partition("=")[0] == "--engine" for word in args)


def _codes(text: str) -> tuple[str, ...]:
    codes = tuple(code.strip().upper() for code in text.split(","))
    rules = {**RULES, **ENGINE_RULES, **OBSERVED_RULES}
    for code in codes:
        if code not in rules:
            near = difflib.get_close_matches(code, rules, n=1)
            raise ValueError(f"no rule is called {code}" + (f"; did you mean {near[0]}?" if near else "."))
        if rules[code].severity is Severity.ERROR:
            raise ValueError(f"{code} ({rules[code].name}) is an error, and errors are not ignored.")
    return codes


IGNORED = ParsedText("CODE,...", _codes)
"""Codes of notes and warnings, separated by commas."""


def _load(sources: Sequence[str], concurrency: int | None) -> EngineLoad | None:
    """Return the load that findings are ranked by, if one is given."""
    if sources and concurrency is not None:
        raise click.UsageError("--traffic and --concurrency exclude each other.")
    if not sources:
        return None if concurrency is None else EngineLoad.at(concurrency)
    from capture_planner.engines.logs import read_traffic

    found, unreadable = read_traffic(sources)
    show_notes(f"skipped: {line}" for line in unreadable)
    return EngineLoad.of_traffic(found)


@click.command(cls=FileOrEngineCommand)
@click.argument("files", metavar="PLAN|SPEC|OBSERVATION...", nargs=-1, type=click.UNPROCESSED)
@click.option("--engine", type=EngineName(), help="Check this engine's flags instead of files.")
@click.option(
    "--spec",
    metavar="SPEC|FOLDER",
    multiple=True,
    help="Also report every difference from the plan of this spec: one for all plans, one for each in their order, "
    "or a folder with NAME.yaml for each NAME.MACHINE.yaml.",
)
@click.option(
    "--ignore", type=IGNORED, multiple=True, help="Leave out notes and warnings by code: CP012, or CP012,CP021."
)
@click.option("--observation", metavar="FILE", help="Also report where an engine did not follow each plan.")
@flag("--strict", "Count notes as findings.")
@click.option(
    "--traffic",
    "loads",
    metavar="SOURCE",
    multiple=True,
    help="With --engine: rank findings by the steps of this traffic, or of any source that traffic reads.",
)
@click.option(
    "--concurrency",
    metavar="N",
    type=POSITIVE,
    help="With --engine: say which batches are reached with N requests at once on each data-parallel rank.",
)
@options.environment
@options.download
@options.reports("github", "sarif")
def check(
    files: tuple[str, ...],
    engine: str | None,
    spec: tuple[str, ...],
    ignore: tuple[tuple[str, ...], ...],
    observation: str | None,
    strict: bool,
    loads: tuple[str, ...],
    concurrency: int | None,
    environment: str | None,
    to: Output,
) -> None:
    """Check plans, and specs by planning them. Exit code 2 if there are findings.

    Notes are printed, but count only with --strict; --ignore, or ignore in a spec, leaves out notes and warnings. With
    --spec, each plan is also compared with what the spec gives now, for the plan's own machine or, with --environment,
    for that of a new environment. With --observation, each is compared with what an engine captured and dispatched.
    Observations are checked as engines are, with how often each finding mattered. With --engine, all other words are
    flags of that engine, as its server takes them: check --engine vllm --max-num-seqs 256.
    """
    ignored = {code for codes in ignore for code in codes}
    if engine is not None:
        for name, value in (("--spec", spec), ("--observation", observation)):
            if value:
                raise click.UsageError(f"{name} is for plans; omit it with --engine.")
        check_engine(engine, files, environment, to, strict, ignored, _load(loads, concurrency))
        return
    if loads or concurrency is not None:
        raise click.UsageError("--traffic and --concurrency are for flags; name an engine with --engine.")
    if not files:
        raise click.UsageError("Missing argument 'PLAN|SPEC|OBSERVATION...'.")
    # An engine's line is answered without the planner, and most of what reports need.
    from capture_planner.cli.check_files import check_files

    found = check_files(files, spec, observation, environment, ignored)

    def show_annotations() -> None:
        show_notes(assumed())
        annotate(to, found.placed, found.drifts)

    other = "from the spec (plan it again)" if observation is None else "from what was planned or observed"
    to.show(
        lambda: {"findings": found.placed, "drift": found.drifts, "budgets": found.budgets},
        lambda: check_report(found.placed, found.drifts, found.budgets, len(files), other),
        assumed(),
        show_annotations if to.form in ("github", "sarif") else None,
    )
    if found.drifts or any(strict or each.severity is not Severity.NOTE for each in found.placed):
        click.get_current_context().exit(FINDINGS)


def check_engine(
    name: str,
    flags: Sequence[str],
    environment: str | None,
    to: Output,
    strict: bool,
    ignore: Collection[str] = (),
    load: EngineLoad | None = None,
) -> None:
    """Lint what an engine makes of its flags, but for the codes to ``ignore``; exit code 2 if there are findings.

    Of a file with several components each is looked at. Under a ``load`` findings are ranked by the steps that they
    touch, and those that it does not reach are notes.
    """
    several = components(name, flags)
    found: list[FileFinding] = []

    def look(each: Component) -> None:
        found.extend(_check_one(name, each, environment, to, ignore, load))

    if len(several) > 1:
        refuse_several(several, to)
    if len(several) > 1 and to.form == "text":
        show_each(several, look)
    else:
        for each in several:
            look(each)
    if any(strict or each.finding.severity is not Severity.NOTE for each in found):
        click.get_current_context().exit(FINDINGS)


def _check_one(
    name: str,
    component: Component,
    environment: str | None,
    to: Output,
    ignore: Collection[str],
    load: EngineLoad | None,
) -> Sequence[FileFinding]:
    """Show the findings about one server, and return them with their place."""
    # A word may be a file, or FILE#COMPONENT.
    names = (word if Path(word).is_file() else word.rpartition("#")[0] for word in component.words)
    file = next((each for each in names if each and Path(each).is_file()), "")
    # Annotations are shown at a line of a file.
    if to.form not in ("text", "json") and not file:
        raise click.UsageError(f"--format {to.form} is for files; name one with the line, or use text or json.")
    machine = machine_named(environment)
    emulation = emulate(name, component.words, machine.environment)
    show_notes(emulation.notes)
    own = find_engine(name)
    trials = ChangeTrials(own, machine.environment)
    found = check_flags(emulation, own, trials)
    findings = tuple(each for each in found if each.rule.code not in ignore)
    assumptions = (*machine.assumptions, *emulation.assumptions)
    if to.form != "json":
        # A finding about an assumption says it, too.
        said = {each.diagnosis.message for each in findings}
        assumptions = tuple(each for each in assumptions if each.rpartition("; ")[0] not in said)
    if to.form not in ("text", "json"):
        show_notes(assumptions)
    if load is not None:
        findings = ranked(findings, load)
    together = fixed_together(emulation, [each for each in findings if each.is_reached], trials)
    reached = "" if load is None else load_text(emulation, load)
    report = partial(findings_report, emulation, findings, own.programs[0], together, reached)
    placed = [FileFinding(finding=each, file=file, line=component.line, column=1) for each in findings]
    annotations = None if to.form in ("text", "json") else partial(annotate, to, placed)
    graphs = {} if load is None else dict(zip(("captured", "reached"), reached_graphs(emulation, load), strict=True))
    data = {"findings": findings, "together": together} | ({"graphs": graphs} if graphs else {})
    to.show(lambda: data, report, assumptions, annotations)
    return placed


def annotate(to: Output, placed: Sequence[FileFinding], drift: Sequence[Drift] = ()) -> None:
    """Print findings as GitHub annotations or SARIF."""
    if to.form == "sarif":
        text = to_json(as_sarif(placed, drift, capture_planner.__version__))
    else:
        text = as_github(placed, drift)
    if text:
        show_lines(text)
