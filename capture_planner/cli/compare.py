"""``compare``: two deployments side by side, each a plan, a spec, an observation, or an engine's command line."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import click

from capture_planner.analysis.trace import read_trace
from capture_planner.cli import options
from capture_planner.cli.common import ChosenMachine, emit, machine_named, plan_document, read_document
from capture_planner.cli.options import FILE
from capture_planner.codec import Document
from capture_planner.engines import emulate, engines, is_engine
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.observed import emulation_of
from capture_planner.engines.parsing import near
from capture_planner.engines.side_by_side import compare as side_by_side
from capture_planner.errors import FlagError
from capture_planner.records.environment import Environment
from capture_planner.records.observation import Observation
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
@options.download
@options.formats()
def compare(a: str, b: str, traffic: Path | None, environment: str | None, form: str) -> None:
    """Compare two deployments side by side: graphs, covered batches, and padding.

    A and B are each a PLAN, a SPEC, an OBSERVATION, or an engine's command line in quotes that starts with
    its name, such as "vllm --max-num-seqs 256". Without --environment, specs and engines use the machine of the plan.
    """
    requests = None if traffic is None else read_trace(traffic)
    documents = [_document(letter, argument) for letter, argument in (("A", a), ("B", b))]
    loaded = [_loaded(document) for document in documents]
    machines = [each.environment for each in loaded if isinstance(each, Plan)]
    if environment is not None and None not in loaded:
        raise click.UsageError(
            "A and B are plans or observations, each of its own machine; --environment goes with a spec or an engine."
        )
    machine = machine_named(environment) if environment is not None or not machines else ChosenMachine(machines[0])
    left, right = (
        each or _deployment(letter, argument, document, machine.environment)
        for letter, argument, document, each in zip("AB", (a, b), documents, loaded, strict=True)
    )
    assumptions = machine.assumptions if None in loaded else ()
    for letter, side in (("A", left), ("B", right)):
        assumptions += tuple(f"{letter}: {each}" for each in (side.assumptions if isinstance(side, Emulation) else ()))
    compared = side_by_side(left, right, requests, names=(a, b))
    emit(form, lambda: compared, partial(side_by_side_table, compared), assumptions)


def _loaded(document: Document | None) -> Plan | Emulation | None:
    """Return the plan or the observation in a document; None for a spec, or no document."""
    if document is not None and document.is_observation:
        return emulation_of(document.load(Observation))
    return document.load(Plan) if document is not None and document.is_plan else None


def _document(letter: str, argument: str) -> Document | None:
    """Read a plan or a spec; None for the command line of an engine."""
    word = (argument.split(maxsplit=1) or [""])[0]
    if is_engine(word):
        return None
    if argument != "-" and (not argument.strip() or not Path(argument).exists()):
        aliases = {alias: name for name, item in engines().items() for alias in item.value.aliases}
        match = near(word, engines()) or aliases.get(word, "")
        remedy = f"did you mean {match}? {letter} is" if match else f"{letter} can be"
        raise click.UsageError(
            f"{letter}: {argument if argument.strip() else repr(argument)}: cannot be read: no such file; {remedy} "
            "a plan, spec or observation file, or an engine's command line in quotes, starting with one of "
            f"{', '.join(engines())}."
        )
    return read_document(argument)


def _deployment(letter: str, argument: str, document: Document | None, environment: Environment) -> Plan | Emulation:
    if document is not None:
        return plan_document(document, ChosenMachine(environment))
    return _emulated(letter, argument, environment)


def _emulated(letter: str, argument: str, environment: Environment) -> Emulation:
    try:
        name, *flags = shlex.split(argument)
    except ValueError as error:
        raise click.UsageError(f"{letter}: {argument!r}: {error}; quote it as a shell would.") from None
    try:
        return emulate(name, flags, environment)
    except FlagError as error:
        raise type(error)(problem.under((letter,)) for problem in error.problems) from None
