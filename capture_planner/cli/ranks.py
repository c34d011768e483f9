"""The command ``ranks``: what data-parallel ranks run together."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import IO

import click

from capture_planner.analysis.data_parallel import MAX_RANKS, MIN_RANKS
from capture_planner.cli import options
from capture_planner.cli.common import assumed, emit, plan_of, read_document, show_notes
from capture_planner.cli.jsonl import read_vectors
from capture_planner.cli.observed import observation_of
from capture_planner.cli.options import FILE
from capture_planner.cli.recorded import MOST_SHOWN, recorded_vectors
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import Role
from capture_planner.records.text import counted
from capture_planner.report.plain import plain
from capture_planner.report.rank_vectors import vectors_json, vectors_table
from capture_planner.report.ranks import cases, cases_json, cases_table, rank_report

DEFAULT_RANKS = 4


@click.command(short_help="Show what data-parallel ranks run together.")
@click.argument("plan_file", metavar="PLAN|SPEC|OBSERVATION")
@click.option("--vectors", type=click.File("rb"), help="Answer each vector of a JSON-lines file; - reads stdin.")
@click.option(
    "--recorded",
    type=FILE,
    help="Explain the most frequent vectors of a run (its report as JSON) or of an observation.",
)
@click.option(
    "--ranks",
    "num_ranks",
    type=click.IntRange(min=MIN_RANKS, max=MAX_RANKS),
    help=f"Data-parallel ranks in the table. Default: as in the plan, or {DEFAULT_RANKS}.",
)
@click.option("--role", type=click.Choice([r.value for r in Role]), help="Role shown in the table. Default: target.")
@options.environment
@options.formats()
def ranks(
    plan_file: str,
    vectors: IO[bytes] | None,
    recorded: Path | None,
    num_ranks: int | None,
    role: str | None,
    environment: str | None,
    form: str,
) -> None:
    """Show what data-parallel ranks run together: all replay the same graph, or all run eager.

    Without --vectors, print a table of the cases that such a deployment meets. Each line of --vectors is
    a list with one item per rank: a batch as in explain --batches, with "captured": false if the rank
    uses no graph, or "missing": true if it lost the graph that all would replay; or null if the rank is
    idle. Each answer is {"role", "mode", "entry", "reason", "joint", "draft_tokens", "ranks"}.

    --recorded explains what the ranks of a run or of an engine brought to their steps: with the plan that
    they ran, or with another one that they could run.

    Of an observation, or a folder of an engine's workers: what the ranks brought to the steps that ran, and which of
    them is why all ran what they ran.
    """
    if recorded is not None and (vectors is not None or num_ranks is not None):
        raise click.UsageError("--recorded has its own vectors and ranks; omit --vectors and --ranks.")
    document = read_document(plan_file)
    if document.is_observation:
        if vectors is not None or num_ranks is not None or recorded is not None:
            raise click.UsageError(
                f"{plan_file} is an observation, and has its own vectors; omit --vectors, --recorded and --ranks."
            )
        observation, one = observation_of(document, environment), None if role is None else Role(role)
        emit(form, partial(vectors_json, observation, one), partial(vectors_table, observation, one), observation.notes)
        return
    if vectors is not None and (num_ranks is not None or role is not None):
        raise click.UsageError("--vectors states ranks and roles; omit --ranks and --role.")
    plan = plan_of(document, environment, answers=True)
    dispatcher, data = Dispatcher(plan), plan.parallel.data
    if vectors is not None:
        show_notes(assumed())
        others = 0
        for vector in read_vectors(vectors, getattr(vectors, "name", "<stdin>"), dispatcher):
            if data > 1 and len(vector.ranks) != data:
                others += 1
                if others == 1:
                    click.echo(f"note: a line has {len(vector.ranks)} ranks, but the plan has {data}", err=True)
            click.echo(json.dumps(plain(rank_report(dispatcher, vector))))
        return
    shown_role = plan.role(role or Role.TARGET).role
    if recorded is not None:
        found = recorded_vectors(str(recorded), dispatcher, shown_role)
        reports = tuple(rank_report(dispatcher, vector, title) for title, vector in found[:MOST_SHOWN])
        more = len(found) - len(reports)
        show_notes([f"{counted(more, 'other vector')} occurred less often"] if more else [])
        emit(form, partial(cases_json, reports), partial(cases_table, reports, shown_role), assumed())
        return
    count = num_ranks or (min(data, MAX_RANKS) if data > 1 else DEFAULT_RANKS)
    reports = cases(dispatcher, shown_role, count)
    emit(form, partial(cases_json, reports), partial(cases_table, reports, shown_role), assumed())
