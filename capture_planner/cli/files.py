"""The commands about files: plan, show, explain, check, diff, backends and schema."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import click

import capture_planner
from capture_planner import codec
from capture_planner.analysis import diff as difference
from capture_planner.analysis.coverage import coverage
from capture_planner.analysis.explain import explain as explain_batch
from capture_planner.analysis.lint import Finding, Severity, lint
from capture_planner.cli import options
from capture_planner.cli.batch_flags import batch_of
from capture_planner.cli.common import (
    FINDINGS,
    ChosenMachine,
    assumed,
    emit,
    machine_named,
    plan_document,
    plan_of,
    read_document,
    refuse_to_replace,
    show_assumptions,
    show_lines,
    show_notes,
    to_json,
)
from capture_planner.cli.drift import drift as drift_of
from capture_planner.cli.drift import specs_of
from capture_planner.cli.engine import EngineName, FileOrEngineCommand, check_engine
from capture_planner.cli.ignoring import IGNORED
from capture_planner.cli.jsonl import answer_line, read_batches
from capture_planner.cli.observed import explain_observation, observation_of, observed_findings
from capture_planner.cli.options import POSITIVE, flag, option
from capture_planner.cli.run_reports import diff_runs
from capture_planner.codec import Document, plain
from capture_planner.codec import shipped as catalog
from capture_planner.codec.json_schema import SCHEMAS
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines.observed_diff import observed_diff
from capture_planner.modes import Role
from capture_planner.plugins import registry
from capture_planner.records.environment import Environment
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic
from capture_planner.report import findings, tables
from capture_planner.report.backends import backend_support, backends_table
from capture_planner.report.observation import diff_text, observation_tables
from capture_planner.report.price import budget_line
from capture_planner.report.profile import profile_tables
from capture_planner.report.traffic import traffic_tables


@click.command(short_help="Make the plan of a spec.")
@click.argument("spec")
@click.option("-o", "--output", metavar="FILE", help="Write the plan to FILE and print a summary.")
@options.environment
@options.formats("text", "json")
def plan(spec: str, output: str | None, environment: str | None, form: str) -> None:
    """Make the plan of SPEC; - reads standard input.

    Without --output, print the plan as YAML or JSON. Without --environment, the machine is taken from
    the name of the output file (model.h100.yaml is for h100), or else is h100.
    """
    if output is not None:
        refuse_to_replace(output, Plan, spec)
    result = plan_document(read_document(spec), machine_named(environment, output))
    if output is not None:
        codec.write(output, to_json(result) + "\n" if Path(output).suffix == ".json" else codec.dumps(result))
    if form == "text" and output is None:
        click.echo(codec.dumps(result), nl=False)
    else:
        emit(form, lambda: result, partial(tables.plan_summary, result))
    if output is not None:
        show_lines(f"written to {output}", err=form == "json")


@click.command(short_help="Show a plan, an observation, traffic or a profile as tables.")
@click.argument("plan_file", metavar="PLAN|SPEC|OBSERVATION|TRAFFIC|PROFILE")
@options.environment
@options.formats()
def show(plan_file: str, environment: str | None, form: str) -> None:
    """Show a plan as tables: modes, graphs, waivers, and each decision with its reason.

    Of an observation: graphs with what they cost, which batches ran on them, and why others ran eager. Of traffic: the
    most frequent batches by role. Of a profile: what each size of graph costs.
    """
    document = read_document(plan_file)
    if document.is_traffic:
        traffic = document.load(Traffic)
        emit(form, lambda: traffic, partial(traffic_tables, traffic))
        return
    if document.is_profile:
        profile = document.load(Profile)
        emit(form, lambda: profile, partial(profile_tables, profile))
        return
    if document.is_observation:
        observation = observation_of(document, environment)
        emit(form, lambda: observation, partial(observation_tables, observation))
        return
    plan = plan_of(document, environment)
    emit(form, lambda: plan, partial(tables.plan_tables, plan))


@click.command(short_help="Explain which graph serves a batch, and why.")
@click.argument("plan_file", metavar="PLAN|SPEC|OBSERVATION")
@option("--role", type=click.Choice([r.value for r in Role]), default="target", help="Role that runs the batch.")
@click.option("--num-reqs", type=POSITIVE, help="Requests in the batch.")
@click.option("--num-tokens", type=POSITIVE, help="Tokens in the batch. Default: requests times query length.")
@click.option("--query-len", type=POSITIVE, help="Tokens per request, if all have the same number.")
@click.option("--max-query-len", type=POSITIVE, help="Tokens of the longest request, if decodes differ in length.")
@click.option(
    "--past-prompt/--prompt", default=True, help="Whether every request is past its prompt. Default: --past-prompt."
)
@option("--active-loras", type=click.IntRange(min=0), default=0, help="Number of distinct active LoRA adapters.")
@click.option("--coverage", "whole", is_flag=True, help="Cover every admissible batch, role by role.")
@options.batches
@options.environment
@options.formats()
def explain(
    plan_file: str, whole: bool, batches: IO[bytes] | None, environment: str | None, form: str, **values: Any
) -> None:
    """Explain which graph serves a batch, and why; or what serves every admissible batch.

    An observation has the answers of the engine's own dispatcher, and says where the engine was not asked.

    Each line of --batches is {"role", "num_reqs", "num_tokens", "query_len", "max_query_len", "past_prompt",
    "active_loras"}; each answer is {"mode", "num_tokens", "num_reqs", "query_len", "max_query_len", "active_loras",
    "reason"}.
    """
    if (values["num_reqs"] is not None) + whole + (batches is not None) != 1:
        raise click.UsageError("Give one of --num-reqs, --coverage or --batches.")
    document = read_document(plan_file)
    if document.is_observation:
        single = batch_of(**values) if values["num_reqs"] is not None else None
        explain_observation(observation_of(document, environment), single, batches, form)
        return
    plan = plan_of(document, environment, answers=True)
    if whole:
        walked = coverage(plan)
        emit(form, lambda: walked, partial(tables.coverage_table, walked), assumed())
        return
    dispatcher = Dispatcher(plan)
    if batches is not None:
        show_notes(assumed())
        for batch in read_batches(batches, getattr(batches, "name", "<stdin>"), plan.planned):
            click.echo(json.dumps(answer_line(batch, dispatcher.dispatch(batch))))
        return
    explained = explain_batch(dispatcher, batch_of(**values))
    emit(form, lambda: explained, partial(tables.explanation_table, explained), assumed())


@click.command(cls=FileOrEngineCommand, short_help="Check plans, specs, observations or an engine's flags.")
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
@options.environment
@options.download
@options.formats("text", "json", "github", "sarif")
def check(
    files: tuple[str, ...],
    engine: str | None,
    spec: tuple[str, ...],
    ignore: tuple[tuple[str, ...], ...],
    observation: str | None,
    strict: bool,
    environment: str | None,
    form: str,
) -> None:
    """Check plans, and specs by planning them. Exit code 2 if there are findings.

    Notes are printed, but count only with --strict; --ignore, or ignore in a spec, leaves out notes and warnings.
    With --spec, each plan is also compared with what the spec gives now, for the plan's own machine or, with
    --environment, for that of a new environment. With --observation, each is compared with what an
    engine captured and dispatched. Observations are checked as engines are, with how often each finding
    mattered. With --engine, all other words are flags of that engine, as its server takes them:
    check --engine vllm --max-num-seqs 256.
    """
    ignored = {code for codes in ignore for code in codes}
    if engine is not None:
        for name, value in (("--spec", spec), ("--observation", observation)):
            if value:
                raise click.UsageError(f"{name} is for plans; omit it with --engine.")
        check_engine(engine, files, environment, form, strict, ignored)
        return
    if not files:
        raise click.UsageError("Missing argument 'PLAN|SPEC|OBSERVATION...'.")
    sources = specs_of(files, spec)
    observed = None if observation is None else read_document(observation)
    placed: list[findings.FileFinding] = []
    drift: list[findings.Drift] = []
    budgets: list[str] = []
    for file, source in zip(files, sources, strict=True):
        document = read_document(file)
        if document.is_observation and source is None and observed is None:
            seen = observed_findings(document, observation_of(document, environment))
            placed += (each for each in seen if each.finding.rule.code not in ignored)
            continue
        plan = plan_of(document, environment if source is None else None, answers=True)
        placed += _checked(document, plan, ignored)
        budgets += [f"{document.name}: {line}" for line in [budget_line(plan)] if line is not None]
        if source is not None:
            drift += drift_of(document, source, environment)
        if observed is not None:
            changes = observed_diff(plan, observed.load(Observation)).changes
            drift += (findings.Drift(file=file, message=f"{observed.name}: {change.message}") for change in changes)
    if form == "json":
        click.echo(to_json({"assumptions": assumed(), "findings": placed, "drift": drift, "budgets": budgets}))
    elif form == "sarif":
        show_notes(assumed())
        click.echo(to_json(findings.as_sarif(placed, drift, capture_planner.__version__)))
    else:
        lines = (findings.as_github if form == "github" else findings.as_text)(placed, drift)
        if form == "text":
            show_assumptions(assumed())
        else:
            show_notes(assumed())
        lines = "\n".join(filter(None, (lines, *(budgets if form == "text" else ()))))
        if lines:
            show_lines(lines)
        if form == "text":
            other = "from the spec (plan it again)" if observed is None else "from what was planned or observed"
            click.echo(_count(placed, drift, len(files), other))
    if drift or any(strict or p.severity is not Severity.NOTE for p in placed):
        click.get_current_context().exit(FINDINGS)


def _checked(document: Document, plan: Plan, ignore: Collection[str]) -> Iterator[findings.FileFinding]:
    for finding in lint(plan, ignore):
        path = finding.diagnostic.path if document.is_plan else _in_spec(finding)
        line, column = document.node.locate(path)
        yield findings.FileFinding(finding=finding, file=document.name, line=line, column=column)


def _in_spec(finding: Finding) -> tuple[str | int, ...]:
    """Return where a spec has to change for a finding in its plan."""
    return finding.rule.spec_path or tuple(part for part in finding.diagnostic.path[:1] if part != "roles")


def _count(placed: Sequence[findings.FileFinding], drift: Sequence[findings.Drift], files: int, source: str) -> str:
    counts = {severity: sum(p.severity is severity for p in placed) for severity in Severity}
    parts = [counted(count, severity.value) for severity, count in counts.items() if count]
    if drift:
        parts.append(f"{counted(len(drift), 'difference')} {source}")
    return f"{counted(files, 'file')} checked: {', '.join(parts) or 'nothing to report'}"


@click.command(short_help="Show what changes from one plan, observation or run to another.")
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@options.environment
@options.formats()
def diff(old: str, new: str, environment: str | None, form: str) -> None:
    """Show in words what changes on the machine when plan NEW replaces plan OLD.

    Exit code 2 if they differ. Either may be a spec, which is planned first, for the machine of the other where that
    is a plan and no --environment is given. Or an observation: what an engine
    did with the plan, or what changed from one run of it to another. Two JSON reports of run are compared by
    the fingerprints of their graphs: kernels that were replaced, nodes that came and went.
    """
    runs = diff_runs(old, new)
    if runs is not None:
        _show_changes(runs, form, "the graphs of both runs are the same")
        return
    documents = read_document(old), read_document(new)
    if any(each.is_observation for each in documents):
        result = observed_diff(*(_deployment(each, environment) for each in documents))
        if form == "json":
            click.echo(to_json({"assumptions": assumed(), **plain(result)}))
        else:
            show_assumptions(assumed())
            show_lines(diff_text(result))
        if result.changes:
            click.get_current_context().exit(FINDINGS)
        return
    own = next((each.load(Plan).environment for each in documents if each.is_plan and environment is None), None)
    before, after = (_planned(each, environment, own) for each in documents)
    _show_changes(difference.diff(before, after), form, "the plans are the same")


def _planned(document: Document, environment: str | None, own: Environment | None) -> Plan:
    """Return the plan of a document, planned for the machine of the other one where that is a plan."""
    if document.is_plan or own is None:
        return plan_of(document, None if document.is_plan else environment, answers=True)
    return plan_document(document, ChosenMachine(own))


def _show_changes(changes: Sequence[difference.Change], form: str, same: str) -> None:
    if form == "json":
        click.echo(to_json({"assumptions": assumed(), "changes": changes}))
    else:
        show_assumptions(assumed())
        show_lines("\n".join(change.message for change in changes) or same)
    if changes:
        click.get_current_context().exit(FINDINGS)


def _deployment(document: Document, environment: str | None) -> Plan | Observation:
    if document.is_observation:
        return document.load(Observation)
    return plan_of(document, None if document.is_plan else environment, answers=True)


@click.command(short_help="List the installed attention backends and what they support.")
@click.option("--spec", metavar="SPEC", help="Ask for the model of this spec instead of a plain 8B model.")
@options.environment
@options.formats()
def backends(spec: str | None, environment: str | None, form: str) -> None:
    """List the installed attention backends, and how far each supports full graphs.

    Shows every shipped environment, or one environment with the reasons.
    """
    names = [environment] if environment else list(catalog.shipped_environments())
    environments = [catalog.find_environment(name) for name in names]
    support = backend_support(registry.load_backends(), environments, codec.load_spec(spec) if spec else None)
    emit(form, lambda: support, partial(backends_table, support, reasons=environment is not None))


@click.command(short_help="Print the JSON Schema of a kind of file.")
@click.argument("kind", type=click.Choice(list(SCHEMAS)))
@options.formats("json")
def schema(kind: str, form: str) -> None:
    """Print the JSON Schema of a kind of file, for editors."""
    click.echo(to_json(SCHEMAS[kind]()))
