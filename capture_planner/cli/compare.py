"""``compare``: two deployments side by side, each a plan, a spec, or an engine's command line."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import click

from capture_planner.cli import options
from capture_planner.cli.common import emit, emulated, environment_named, plan_document, read_document
from capture_planner.cli.options import FILE
from capture_planner.codec import Document
from capture_planner.engines import engines
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.parsing import near
from capture_planner.engines.side_by_side import compare as side_by_side
from capture_planner.errors import FlagError
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan
from capture_planner.report.side_by_side import side_by_side_table


@click.command(short_help="Compare two deployments side by side.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--traffic",
    type=FILE,
    help="CSV of arrival times, prompt and output lengths: count its batches instead of all admissible ones.",
)
@options.environment
@options.formats()
def compare(a: str, b: str, traffic: Path | None, environment: str | None, form: str) -> None:
    """Compare two deployments side by side: graphs, covered batches, and padding.

    A and B are each a PLAN, a SPEC, or an engine's command line in quotes that starts with its name, such
    as "vllm --max-num-seqs 256". Without --environment, specs and engines use the machine of the plan.
    """
    requests = None
    if traffic is not None:
        from capture_planner.runtime.serving.workload.trace import read_trace

        requests = read_trace(traffic)
    documents = [_document(letter, argument) for letter, argument in (("A", a), ("B", b))]
    plans = [each.load(Plan) if each is not None and each.is_plan else None for each in documents]
    machines = [plan.environment for plan in plans if plan is not None]
    if environment is not None and len(machines) == len(plans):
        raise click.UsageError(
            "A and B are plans, each for its own machine; --environment goes with a spec or an engine."
        )
    machine = machines[0] if machines and environment is None else environment_named(environment)
    left, right = (
        _emulated(letter, argument, machine) if document is None else plan or plan_document(document, machine)
        for letter, argument, document, plan in zip("AB", (a, b), documents, plans, strict=True)
    )
    compared = side_by_side(left, right, requests, names=(a, b))
    emit(form, lambda: compared, partial(side_by_side_table, compared))


def _document(letter: str, argument: str) -> Document | None:
    """Read a plan or a spec; None for the command line of an engine."""
    word = (argument.split(maxsplit=1) or [""])[0]
    if word in engines():
        return None
    if argument != "-" and (not argument.strip() or not Path(argument).exists()):
        aliases = {alias: name for name, item in engines().items() for alias in item.value.aliases}
        match = near(word, engines()) or aliases.get(word, "")
        remedy = f"did you mean {match}? {letter} is" if match else f"{letter} can be"
        raise click.UsageError(
            f"{letter}: {argument if argument.strip() else repr(argument)}: cannot be read: no such file; {remedy} "
            f"a plan or spec file, or an engine's command line in quotes, starting with one of {', '.join(engines())}."
        )
    return read_document(argument)


def _emulated(letter: str, argument: str, environment: Environment) -> Emulation:
    try:
        name, *flags = shlex.split(argument)
    except ValueError as error:
        raise click.UsageError(f"{letter}: {argument!r}: {error}; quote it as a shell would.") from None
    try:
        return emulated(name, flags, environment)
    except FlagError as error:
        raise type(error)(problem.under((letter,)) for problem in error.problems) from None
