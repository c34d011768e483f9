"""``bench``: measure a plan on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capture_planner._extras import refuse_missing
from capture_planner.cli import options
from capture_planner.cli.common import (
    ChosenMachine,
    emit,
    emit_file,
    plan_document,
    plan_of,
    prepare_torch,
    progress_bars,
    read_document,
    refuse_outputs,
    to_json,
)
from capture_planner.cli.options import FILE, NUMBERS, ParsedText, dashed, flag, option
from capture_planner.cli.signals import exit_interrupted
from capture_planner.codec import Document
from capture_planner.plugins import registry
from capture_planner.records.plan import Plan

if TYPE_CHECKING:
    from capture_planner.bench import BenchReport

FIGURES = ("decode", "preparation", "chain", "throughput", "capture", "pools")
"""As in ``bench.record``, which needs torch's side of the package."""

TOKENS = click.IntRange(1, 1 << 20)

LOAD = ("load_requests", "prompt_tokens", "output_tokens")


def _figures(text: str) -> tuple[str, ...]:
    """Return the names, each once, in the order in which they are measured."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in FIGURES:
            raise ValueError(f"{name!r} is not a figure; choose from {', '.join(FIGURES)}.")
    return tuple(name for name in FIGURES if name in names)


@click.command(short_help="Measure a plan on this machine.")
@click.argument("plan_file", metavar="PLAN|SPEC")
@options.model
@click.option(
    "--only",
    type=ParsedText("FIGURE,...", _figures),
    default=",".join(FIGURES),
    help=f"Figures to measure: {', '.join(FIGURES)}.",
)
@click.option(
    "--requests",
    type=NUMBERS,
    help="Batch sizes of the decode figures; each needs a graph. Default: 1,8,64,256, as far as planned.",
)
@click.option("--load-requests", type=click.IntRange(1, 1 << 16), help="Requests in the throughput load. Default: 64.")
@click.option("--prompt-tokens", type=TOKENS, help="Prompt length in the throughput load. Default: 128, or what fits.")
@click.option("--output-tokens", type=TOKENS, help="Output length in the throughput load. Default: 128, or what fits.")
@option(
    "--compare/--no-compare",
    default=True,
    help="Compare throughput with the continuous batching of transformers, on a GPU.",
)
@flag("--quick", "Use few repeats and a small load, to see that it works.")
@options.acceptance
@options.seed
@options.page_size(None, " Default: 64, or 16 on a CPU.")
@options.pages("enough for the workload")
@options.threads
@options.compiling
@options.admit("Measure")
@click.option("--output", type=FILE, help="Write the record as JSON, as --format json prints it.")
@click.option("--page", type=FILE, help="Write the record as an HTML page with charts.")
@options.progress
@options.environment
@options.formats()
def bench(plan_file: str, environment: str | None, form: str, **values: Any) -> None:
    """Measure a plan on this machine, each figure against a baseline from the same run.

    Figures: a decode step against its graphs alone and against eager; the host time of a step; a draft chain in one
    graph; tokens per second; the capture of the plan; a shared pool. Times are medians, from CUDA events on a GPU.
    Without --environment, a spec is planned for this machine. Ctrl-C ends with a record of the figures measured so far.
    """
    refuse_outputs(plan_file, {"--output": values["output"], "--page": values["page"]})
    _refuse_unused(values)
    refuse_missing()
    report = _measure(machine_plan(read_document(plan_file), environment), values)
    from capture_planner.report.bench import bench_report
    from capture_planner.report.page import page
    from capture_planner.report.terminal import tables

    emit(form, lambda: report, lambda: tables(bench_report(report)))
    emit_file(form, values["output"], lambda: to_json(report) + "\n")
    emit_file(form, values["page"], lambda: page(bench_report(report)))
    if report.interrupted:
        exit_interrupted()
    if report.failed:
        # The record says what broke, and has every figure that was measured.
        click.get_current_context().exit(1)


def _refuse_unused(values: dict[str, Any]) -> None:
    if "throughput" in values["only"]:
        return
    unused = [dashed(name) for name in LOAD if values[name] is not None]
    unused += [] if values["compare"] else ["--no-compare"]
    if unused:
        raise click.UsageError(f"{unused[0]} goes with throughput, which --only leaves out.")


def machine_plan(document: Document, environment: str | None) -> Plan:
    """Return the plan of a document; a spec is planned for this very machine, unless another is named."""
    import torch

    from capture_planner.runtime.host import this_environment

    if environment is not None or document.is_plan or not torch.cuda.is_available():
        return plan_of(document, environment, default="cpu")
    return plan_document(
        document, ChosenMachine(this_environment("here"), ("no --environment given; using this machine",))
    )


def _measure(plan: Plan, values: dict[str, Any]) -> BenchReport:
    from capture_planner.bench import Bench, measure
    from capture_planner.bench.measure import default_load

    prepare_torch(values["threads"])
    load = {name: values[name] for name in LOAD if values[name] is not None}
    same = ("model", "seed", "requests", "page_size", "pages", "only", "compare", "compile", "quick")
    settings = Bench(
        **{name: values[name] for name in (*same, "any_environment", "any_plan")},
        acceptance=values["acceptance"] or (),
        load=default_load(quick=values["quick"], **load),
        command=shlex.join(["capture-planner", *map(without_folder, sys.argv[1:])]),
    )
    return measure(plan, registry.load_backends(), settings, progress_bars(values["progress"]))


def without_folder(argument: str) -> str:
    """Drop the folder of an absolute path: the record is shared, and the folder is private."""
    return Path(argument).name if Path(argument).is_absolute() else argument
