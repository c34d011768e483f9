"""``bench``: measure a plan on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from capture_planner.cli import options
from capture_planner.cli.common import Output, command_line, machine_plan, progress_bars, read_document, to_json
from capture_planner.cli.ending import exit_interrupted
from capture_planner.cli.options import ParsedText, dashed, flag, option
from capture_planner.plugins import registry
from capture_planner.records.plan import Plan
from capture_planner_runner._extras import refuse_missing
from capture_planner_runner.cli.options import NUMBERS, acceptance, compiling

if TYPE_CHECKING:
    from capture_planner_runner.bench import BenchReport

FIGURES = ("decode", "preparation", "chain", "throughput", "capture", "pools")
"""Figures of ``bench.record``, repeated because that imports torch."""

TOKENS = click.IntRange(1, 1 << 20)

LOAD = ("load_requests", "prompt_tokens", "output_tokens")


def _figures(text: str) -> tuple[str, ...]:
    """Return the names, each once, in the order in which they are measured."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in FIGURES:
            raise ValueError(f"{name!r} is not a figure; choose from {', '.join(FIGURES)}.")
    return tuple(name for name in FIGURES if name in names)


@click.command()
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
@acceptance
@options.seed
@options.page_size(None, " Default: 64, or 16 on a CPU.")
@options.pages("enough for the workload")
@options.threads
@compiling
@options.admit("Measure")
@options.output("Write the record as JSON, as --format json prints it.")
@options.progress
@options.environment
@options.reports()
def bench(plan_file: str, environment: str | None, to: Output, **values: Any) -> None:
    """Measure a plan on this machine, each figure against a baseline from the same run.

    Figures: a decode step against its graphs alone and against eager; the host time of a step; a draft chain in one
    graph; tokens per second; the capture of the plan; a shared pool. Times are medians, from CUDA events on a GPU.
    Without --environment, a spec is planned for this machine. Ctrl-C ends with a record of the figures measured so far.
    """
    _refuse_unused(values)
    refuse_missing()
    from capture_planner_runner.host import gpu_environment

    report = _measure(machine_plan(read_document(plan_file), environment, gpu_environment), values)
    from capture_planner_runner.report.bench import bench_report

    to.show(lambda: report, lambda: bench_report(report))
    to.write(values["output"], lambda: to_json(report) + "\n")
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


def _measure(plan: Plan, values: dict[str, Any]) -> BenchReport:
    import torch

    from capture_planner_runner.bench import Bench, measure
    from capture_planner_runner.bench.measure import default_load

    torch.set_num_threads(values["threads"])
    load = {name: values[name] for name in LOAD if values[name] is not None}
    same = ("model", "seed", "requests", "page_size", "pages", "only", "compare", "compile", "quick")
    settings = Bench(
        **{name: values[name] for name in (*same, "any_environment", "any_plan")},
        acceptance=values["acceptance"] or (),
        load=default_load(quick=values["quick"], **load),
        command=command_line(),
    )
    return measure(plan, registry.load_backends(), settings, progress_bars(values["progress"]))
