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
from capture_planner.engines import engines
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.parsing import near
from capture_planner.engines.side_by_side import compare as side_by_side
from capture_planner.errors import FlagError
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan
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
        from capture_planner.runtime.serving.workload.trace import read_trace

        requests = read_trace(traffic)
    named = {"A": a, "B": b}
    plans = [_plan(letter, each) for letter, each in named.items()]
    machines = [plan.environment for plan in plans if plan is not None]
    if environment is not None and len(machines) == len(plans):
        raise click.UsageError(
            "A and B are plans, each for its machine; --environment goes with a spec or an engine."
        )
    machine = machines[0] if machines and environment is None else environment_named(environment)
    sides = [
        plan if plan is not None else _deployed(letter, each, machine)
        for (letter, each), plan in zip(named.items(), plans, strict=True)
    ]
    compared = side_by_side(sides[0], sides[1], requests, names=(a, b))
    emit(form, compared.data, partial(side_by_side_table, compared))


def _engine(named: str) -> str | None:
    """Return the engine whose command line is named, or None."""
    first = named.split(maxsplit=1)[:1]
    return first[0] if first and first[0] in engines() else None


def _plan(letter: str, named: str) -> Plan | None:
    """Read the plan that is named; None for a spec or an engine."""
    if _engine(named) is not None:
        return None
    if not named.strip() or not Path(named).exists():
        word = (named.split(maxsplit=1) or [""])[0]
        aliases = {alias: name for name, item in engines().items() for alias in item.value.aliases}
        found = near(word, engines()) or aliases.get(word, "")
        remedy = f"did you mean {found}? {letter} is" if found else f"{letter} can be"
        raise click.UsageError(
            f"{letter}: {named if named.strip() else repr(named)}: cannot be read: there is no such file; {remedy} a "
            f"plan or spec file, or an engine's command line in quotes, beginning with one of {', '.join(engines())}."
        )
    return load_plan(named) if is_plan_file(named) else None


def _deployed(letter: str, named: str, environment: Environment) -> Plan | Emulation:
    """Emulate an engine's command line, or plan a spec, for a machine."""
    name = _engine(named)
    if name is None:
        return planned(named, environment)
    try:
        words = shlex.split(named)
    except ValueError as error:
        raise click.UsageError(f"{letter}: {named!r}: {error}; quote it as a shell would.") from None
    try:
        return emulated(name, words[1:], environment)
    except FlagError as error:
        raise type(error)(problem.under((letter,)) for problem in error.problems) from None
