"""The commands about files: plan, show, explain, check, diff, backends and schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

import click

import capture_planner
from capture_planner import codec
from capture_planner.analysis import diff as difference
from capture_planner.analysis.coverage import coverage
from capture_planner.analysis.explain import explain as explain_batch
from capture_planner.analysis.lint import Finding, Severity, lint
from capture_planner.cli.common import (
    FINDINGS,
    emit,
    environment_named,
    environment_option,
    format_option,
    is_plan_file,
    plan_of,
    planned,
    show_text,
)
from capture_planner.cli.engine import OrEngine, check_engine
from capture_planner.cli.jsonl import answer_line, read_batches
from capture_planner.codec import dumps_json, to_data
from capture_planner.codec import shipped as catalog
from capture_planner.codec.json_schema import SCHEMAS
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines import ENGINES
from capture_planner.errors import CapturePlannerError, InvalidDocument
from capture_planner.modes import Role
from capture_planner.plugins import registry
from capture_planner.records.batch import Batch
from capture_planner.records.text import counted
from capture_planner.report import findings, tables
from capture_planner.report.data import backend_data, coverage_data, explanation_data


@click.command()
@click.argument("spec")
@click.option("-o", "--output", metavar="FILE", help="Write the plan here, and print a summary.")
@environment_option
@format_option("text", "json")
def plan(spec: str, output: str | None, environment: str | None, form: str) -> None:
    """Make the plan of SPEC.

    Without --output the plan itself is printed, as YAML or JSON. Without --environment, a file name
    such as model.h100.yaml states the environment; else it is h100.
    """
    if output is not None:
        _refuse_to_replace(output, spec)
    made = planned(spec, environment_named(environment, output))
    if output is not None:
        is_json = Path(output).suffix == ".json"
        codec.write(output, dumps_json(to_data(made)) + "\n" if is_json else codec.dumps(made))
    if form == "json":
        click.echo(dumps_json(to_data(made)))
    elif output is None:
        click.echo(codec.dumps(made), nl=False)
    else:
        show_text(tables.plan_summary(made))
    if output is not None:
        click.echo(f"written to {output}", err=form == "json")


def _refuse_to_replace(output: str, spec: str) -> None:
    """Keep --output from replacing anything but a plan: a slip must not cost somebody a spec."""
    if not output:
        raise click.UsageError("--output needs the name of a file.")
    target = Path(output)
    if not target.is_file() or target.stat().st_size == 0:
        return
    try:
        replaceable = is_plan_file(output)
    except InvalidDocument:
        replaceable = False
    if not replaceable:
        what = (
            "the spec itself" if Path(spec).exists() and target.samefile(spec) else "a file that is no plan"
        )
        raise CapturePlannerError(f"--output {output} is {what}; name another file, or remove it first")


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC")
@environment_option
@format_option()
def show(plan_file: str, environment: str | None, form: str) -> None:
    """Show a plan as tables: modes, graphs, waivers, and each decision with its reason."""
    shown = plan_of(plan_file, environment)
    if form == "json":
        click.echo(dumps_json(to_data(shown)))
    else:
        show_text(tables.plan_tables(shown))


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC")
@click.option("--role", type=click.Choice([r.value for r in Role]), default="target", show_default=True)
@click.option("--num-reqs", type=click.IntRange(min=1), help="Requests in the batch.")
@click.option(
    "--num-tokens",
    type=click.IntRange(min=1),
    help="Tokens in the batch; requests times query length if left out.",
)
@click.option(
    "--query-len", type=click.IntRange(min=1), help="Tokens of every request, if all have the same number."
)
@click.option("--past-prompt/--prompt", default=True, help="Whether all requests are past their prompt.")
@click.option(
    "--active-loras",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Distinct active adapters.",
)
@click.option("--coverage", "whole", is_flag=True, help="The whole admissible space, by role.")
@click.option("--batches", type=click.File("rb"), help="Answer each line of a JSON-lines file; - is stdin.")
@environment_option
@format_option()
def explain(
    plan_file: str,
    role: str,
    num_reqs: int | None,
    num_tokens: int | None,
    query_len: int | None,
    past_prompt: bool,
    active_loras: int,
    whole: bool,
    batches: IO[bytes] | None,
    environment: str | None,
    form: str,
) -> None:
    """Say which graph serves a batch, and why; or what serves every batch.

    A line of --batches is {"role", "num_reqs", "num_tokens", "query_len", "past_prompt",
    "active_loras"}; its answer {"mode", "num_tokens", "num_reqs", "query_len", "active_loras",
    "reason"}.
    """
    if (num_reqs is not None) + whole + (batches is not None) != 1:
        raise click.UsageError("Give one of --num-reqs, --coverage or --batches.")
    asked = plan_of(plan_file, environment)
    if whole:
        walked = coverage(asked)
        emit(form, partial(coverage_data, walked), partial(tables.coverage_table, walked))
        return
    dispatcher = Dispatcher(asked)
    if batches is not None:
        for batch in read_batches(batches, getattr(batches, "name", "<stdin>"), asked.planned):
            click.echo(json.dumps(answer_line(batch, dispatcher.dispatch(batch))))
        return
    assert num_reqs is not None
    if num_tokens is None:
        if query_len is None:
            raise click.UsageError("Give --num-tokens, or --query-len for a uniform batch.")
        num_tokens = num_reqs * query_len
    if query_len is not None and num_tokens != num_reqs * query_len:
        raise click.UsageError(
            f"{counted(num_reqs, 'request')} of {counted(query_len, 'token')} are {num_reqs * query_len} in all, "
            f"not {num_tokens}; "
            "leave out --query-len where requests differ."
        )
    explained = explain_batch(
        dispatcher,
        Batch(
            role=Role(role),
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            query_len=query_len,
            past_prompt=past_prompt,
            active_loras=active_loras,
        ),
    )
    emit(form, partial(explanation_data, explained), partial(tables.explanation_table, explained))


@click.command(cls=OrEngine)
@click.argument("files", metavar="PLAN|SPEC...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--engine",
    type=click.Choice(list(ENGINES)),
    help="Check what this engine makes of its own flags, which stand in place of files.",
)
@click.option("--spec", metavar="SPEC", help="The spec a plan must be the plan of: any drift is a finding.")
@click.option("--strict", is_flag=True, help="Count notes as findings too.")
@environment_option
@format_option("text", "json", "github", "sarif")
def check(
    files: tuple[str, ...],
    engine: str | None,
    spec: str | None,
    strict: bool,
    environment: str | None,
    form: str,
) -> None:
    """Check plans, and specs by planning them. Exit code 2 where there are findings.

    Notes are printed and count only with --strict. With --spec, a plan is also compared with the
    one that the spec gives now, on the plan's own environment. With --engine, what follows are the flags of
    that engine, as its server takes them: check --engine vllm --max-num-seqs 256.
    """
    if engine is not None:
        if spec is not None:
            raise click.UsageError("--spec is for plans; leave it out with --engine.")
        check_engine(engine, files, environment, form, strict)
        return
    if not files:
        raise click.UsageError("Missing argument 'PLAN|SPEC...'.")
    placed = []
    drift: list[findings.Drift] = []
    for file in files:
        placed += list(_checked(file, environment))
        if spec is not None:
            drift += _drift(file, spec)
    if form == "json":
        listed = [{"file": d.file, "message": d.says} for d in drift]
        click.echo(dumps_json({"findings": findings.as_data(placed), "drift": listed}))
    elif form == "sarif":
        click.echo(dumps_json(findings.as_sarif(placed, drift, capture_planner.__version__)))
    elif form == "github":
        click.echo(findings.as_github(placed, drift), nl=bool(placed or drift))
    else:
        click.echo(findings.as_text(placed, drift), nl=bool(placed or drift))
        click.echo(_count(placed, drift, len(files)))
    counted = [p for p in placed if strict or p.severity is not Severity.NOTE]
    if counted or drift:
        click.get_current_context().exit(FINDINGS)


def _checked(file: str, environment: str | None) -> Iterator[findings.Placed]:
    """Lint one file, and place each finding in it."""
    node = codec.parse(codec.read(file), file)
    made = plan_of(file, environment)
    is_plan = codec.is_plan(node)
    for finding in lint(made):
        line, column = node.locate(finding.diagnostic.path if is_plan else _in_spec(finding))
        yield findings.Placed(finding=finding, file=file, line=line, column=column)


def _in_spec(finding: Finding) -> tuple[str | int, ...]:
    """Where in a spec to mend what was found in its plan."""
    return finding.rule.spec_path or tuple(part for part in finding.diagnostic.path[:1] if part != "roles")


def _drift(file: str, spec: str) -> Iterator[findings.Drift]:
    """Compare a plan with what its spec gives now."""
    kept = codec.load_plan(file)
    for change in difference.diff(kept, planned(spec, kept.environment)):
        yield findings.Drift(file=file, says=f"{spec} gives another plan: {change.message}")


def _count(placed: list[findings.Placed], drift: list[findings.Drift], files: int) -> str:
    counts = {severity: sum(p.severity is severity for p in placed) for severity in Severity}
    parts = [
        f"{count} {severity.value}{'s' if count != 1 else ''}" for severity, count in counts.items() if count
    ]
    if drift:
        parts.append(f"{len(drift)} difference{'s' if len(drift) != 1 else ''} from the spec (plan it again)")
    return f"{files} file{'s' if files != 1 else ''} checked: {', '.join(parts) or 'nothing to report'}"


@click.command()
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@environment_option
@format_option()
def diff(old: str, new: str, environment: str | None, form: str) -> None:
    """Say in words what changes on the machine when plan NEW replaces plan OLD.

    Exit code 2 where they differ. Either may be a spec, which is then planned.
    """
    before, after = (plan_of(file, None if is_plan_file(file) else environment) for file in (old, new))
    changes = difference.diff(before, after)
    if form == "json":
        listed = [
            {
                "role": change.role,
                "what": change.subject,
                "says": change.message,
                "entries": [tables.entry_data(entry) for entry in change.entries],
            }
            for change in changes
        ]
        click.echo(dumps_json({"changes": listed}))
    else:
        click.echo("\n".join(change.message for change in changes) or "the plans are the same")
    if changes:
        click.get_current_context().exit(FINDINGS)


@click.command()
@click.option("--spec", metavar="SPEC", help="Ask about this deployment's model instead of a plain 8B one.")
@environment_option
@format_option()
def backends(spec: str | None, environment: str | None, form: str) -> None:
    """List the installed attention backends, and how far each goes inside a full graph.

    On every shipped environment, or with its reasons on the one that is named.
    """
    names = [environment] if environment else list(catalog.shipped_environments())
    data = backend_data(
        registry.load_backends(),
        [catalog.find_environment(name) for name in names],
        codec.load_spec(spec) if spec else None,
    )
    if form == "json":
        click.echo(dumps_json(data))
    else:
        show_text(tables.backends_table(data, reasons=environment is not None))


@click.command()
@click.argument("kind", type=click.Choice(list(SCHEMAS)))
@format_option("json")
def schema(kind: str, form: str) -> None:
    """Print the JSON Schema of a file kind, for editors."""
    click.echo(dumps_json(SCHEMAS[kind]()))
