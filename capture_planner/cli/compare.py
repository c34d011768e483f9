"""``compare``: two deployments side by side, each a plan, a spec, or an engine's command line."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import click

from capture_planner.cli.common import (
    emit,
    emulated,
    environment_named,
    environment_option,
    format_option,
    is_plan_file,
    planned,
)
from capture_planner.codec import load_plan
from capture_planner.engines import ENGINES
from capture_planner.engines.compare import compare as side_by_side
from capture_planner.engines.core import Emulation
from capture_planner.environment import Environment
from capture_planner.plan import Plan
from capture_planner.report.side_by_side import side_by_side_table


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--traffic",
    type=click.Path(path_type=Path),
    help="CSV of arrivals, prompt and output lengths: count the batches that it makes, in place of all.",
)
@environment_option
@format_option()
def compare(a: str, b: str, traffic: Path | None, environment: str | None, form: str) -> None:
    """Put two deployments side by side: graphs, what is covered, and how far batches are padded.

    A and B are a PLAN, a SPEC, or the command line of an engine in quotes, its name first, such as
    "vllm --max-num-seqs 256". Without --environment, what is no plan is for the machine of the plan.
    """
    requests = None
    if traffic is not None:
        from capture_planner.runtime.workload.trace import read_trace

        requests = read_trace(traffic)
    plans = [None if _is_engine(each) or not is_plan_file(each) else load_plan(each) for each in (a, b)]
    machine = next((plan.environment for plan in plans if plan is not None), None)
    if environment is not None or machine is None:
        machine = None if all(plans) else environment_named(environment)
    sides = [
        plan if plan is not None else _deployed(each, machine)
        for each, plan in zip((a, b), plans, strict=True)
    ]
    compared = side_by_side(sides[0], sides[1], requests, names=(a, b))
    emit(form, compared.data, partial(side_by_side_table, compared))


def _is_engine(named: str) -> bool:
    return named.strip().partition(" ")[0] in ENGINES


def _deployed(named: str, environment: Environment | None) -> Plan | Emulation:
    """Emulate an engine's command line, or plan a spec, for a machine."""
    assert environment is not None, "a plan has one, or else one was named"
    if not _is_engine(named):
        return planned(named, environment)
    name, _, flags = named.strip().partition(" ")
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise click.UsageError(f"{named!r}: {error}; quote it as a shell would.") from None
    return emulated(name, words, environment)
