"""``bench``: measure a plan on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capture_planner._extras import refuse_missing
from capture_planner.cli.common import (
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
    planned,
    prepare_torch,
    progress_bars,
    progress_option,
    refuse_places,
    seed_option,
    threads_option,
)
from capture_planner.codec import dumps_json
from capture_planner.plugins import registry
from capture_planner.records.plan import Plan

if TYPE_CHECKING:
    from capture_planner.bench import BenchReport

FIGURES = ("decode", "preparation", "chain", "throughput", "capture", "pools")
"""As in ``bench.record``, which needs torch's side of the package."""

LOAD = {"load_requests": 64, "prompt_tokens": 128, "output_tokens": 128}


class Names(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Figures, with commas between them."""

    name = "FIGURE,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the names, each once, in the order in which they are measured."""
        given = value if isinstance(value, tuple) else tuple(part.strip() for part in value.split(","))
        for name in given:
            if name not in FIGURES:
                self.fail(f"{name!r} is no figure; there are {', '.join(FIGURES)}.", param, ctx)
        return tuple(name for name in FIGURES if name in given)


class Numbers(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Whole numbers of at least 1, with commas between them."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the numbers, each once, the least first."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = {int(part) for part in value.split(",")}
        except ValueError:
            self.fail(f"{value!r} is not whole numbers with commas between them.", param, ctx)
        if min(numbers) < 1 or max(numbers) > 1 << 20:
            self.fail(f"{value!r}: each is at least 1 and at most {1 << 20}.", param, ctx)
        return tuple(sorted(numbers))


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC")
@model_option
@click.option(
    "--only", type=Names(), default=",".join(FIGURES), help=f"Measure some of {', '.join(FIGURES)}."
)
@click.option(
    "--requests",
    type=Numbers(),
    help="Numbers of requests that decode together, each served by a graph; left out: 1,8,64,256, as far as "
    "the plan goes.",
)
@click.option(
    "--load-requests", type=click.IntRange(1, 1 << 16), help="Requests of the throughput; left out: 64."
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1, 1 << 20),
    help="Tokens of their prompts; left out: 128, or what fits.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(1, 1 << 20),
    help="Tokens they ask for; left out: 128, or what fits.",
)
@click.option(
    "--compare/--no-compare",
    default=True,
    show_default=True,
    help="Compare the throughput with transformers' own continuous batching, on a GPU.",
)
@click.option("--quick", is_flag=True, help="Few repeats and a small load: to see that it works.")
@seed_option
@page_size_option(None, "; left out: 64, on a CPU 16")
@pages_option("what is needed")
@threads_option
@any_options("Measure")
@click.option("--output", type=click.Path(path_type=Path), help="Write the record as JSON, as --format json.")
@click.option("--page", type=click.Path(path_type=Path), help="Write the record as a page with plots.")
@progress_option
@environment_option
@format_option()
def bench(plan_file: str, environment: str | None, form: str, **given: Any) -> None:
    """Measure a plan on this machine: each figure with what it is compared with, of the same run.

    A decode step against its graphs alone and against eager; the host's part of a step; a draft chain
    in one graph; tokens per second; the capture of the plan; a shared pool. Times are medians, by CUDA
    events where there is a GPU. A spec without --environment is planned for this machine. Ctrl-C ends in
    a record of the figures that were measured.
    """
    refuse_places(plan_file, {"--output": given["output"], "--page": given["page"]})
    _refuse_unused(given)
    refuse_missing()
    report = _measure(_plan(plan_file, environment), given)
    from capture_planner.report.bench import bench_data, bench_page, bench_tables

    emit(form, lambda: bench_data(report), lambda: bench_tables(report))
    emit_file(form, given["output"], lambda: dumps_json(bench_data(report)) + "\n")
    emit_file(form, given["page"], lambda: bench_page(report))
    if report.interrupted:
        click.get_current_context().exit(INTERRUPTED)
    if report.failed:
        # What broke is in the record; what was measured is whole, and was written.
        click.get_current_context().exit(1)


def _refuse_unused(given: dict[str, Any]) -> None:
    """Refuse an option that somebody gave and that would do nothing."""
    if "throughput" in given["only"]:
        return
    for name in LOAD:
        if given[name] is not None:
            raise click.UsageError(
                f"--{name.replace('_', '-')} goes with throughput, which --only leaves out."
            )
    if not given["compare"]:
        raise click.UsageError("--no-compare goes with throughput, which --only leaves out.")


def _plan(file: str, environment: str | None) -> Plan:
    """Read a plan, or plan a spec for this very machine, unless another is named."""
    import torch

    from capture_planner.runtime.host import this_environment

    if environment is not None or is_plan_file(file):
        return plan_of(file, environment)
    if not torch.cuda.is_available():
        click.echo("note: no --environment was named, so this is for cpu", err=True)
        return plan_of(file, "cpu")
    click.echo("note: no --environment was named, so this is for this machine", err=True)
    return planned(file, this_environment("here"))


def _measure(plan: Plan, given: dict[str, Any]) -> BenchReport:
    from capture_planner.bench import Bench, measure
    from capture_planner.bench.measure import default_load

    prepare_torch(given["threads"])
    stated = {name: given[name] for name in LOAD if given[name] is not None}
    chosen = Bench(
        model=given["model"],
        seed=given["seed"],
        requests=given["requests"],
        page_size=given["page_size"],
        pages=given["pages"],
        load=default_load(quick=given["quick"], **stated),
        only=given["only"],
        compare=given["compare"],
        quick=given["quick"],
        any_environment=given["any_environment"],
        any_plan=given["any_plan"],
        command=shlex.join(["capture-planner", *map(_named, sys.argv[1:])]),
    )
    return measure(plan, registry.load_backends(), chosen, progress_bars(given["progress"]))


def _named(argument: str) -> str:
    """Leave a path's folder out of the record: it says where somebody keeps files, and nothing else."""
    return Path(argument).name if Path(argument).is_absolute() else argument
