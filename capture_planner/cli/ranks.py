"""The command ``ranks``: what data-parallel ranks run together."""

from __future__ import annotations

import json
from functools import partial
from typing import IO

import click

from capture_planner.analysis.data_parallel import MAX_RANKS, MIN_RANKS, agree
from capture_planner.cli.common import emit, environment_option, format_option, plan_of
from capture_planner.cli.jsonl import read_vectors
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import Role
from capture_planner.report.ranks import agreement_data, cases, cases_data, cases_table

DEFAULT_RANKS = 4


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC")
@click.option("--vectors", type=click.File("rb"), help="Answer each line of a JSON-lines file; - is stdin.")
@click.option(
    "--ranks",
    "num_ranks",
    type=click.IntRange(min=MIN_RANKS, max=MAX_RANKS),
    help=f"Data-parallel ranks of the table; the plan's own number if left out, or {DEFAULT_RANKS}.",
)
@click.option(
    "--role", type=click.Choice([r.value for r in Role]), help="Role of the table; target if left out."
)
@environment_option
@format_option()
def ranks(
    plan_file: str,
    vectors: IO[bytes] | None,
    num_ranks: int | None,
    role: str | None,
    environment: str | None,
    form: str,
) -> None:
    """Say what data-parallel ranks run together: the same graph, or all of them none.

    Without --vectors, a table of what such a deployment meets. A line of --vectors is a list with an
    item for each rank: a batch as in explain --batches, with "captured": false where the rank uses no
    graph, or "missing": true where it lost the one that all would replay; or null for an idle rank. Its
    answer is {"role", "mode", "entry", "reason", "joint", "draft_tokens", "ranks"}.
    """
    if vectors is not None and (num_ranks is not None or role is not None):
        raise click.UsageError("--vectors has the ranks and the roles; leave out --ranks and --role.")
    asked = plan_of(plan_file, environment)
    dispatcher = Dispatcher(asked)
    data, told = asked.parallel.data, False
    if vectors is not None:
        for vector in read_vectors(vectors, getattr(vectors, "name", "<stdin>"), dispatcher):
            if data > 1 and len(vector.ranks) != data and not told:
                told = True
                click.echo(f"note: a line has {len(vector.ranks)} ranks, and the plan has {data}", err=True)
            click.echo(json.dumps(agreement_data(dispatcher, agree(dispatcher, vector))))
        return
    shown_role = asked.role(role or Role.TARGET).role
    shown = cases(asked, shown_role, num_ranks or (min(data, MAX_RANKS) if data > 1 else DEFAULT_RANKS))
    emit(form, partial(cases_data, dispatcher, shown), partial(cases_table, dispatcher, shown, shown_role))
