"""The commands about files: plan, show, explain, diff, backends and schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import click

from capture_planner import codec
from capture_planner.analysis.coverage import coverage
from capture_planner.analysis.diff import Change, changed
from capture_planner.analysis.diff import diff as diff_plans
from capture_planner.analysis.explain import explain as explain_batch
from capture_planner.analysis.explain import explanation
from capture_planner.cli import options
from capture_planner.cli.common import (
    FINDINGS,
    ChosenMachine,
    Output,
    assumed,
    machine_named,
    observation_of,
    plan_document,
    plan_of,
    read_document,
    record_text,
    show_notes,
    to_json,
)
from capture_planner.cli.options import POSITIVE, option
from capture_planner.cli.ranks import answer_line, read_batches
from capture_planner.codec import Document, plain, structure
from capture_planner.codec import shipped as catalog
from capture_planner.codec.json_schema import SCHEMAS
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines.check import share
from capture_planner.engines.deployments import coverage_of, emulation_of
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.observed_diff import observed_diff
from capture_planner.errors import CapturePlannerError, DispatchError, InvalidValue, one_line
from capture_planner.modes import Role
from capture_planner.plugins import registry
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.environment import Environment
from capture_planner.records.fingerprint import Fingerprint
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.text import counted
from capture_planner.records.traffic import Traffic
from capture_planner.report import findings, plans
from capture_planner.report.observation import observation_report
from capture_planner.report.profile import profile_report
from capture_planner.report.traffic import traffic_report

MAX_BYTES = 1 << 28
"""A report has a row for every forward."""

Graphs = Mapping[tuple[Role, Entry], Fingerprint | None]


def run_graphs(path: str) -> Graphs | None:
    """Return the graphs of a JSON report of ``run`` with their fingerprints; None for any other file.

    Raises ``CapturePlannerError`` for a report whose graphs cannot be read.
    """
    file = Path(path)
    if file.suffix != ".json" or not file.is_file() or file.stat().st_size > MAX_BYTES:
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        # The reader of plans says what is wrong with it.
        return None
    if not (isinstance(data, dict) and {"captured", "served_from", "forwards"} <= data.keys()):
        return None
    try:
        return dict(map(_graph, data["captured"]["entries"]))
    except (InvalidValue, KeyError, TypeError, ValueError) as error:
        raise CapturePlannerError(
            f"{path}: its captured.entries cannot be read ({one_line(error)[:200]}); run the plan again"
        ) from None


def _graph(row: Mapping[str, Any]) -> tuple[tuple[Role, Entry], Fingerprint | None]:
    entry = structure({name: value for name, value in row["entry"].items() if value is not None}, Entry)
    found = row["fingerprint"]
    return (Role(row["role"]), entry), None if found is None else structure(found, Fingerprint)


def diff_runs(old: str, new: str) -> tuple[Change, ...] | None:
    """Return what changed in the graphs from one report of ``run`` to another; None where neither is a report.

    Raises ``click.UsageError`` where only one of them is a report, and where one has no fingerprints.
    """
    before, after = run_graphs(old), run_graphs(new)
    if before is None and after is None:
        return None
    if before is None or after is None:
        other = old if before is None else new
        raise click.UsageError(f"{other} is no JSON report of run, and the other file is; give two reports.")
    for path, graphs in ((old, before), (new, after)):
        # A run without graphs has nothing to compare, and lacks nothing.
        if graphs and not any(graphs.values()):
            raise click.UsageError(
                f"{path} has no fingerprints of its graphs; install cuda-bindings, and run it again."
            )
    known, known_after = ({key: found for key, found in graphs.items() if found} for graphs in (before, after))
    changes = [
        Change(role, "fingerprint", f"{role} {entry}: {text}", entries=(entry,))
        for (role, entry), text in changed(known, known_after)
    ]
    for subject, word, keys in (
        ("added", "also captured", after.keys() - before.keys()),
        ("gone", "no longer captured", before.keys() - after.keys()),
    ):
        for role, entry in sorted(keys, key=lambda key: (key[0].value, key[1].capture_order)):
            changes.append(Change(role, subject, f"{role} {entry} is {word}", entries=(entry,)))
    return tuple(changes)


@click.command()
@click.argument("spec")
@options.output("Write the plan to FILE and print a summary.", kind=Plan)
@options.environment
@options.reports()
def plan(spec: str, output: Path | None, environment: str | None, to: Output) -> None:
    """Make the plan of SPEC; - reads standard input.

    Without --output, print the plan as YAML or JSON. Without --environment, the machine is taken from
    the name of the output file (model.h100.yaml is for h100), or else is h100.
    """
    result = plan_document(read_document(spec), machine_named(environment, None if output is None else str(output)))
    report = partial(plans.plan_report, result, whole=output is None)
    if output is None:
        to.show(lambda: result, report, text=lambda: click.echo(codec.dumps(result), nl=False))
        return
    # The file first: a summary of what could not be written would say that it was.
    codec.write(output, record_text(output, result))
    to.show(lambda: result, report)
    to.note_written(output)


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC|OBSERVATION|TRAFFIC|PROFILE")
@options.environment
@options.reports()
def show(plan_file: str, environment: str | None, to: Output) -> None:
    """Show a plan as tables: modes, graphs, waivers, and each decision with its reason.

    Of an observation: graphs with what they cost, which batches ran on them, and why others ran eager. Of traffic: the
    most frequent batches by role. Of a profile: what each size of graph costs.
    """
    document = read_document(plan_file)
    shown: Traffic | Profile | Observation | Plan
    if document.is_traffic:
        shown = document.load(Traffic)
        report = partial(traffic_report, shown)
    elif document.is_profile:
        shown = document.load(Profile)
        report = partial(profile_report, shown)
    elif document.is_observation:
        shown = observation_of(document, environment)
        report = partial(observation_report, shown)
    else:
        shown = plan_of(document, environment)
        report = partial(plans.plan_report, shown, whole=True)
    to.show(lambda: shown, report)


def _explain_no_engine(_: click.Context, __: click.Parameter, name: str | None) -> None:
    if name is not None:
        raise click.UsageError(
            f"explain is for plans. For an engine's line: capture-planner engine {name} FLAGS --batches FILE answers "
            f"batches, and capture-planner spec {name} FLAGS -o SPEC writes a spec to explain."
        )


@click.command()
@click.option("--engine", hidden=True, is_eager=True, expose_value=False, callback=_explain_no_engine)
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
@options.reports()
def explain(
    plan_file: str, whole: bool, batches: IO[bytes] | None, environment: str | None, to: Output, **values: Any
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
    batch = batch_of(**values) if values["num_reqs"] is not None else None
    if document.is_observation:
        _explain_observation(observation_of(document, environment), batch, batches, to)
        return
    plan = plan_of(document, environment, answers=True)
    dispatcher = Dispatcher(plan)
    if batches is not None:
        to.refuse_batches()
        show_notes(assumed())
        _answer(batches, dispatcher, plan.planned)
    elif batch is None:
        walked = coverage(plan)
        to.show(lambda: walked, partial(plans.coverage_report, walked), assumed())
    else:
        explained = explain_batch(dispatcher, batch)
        to.show(lambda: explained, partial(plans.explanation_report, explained), assumed())


def _answer(batches: IO[bytes], dispatcher: Dispatcher | Emulation, roles: Sequence[Role]) -> None:
    """Print the answer to each batch of a file, a line each."""
    for batch in read_batches(batches, getattr(batches, "name", "<stdin>"), roles):
        click.echo(json.dumps(answer_line(batch, dispatcher.dispatch(batch))))


def _explain_observation(observation: Observation, batch: Batch | None, batches: IO[bytes] | None, to: Output) -> None:
    """Print the engine's answer to one batch or to those of a file, or else to every admissible batch."""
    emulation = emulation_of(observation)
    if batches is not None:
        to.refuse_batches()
        _answer(batches, emulation, tuple(emulation.modes))
        return
    if batch is None:
        covered = coverage_of(emulation)
        to.show(lambda: covered, partial(plans.coverage_report, covered), emulation.assumptions)
        return
    if batch.role not in emulation.modes:
        raise DispatchError(f"the engine ran no {batch.role}; it ran {', '.join(emulation.modes)}")
    entries = (graph.entry for graph in emulation.graphs if graph.role is batch.role)
    explained = explanation(batch, emulation.dispatch(batch), entries, emulation.speculative)
    (role,) = (each for each in observation.roles if each.role is batch.role)
    same = [count for count in role.batches if count.batch(batch.role) == batch]
    steps = sum(count.steps for count in same)
    took = next((count.milliseconds for count in same if count.milliseconds is not None), None)
    value = plain(explained) | {"observed": {"steps": steps, "of": role.steps, "milliseconds": took}}
    seen = f"observed: {share(steps, role.steps)}" + ("" if took is None else f", {took:.3f} ms each")
    to.show(lambda: value, partial(plans.explanation_report, explained, seen), emulation.assumptions)


def batch_of(role: str, num_reqs: int, num_tokens: int | None, query_len: int | None, **others: Any) -> Batch:
    """Return the batch that flags of ``explain`` describe; raises ``click.UsageError`` where they contradict."""
    if num_tokens is None:
        if query_len is None:
            raise click.UsageError("Give --num-tokens, or --query-len for a uniform batch.")
        num_tokens = num_reqs * query_len
    if query_len is not None and num_tokens != num_reqs * query_len:
        raise click.UsageError(
            f"{counted(num_reqs, 'request')} with {counted(query_len, 'token')} each have "
            f"{num_reqs * query_len} tokens, not {num_tokens}; omit --query-len if requests differ."
        )
    if (longest := others["max_query_len"]) is not None:
        if query_len is not None or not others["past_prompt"]:
            raise click.UsageError("--max-query-len is for decodes that differ; omit it with --query-len or --prompt.")
        if not longest <= num_tokens <= num_reqs * longest:
            raise click.UsageError(
                f"{counted(num_reqs, 'request')} of at most {counted(longest, 'token')} have {longest} to "
                f"{num_reqs * longest} tokens, not {num_tokens}."
            )
    return Batch(role=Role(role), num_reqs=num_reqs, num_tokens=num_tokens, query_len=query_len, **others)


@click.command()
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@options.environment
@options.reports()
def diff(old: str, new: str, environment: str | None, to: Output) -> None:
    """Show in words what changes on the machine when plan NEW replaces plan OLD.

    Exit code 2 if they differ. Either may be a spec, which is planned first, for the machine of the other where that
    is a plan and no --environment is given. Or an observation: what an engine
    did with the plan, or what changed from one run of it to another. Two JSON reports of run are compared by
    the fingerprints of their graphs: kernels that were replaced, nodes that came and went.
    """
    runs = diff_runs(old, new)
    if runs is not None:
        _show_changes(runs, to, "the graphs of both runs are the same")
        return
    documents = read_document(old), read_document(new)
    if any(each.is_observation for each in documents):
        deployments = (
            each.load(Observation) if each.is_observation else _planned(each, environment) for each in documents
        )
        result = observed_diff(*deployments)
        _show_changes(result.changes, to, "no differences", result.notes, plain(result))
        return
    # Two plans differ least on one machine: a spec beside a plan is planned for the plan's.
    own = next((each.load(Plan).environment for each in documents if each.is_plan and environment is None), None)
    before, after = (_planned(each, environment, own) for each in documents)
    _show_changes(diff_plans(before, after), to, "the plans are the same")


def _planned(document: Document, environment: str | None, own: Environment | None = None) -> Plan:
    """Return the plan of a document, planned for the machine of the other one where that is a plan."""
    if document.is_plan or own is None:
        return plan_of(document, None if document.is_plan else environment, answers=True)
    return plan_document(document, ChosenMachine(own))


def _show_changes(
    changes: Sequence[Change], to: Output, same: str, notes: Sequence[str] = (), data: Any = None
) -> None:
    """Show what differs, and exit with 2 if something does; ``data``: the JSON, where it is more than changes."""
    report = partial(findings.changes_report, [change.message for change in changes], same, notes)
    to.show(lambda: data or {"changes": changes}, report, assumed())
    if changes:
        click.get_current_context().exit(FINDINGS)


@click.command()
@click.option("--spec", metavar="SPEC", help="Ask for the model of this spec instead of a plain 8B model.")
@options.environment
@options.reports()
def backends(spec: str | None, environment: str | None, to: Output) -> None:
    """List the installed attention backends, and how far each supports full graphs.

    Shows every shipped environment, or one environment with the reasons.
    """
    names = [environment] if environment else list(catalog.shipped_environments())
    environments = [catalog.find_environment(name) for name in names]
    support = plans.backend_support(registry.load_backends(), environments, codec.load_spec(spec) if spec else None)
    to.show(lambda: support, partial(plans.backends_report, support, reasons=environment is not None))


@click.command()
@click.argument("kind", type=click.Choice(list(SCHEMAS)))
@options.formats("json")
def schema(kind: str, form: str) -> None:
    """Print the JSON Schema of a kind of file, for editors."""
    click.echo(to_json(SCHEMAS[kind]()))
