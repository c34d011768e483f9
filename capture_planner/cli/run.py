"""``run``: execute a plan on this machine, and report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capture_planner import codec
from capture_planner._extras import refuse_missing
from capture_planner.cli.common import (
    FINDINGS,
    INTERRUPTED,
    any_options,
    emit,
    emit_file,
    environment_option,
    format_option,
    is_plan_file,
    model_option,
    page_size_option,
    pages_option,
    plan_of,
    prepare_torch,
    progress_bars,
    progress_option,
    refuse_places,
    seed_option,
    threads_option,
)
from capture_planner.errors import InvalidValue
from capture_planner.plugins import registry
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted

if TYPE_CHECKING:
    from capture_planner.runtime.launch import Drafting, Outcome
    from capture_planner.runtime.ledger import RunReport
    from capture_planner.runtime.serving.workload import Decode, Request


class Range(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """``N`` or ``LOW:HIGH``, whole numbers of at least 1."""

    name = "N|LOW:HIGH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return both ends."""
        if isinstance(value, tuple):
            return value
        low, colon, high = value.partition(":")
        try:
            ends = int(low), int(high if colon else low)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor LOW:HIGH.", param, ctx)
        if not 1 <= ends[0] <= ends[1]:
            self.fail(f"{value!r} must be at least 1, and LOW no more than HIGH.", param, ctx)
        return ends


class Size(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Bytes, as in ``512MiB``."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return bytes."""
        try:
            return value if isinstance(value, int) else codec.parse_bytes(value)
        except InvalidValue as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC")
@model_option
@click.option(
    "--drafter",
    default="random",
    metavar="copy|miss|chance|random|FOLDER",
    show_default=True,
    help="Where drafts come from: the target's own answers, anything but them, a mixture, a head with "
    "random weights, or a folder with an EAGLE or EAGLE-3 head.",
)
@click.option(
    "--chance",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="How often `--drafter chance` is right.",
)
@click.option("--requests", type=click.IntRange(0), help="Serve so many; left out: 16, or all of a file.")
@click.option("--trace", type=click.Path(path_type=Path), help="CSV of arrivals, prompt and output lengths.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="A prompt a line, or .jsonl; needs --tokenizer."
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Folder of the tokenizer.")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Generated requests a second; left out: all arrive at once.",
)
@click.option(
    "--prompt-tokens", type=Range(), default="1:64", show_default=True, help="Length of a generated prompt."
)
@click.option(
    "--output-tokens",
    type=Range(),
    default="16:32",
    show_default=True,
    help="Tokens asked for by a generated request; by a prompt of a file, at most HIGH.",
)
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Play a trace so many times faster.",
)
@click.option(
    "--step-time",
    type=click.FloatRange(0, min_open=True),
    default=0.01,
    show_default=True,
    help="Seconds by which a step moves the clock of arrivals.",
)
@click.option("--clip", is_flag=True, help="Cut requests that are longer than the model.")
@seed_option
@page_size_option(16)
@threads_option
@pages_option("up to 1 GiB")
@click.option("--graph-memory", type=Size(), help="Bytes a pool may take; else the plan's budget.")
@click.option("--strict", is_flag=True, help="Stop where a graph does not fit, instead of leaving it out.")
@click.option("--eager", is_flag=True, help="Capture nothing.")
@click.option("--verify", is_flag=True, help="Compare with plain greedy decoding; exit code 2 if it differs.")
@click.option(
    "--compare",
    is_flag=True,
    help="Run each step eager too; stop with exit code 2 at the first tensor that differs.",
)
@click.option("--trust", is_flag=True, help="Replay without guards.")
@click.option("--debug", is_flag=True, help="Check every index field at every step.")
@click.option("--poison", is_flag=True, help="Spoil every buffer and pool before each forward.")
@any_options("Run")
@click.option("--html", type=click.Path(path_type=Path), help="Write the report as a page with plots.")
@progress_option
@environment_option
@format_option()
def run(plan_file: str, environment: str | None, form: str, **given: Any) -> None:
    """Execute a plan: reserve, capture, serve a stream of requests, report.

    On a machine without a GPU graphs are recorded, operator by operator, and replayed on the same
    storage. Requests are generated, or come from a trace or from prompts. Ctrl-C ends in a complete
    report of what ran.
    """
    _refuse_contradictions(given)
    refuse_places(plan_file, {"--html": given["html"]})
    _refuse_unused(given)
    refuse_missing()
    plan = _plan(plan_file, environment)
    outcome = _launch(plan, given)
    report = outcome.report
    from capture_planner.report.run import run_data, run_tables

    emit(form, lambda: run_data(report) | {"differing": outcome.differing}, lambda: run_tables(report))
    emit_file(form, given["html"], lambda: _page(report))
    _end(outcome, as_json=form == "json")


def _page(report: RunReport) -> str:
    from capture_planner.report.page import run_page

    return run_page(report)


def _end(outcome: Outcome, *, as_json: bool) -> None:
    """Say what was found by comparing, and leave with the exit code that fits."""
    context, comparison = click.get_current_context(), outcome.report.comparison
    if comparison is not None:
        click.echo(comparison.says, err=as_json)
    if outcome.differing is not None:
        count = len(outcome.differing)
        compared = [done for done in outcome.report.served if done.tokens]
        served, partly = counted(len(compared), "request"), sum(done.finished is None for done in compared)
        says = (
            f"{counted(count, 'request')} of {served} differ from plain greedy decoding: "
            f"{', '.join(outcome.differing[:5])}"
            if count
            else f"verified: {served}, each the same as plain greedy decoding"
        )
        if partly:
            says += f"; {partly} of them cut off, and compared as far as they came"
        click.echo(says, err=as_json)
    if outcome.report.interrupted:
        context.exit(INTERRUPTED)
    if outcome.differing or (comparison is not None and comparison.difference is not None):
        context.exit(FINDINGS)


def _plan(file: str, environment: str | None) -> Plan:
    """Read a plan, or plan a spec for this machine, which is the one that will run it."""
    if environment is None and not is_plan_file(file):
        environment = "cpu"
        click.echo("note: no --environment was named, so this is for cpu", err=True)
    return plan_of(file, environment)


def _launch(plan: Plan, given: dict[str, Any]) -> Outcome:
    from capture_planner.runtime.launch import Choices, launch
    from capture_planner.runtime.options import Options

    prepare_torch(given["threads"])
    source, decode = _workload(given)
    choices = Choices(
        model=given["model"],
        drafter=_drafter(given["drafter"]),
        chance=given["chance"],
        seed=given["seed"],
        page_size=given["page_size"],
        pages=given["pages"],
        graph_memory=given["graph_memory"],
        step_seconds=given["step_time"],
        clip=given["clip"],
        eager=given["eager"],
        verify=given["verify"],
        any_environment=given["any_environment"],
        any_plan=given["any_plan"],
        options=Options(
            trust=given["trust"],
            debug=given["debug"],
            poison=given["poison"],
            strict=given["strict"],
            compare=given["compare"],
        ),
    )
    return launch(
        plan, registry.load_backends(), source, choices, progress_bars(given["progress"]), decode=decode
    )


def _workload(given: dict[str, Any]) -> tuple[Callable[[int], Sequence[Request]], Decode | None]:
    """Return what makes the requests for a vocabulary, and what turns tokens into text."""
    from capture_planner.runtime.serving.workload import from_prompts, from_trace, generated

    seed, limit = given["seed"], given["requests"]
    if given["prompts"] is not None:
        requests, decode = from_prompts(
            given["prompts"], given["tokenizer"], max_new_tokens=given["output_tokens"][1]
        )
        return lambda vocab_size: requests[:limit], decode
    if given["trace"] is not None:
        return (
            lambda vocab_size: from_trace(
                given["trace"], vocab_size=vocab_size, seed=seed, limit=limit, speed=given["speed"]
            ),
            None,
        )
    return (
        lambda vocab_size: generated(
            16 if limit is None else limit,
            seed=seed,
            rate=given["rate"],
            prompt_tokens=given["prompt_tokens"],
            output_tokens=given["output_tokens"],
            vocab_size=vocab_size,
        ),
        None,
    )


_DRAFTERS = ("copy", "miss", "chance", "random")


def _drafter(name: str) -> Drafting:
    return name if name in _DRAFTERS else Path(name)  # type: ignore[return-value]


def _refuse_contradictions(given: dict[str, Any]) -> None:
    if given["trace"] is not None and given["prompts"] is not None:
        raise click.UsageError("Give one of --trace and --prompts.")
    if (given["prompts"] is None) != (given["tokenizer"] is None):
        raise click.UsageError("--prompts and --tokenizer go together.")
    if given["trust"] and given["debug"]:
        raise click.UsageError("--trust leaves checks out and --debug adds them; give one.")
    if given["drafter"] not in _DRAFTERS and not Path(given["drafter"]).exists():
        raise click.UsageError(
            f"--drafter is {', '.join(_DRAFTERS)} or a folder, and there is no folder {given['drafter']}."
        )
    for name in ("step_time", "chance", "rate"):
        if given[name] is not None and not math.isfinite(given[name]):
            raise click.UsageError(f"--{name.replace('_', '-')} is {given[name]}; give a finite number.")


_GENERATED = {"rate", "prompt_tokens"}
_APPLIES: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "chance": ("--drafter chance", lambda given: given["drafter"] == "chance"),
    "speed": ("--trace", lambda given: given["trace"] is not None),
    "output_tokens": ("generated requests or --prompts", lambda given: given["trace"] is None),
    "strict": ("captures, so without --eager", lambda given: not given["eager"]),
    "graph_memory": ("captures, so without --eager", lambda given: not given["eager"]),
    "trust": ("graphs, so without --eager", lambda given: not given["eager"]),
    "compare": ("graphs, so without --eager", lambda given: not given["eager"]),
} | dict.fromkeys(
    _GENERATED, ("generated requests", lambda given: given["trace"] is None and given["prompts"] is None)
)


def _refuse_unused(given: dict[str, Any]) -> None:
    """Refuse an option that somebody gave and that would do nothing."""
    context = click.get_current_context()
    for name, (where, applies) in _APPLIES.items():
        stated = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if stated and not applies(given):
            raise click.UsageError(f"--{name.replace('_', '-')} goes with {where}.")
