"""``bench``: measure a plan on this machine."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capture_planner import codec, registry
from capture_planner.cli.common import (
    emit,
    environment_option,
    format_option,
    is_plan_file,
    plan_of,
    planned,
    progress_bars,
    refuse_missing,
    refuse_unwritable,
)
from capture_planner.cli.run import INTERRUPTED
from capture_planner.codec import dumps_json
from capture_planner.plan import Plan

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
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Folder of a Hugging Face causal model, or its config.json; without weights, random ones. "
    "Left out: a Llama of the plan's numbers with random weights.",
)
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
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 62) - 1),
    default=0,
    show_default=True,
    help="Of all that is random.",
)
@click.option("--page-size", type=click.IntRange(1, 1024), help="Tokens a page; left out: 64, on a CPU 16.")
@click.option("--pages", type=click.IntRange(1), help="Pages of the KV cache; left out: what is needed.")
@click.option(
    "--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="Threads of an operator."
)
@click.option("--any-plan", is_flag=True, help="Measure although the lint finds errors.")
@click.option("--any-environment", is_flag=True, help="Measure although the plan is for another machine.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the record as JSON, as --format json.")
@click.option("--page", type=click.Path(path_type=Path), help="Write the record as a page with plots.")
@click.option("--progress/--no-progress", default=None, help="Show bars; left out: on a terminal.")
@environment_option
@format_option()
def bench(plan_file: str, environment: str | None, form: str, **given: Any) -> None:
    """Measure a plan on this machine: each figure with what it is compared with, of the same run.

    A decode step against its graphs alone and against eager; the host's part of a step; a draft chain
    in one graph; tokens per second; the capture of the plan; a shared pool. Times are medians, by CUDA
    events where there is a GPU. A spec without --environment is planned for this machine. Ctrl-C ends in
    a record of the figures that were measured.
    """
    _refuse_places({"the plan": Path(plan_file)}, given)
    _refuse_unused(given)
    refuse_missing()
    report = _measure(_plan(plan_file, environment), given)
    from capture_planner.report.bench import bench_data, bench_page, bench_tables

    emit(form, lambda: bench_data(report), lambda: bench_tables(report))
    if given["output"] is not None:
        codec.write(str(given["output"]), dumps_json(bench_data(report)) + "\n")
        click.echo(f"written to {given['output']}", err=form == "json")
    if given["page"] is not None:
        codec.write(str(given["page"]), bench_page(report))
        click.echo(f"written to {given['page']}", err=form == "json")
    if report.interrupted:
        click.get_current_context().exit(INTERRUPTED)
    if report.failed:
        # What broke is in the record; what was measured is whole, and was written.
        click.get_current_context().exit(1)


def _refuse_places(taken: dict[str, Path], given: dict[str, Any]) -> None:
    """Refuse files that cannot be written, or that would overwrite each other or what is measured."""
    for option in ("output", "page"):
        name, file = f"--{option}", given[option]
        refuse_unwritable(name, file)
        if file is None:
            continue
        try:
            same = [other for other, path in taken.items() if path.resolve() == file.resolve()]
            _try_to_write(file.resolve())
        except (OSError, RuntimeError) as error:
            says = getattr(error, "strerror", None) or error
            raise click.UsageError(f"{name} {file} cannot be written: {says}.") from None
        if same:
            raise click.UsageError(f"{name} {file} is the file of {same[0]} too; name another.")
        taken[name] = file


def _try_to_write(target: Path) -> None:
    """Raise ``OSError`` where ``codec.write`` would not get its file into place; leave nothing behind."""
    if not target.exists() or target.is_file():
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            return
    if not os.access(target, os.W_OK):
        raise PermissionError(None, "Permission denied")


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
    import torch
    from transformers.utils.logging import disable_progress_bar

    from capture_planner.bench import Bench, measure
    from capture_planner.bench.measure import default_load

    torch.set_num_threads(given["threads"])
    disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
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
    return measure(plan, registry.load(), chosen, progress_bars(given["progress"]))


def _named(argument: str) -> str:
    """Leave a path's folder out of the record: it says where somebody keeps files, and nothing else."""
    return Path(argument).name if Path(argument).is_absolute() else argument
