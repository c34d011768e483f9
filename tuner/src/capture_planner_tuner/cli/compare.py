"""``compare``: two deployments side by side, each a plan, a spec, an observation, or an engine's command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import (
    FINDINGS,
    ChosenMachine,
    Output,
    machine_named,
    plan_document,
    read_document,
    show_notes,
)
from capture_planner.cli.options import FILE
from capture_planner.cli.traffic import load_options, reading_bar, source_options
from capture_planner.codec import Document
from capture_planner.engines import emulate, engines, is_engine
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.logs import read_traffic
from capture_planner.engines.parsing import near
from capture_planner.errors import FlagError
from capture_planner.planning.measured.steps import steps_of
from capture_planner.records._base import digest
from capture_planner.records.batch import Batch
from capture_planner.records.environment import Environment
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.report.plain import plain
from capture_planner_tuner.auto.decisions import other_facts
from capture_planner_tuner.auto.start import kept_plan
from capture_planner_tuner.journal import PromiseVerdict
from capture_planner_tuner.promises import PromiseCheck, check_promise
from capture_planner_tuner.report.compare import side_by_side_report
from capture_planner_tuner.side_by_side import compare as side_by_side


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--traffic",
    "sources",
    metavar="FILE",
    multiple=True,
    help="A traffic file, or any source that traffic reads; may be repeated: count its batches instead of all "
    "admissible ones. A trace of requests runs through the scheduler of each side.",
)
@click.option(
    "--plan",
    "plan_file",
    type=FILE,
    help="The plan that B was observed under, for its promise. Default: where launch --auto keeps it.",
)
@load_options
@options.environment
@options.download
@options.reports()
def compare(
    a: str, b: str, sources: tuple[str, ...], plan_file: Path | None, environment: str | None, to: Output, **values: Any
) -> None:
    """Compare two deployments side by side: graphs, covered batches, and padding.

    A and B are each a PLAN, a SPEC, an OBSERVATION, or an engine's command line in quotes that starts with
    its name, such as "vllm --max-num-seqs 256". Without --environment, specs and engines use the machine of the plan.

    Of two observations, where B ran under a plan that measurements chose, the first lines say whether the plan kept
    its promise; a broken one has exit code 2.
    """
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
    # Plans and observations have a machine of their own: nothing is assumed for them.
    assumptions = machine.assumptions if None in loaded else ()
    for letter, side in (("A", left), ("B", right)):
        assumptions += tuple(f"{letter}: {each}" for each in (side.assumptions if isinstance(side, Emulation) else ()))
    loads = [_load(side, sources, values) for side in (left, right)] if sources else []
    # Not strict: without traffic there are no loads.
    notes = [f"{letter}: {note}" for letter, load in zip("AB", loads, strict=False) for note in load[1]]
    # Notes that are the same on both sides are shown once, without a letter.
    shared = loads[0][1] if loads and loads[0][1] == loads[1][1] else None
    assumptions += tuple(notes if shared is None else shared)
    compared = side_by_side(left, right, (loads[0][0], loads[1][0]) if loads else None, names=(a, b))
    checked = _checked(b, documents, plan_file)
    promise = {} if checked is None else {"promise": checked[0]}
    report = partial(side_by_side_report, compared, checked)
    to.show(lambda: plain(promise) | plain(compared), report, assumptions)
    if checked is not None and checked[0].verdict is PromiseVerdict.BROKEN:
        click.get_current_context().exit(FINDINGS)


def _checked(b: str, documents: Sequence[Document | None], plan_file: Path | None) -> tuple[PromiseCheck, str] | None:
    """Return what became of the promise of B's plan, and what the plan is called; None without a promise."""
    observed = [each.load(Observation) if each is not None and each.is_observation else None for each in documents]
    before, after = observed
    if after is None or after.plan is None:
        if plan_file is not None:
            raise click.UsageError(f"--plan goes with an observation under a plan as B; {b} is none.")
        return None
    found = plan_file or kept_plan(Path(b), after.plan)
    if found is None:
        # Only of two observations is a verdict expected: with another A, a missing plan is no news.
        if before is not None:
            show_notes([f"B ran under the plan {after.plan}; give it as --plan FILE, and its promise is checked"])
        return None
    plan = codec.load_plan(found)
    if digest(plan) != after.plan:
        raise click.UsageError(f"--plan {found} is the plan {digest(plan)}; B ran under {after.plan}.")
    if plan.promise is None:
        show_notes([f"{found} promised nothing: its sizes were not chosen by costs of this engine itself"])
        return None
    unlike = None if before is None else _unlike(before, after)
    show_notes([] if unlike is None else [unlike])
    return check_promise(plan.promise, after, before if unlike is None else None), str(found)


def _unlike(before: Observation, after: Observation) -> str | None:
    """Return why A does not show what B's engine takes without its plan; None where it does."""
    if before.plan == after.plan:
        return "A ran under B's plan, too: the promise is checked by B alone"
    other = ", ".join(other_facts(before, after))
    return f"A is another deployment than B ({other}): the promise is checked by B alone" if other else None


def _load(
    side: Plan | Emulation, sources: Sequence[str], values: Mapping[str, Any]
) -> tuple[Mapping[Batch, int], tuple[str, ...]]:
    """Return the steps that a side makes of traffic, and what is to be said of them."""
    # Read once for each side: a trace of requests runs through that side's own scheduler.
    with reading_bar(sources, None) as advance:
        traffic, _ = read_traffic(sources, source_options(values).completed(side, None, None), advance)
    steps = steps_of(traffic, side)
    return steps.counts, (*traffic.notes, *steps.notes, *steps.assumptions)


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
    try:
        name, *flags = shlex.split(argument)
    except ValueError as error:
        raise click.UsageError(f"{letter}: {argument!r}: {error}; quote it as a shell would.") from None
    try:
        return emulate(name, flags, environment)
    except FlagError as error:
        raise type(error)(problem.under((letter,)) for problem in error.problems) from None
