"""``conformance``: put a backend through the suite on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capture_planner.cli import options
from capture_planner.cli.common import FINDINGS, Output, to_json
from capture_planner.cli.ending import exit_interrupted
from capture_planner.cli.options import ParsedText, dashed, flag, option, stated
from capture_planner.errors import CapturePlannerError
from capture_planner.records._base import replace
from capture_planner_conformance._extras import refuse_missing_packages
from capture_planner_runner.cli.options import whole_numbers

if TYPE_CHECKING:
    from capture_planner_conformance import Shape

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of ``numerics.tolerance.TOLERANCES``, repeated because that imports torch."""

MAX_DRAFTS = 8
"""With more draft tokens, a prompt does not fit into the smallest shapes."""

MAX_HEADS = 256


def _heads(text: str) -> tuple[int, ...]:
    query, _, kv = text.partition(":")
    heads = whole_numbers(text, (query, kv), "two whole numbers, as in 4:2")
    if min(heads) < 1 or max(heads) > MAX_HEADS:
        raise ValueError(f"{text!r}: each number must be from 1 to {MAX_HEADS}.")
    if heads[0] % heads[1]:
        raise ValueError(f"{text!r}: Q must be a multiple of KV.")
    return heads


def _drafts(text: str) -> tuple[int, ...]:
    """Return numbers of draft tokens, each once, in ascending order; 0 is without a drafter."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= MAX_DRAFTS for part in parts):
        raise ValueError(f"{text!r}: give whole numbers from 0 to {MAX_DRAFTS}, as in 0,1,3.")
    return tuple(sorted(set(map(int, parts))))


SHAPES = {
    "dtype": "dtype",
    "heads": "heads",
    "head_dim": "head_dim",
    "page_size": "page_size",
    "max_model_len": "longest",
    "window": "windowed",
}
"""Options that name shapes, with the field of a ``Shape`` that they set."""

SEARCHES = (
    *("profile", "thorough", "examples", "steps", "max_reqs", "seed", "drafts", "shrink", "audits", "strict", "jobs"),
)
"""Options of a search; they do not apply to one printed case."""


@click.command()
@click.argument("backend", metavar="NAME")
@option(
    "--profile",
    type=click.Choice(["default", "thorough"]),
    default="default",
    help="How much to try: 150 scenes, or 2,000.",
)
@flag("--thorough", "Same as --profile thorough.")
@click.option("--examples", type=click.IntRange(1), help="Number of scenes. Default: the profile's.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Maximum steps per scene. Default: the profile's.")
@click.option("--max-reqs", type=click.IntRange(1, 256), help="Most requests of a scene. Default: 20.")
@options.seed
@click.option("--dtype", type=click.Choice(DTYPES), multiple=True, help="Data type to test; repeatable.")
@click.option("--heads", type=ParsedText("Q:KV", _heads), multiple=True, help="Query and KV heads to test; repeatable.")
@click.option("--head-dim", type=click.IntRange(1, 1024), multiple=True, help="Head dimension; repeatable.")
@click.option("--page-size", type=click.IntRange(1, 1024), multiple=True, help="Tokens per KV-cache page; repeatable.")
@click.option("--max-model-len", type=click.IntRange(8, 1 << 14), multiple=True, help="Longest sequence; repeatable.")
@click.option(
    "--window/--no-window",
    default=None,
    help="Give half of the layers a sliding window of one page plus one token, or none. Default: try both.",
)
@click.option("--drafts", type=ParsedText("K,...", _drafts), help="Numbers of draft tokens K. Default: 0,1,2,3,5.")
@option("--shrink/--no-shrink", default=True, help="Minimize a failing case.")
@option("--audits/--no-audits", default=True, help="Attack each declared field on its own.")
@click.option("--case", metavar="TEXT|@FILE", help="Rerun one printed case; exit code 2 if it still fails.")
@click.option("--attack", metavar="'ROLE FIELD ATTACK'", help="With --case: apply this attack of an audit.")
@flag("--strict", "Count over-declared fields as findings.")
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(1, 64),
    help="Processes that share scenes and attacks; the outcome is that of one. Default: one per core, at most 16, and "
    "on a GPU one per 13 GiB of its free memory.",
)
@options.threads
@options.output("Write the report as JSON, as --format json prints it.")
@options.progress
@options.environment
@options.reports()
def conformance(backend: str, environment: str | None, to: Output, **values: Any) -> None:
    """Test whether the backend NAME is correct under captured graphs, on this machine and these versions.

    Random deployments are captured and serve random batches, from graphs and eager, with garbage in
    everything a forward must not depend on; every row is compared with reference attention. Then each
    declared field is attacked on its own. Failures are minimized, and printed with the command that
    reproduces them. Runs are deterministic per seed. Exit code 2 if there are findings.

    By default all shapes that the backend supports here are tried; options that name a shape replace them.
    """
    _refuse_unused(values)
    case = values["case"]
    file = case[1:] if case is not None and case.startswith("@") else None
    refuse_missing_packages()
    import torch

    from capture_planner_conformance.cli.suite import run_suite
    from capture_planner_conformance.report import conformance_report

    torch.set_num_threads(values["threads"])

    text = case if file is None else _read(file)
    report = run_suite(
        backend, environment, values, text, tuple(_words(values)), partial(shapes_named, parameters=values)
    )
    to.show(lambda: report, lambda: conformance_report(report))
    to.write(values["output"], lambda: to_json(report) + "\n")
    context = click.get_current_context()
    # Findings count even if the suite was stopped after them.
    if report.outcome.failures or (values["strict"] and report.over_declared):
        context.exit(FINDINGS)
    if report.interrupted:
        exit_interrupted()
    if not report.passed:
        context.exit(FINDINGS)


def _refuse_unused(values: dict[str, Any]) -> None:
    """Refuse options that would have no effect, or that contradict each other."""
    if values["case"] is None and values["attack"] is not None:
        raise click.UsageError("--attack goes with --case.")
    if values["case"] is not None:
        for name in (*SEARCHES, *SHAPES):
            if stated(name):
                raise click.UsageError(f"{dashed(name)} goes with a search, so without --case.")
    if values["thorough"] and stated("profile") and values["profile"] != "thorough":
        raise click.UsageError(f"--thorough and --profile {values['profile']}: give one.")
    if values["strict"] and not values["audits"]:
        raise click.UsageError("--strict goes with audits, which --no-audits leaves out.")


def _read(file: str) -> str:
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CapturePlannerError(f"--case @{file}: {reason}") from None


def _words(values: dict[str, Any]) -> Iterator[str]:
    for name in SHAPES:
        value = values[name]
        if name == "window":
            yield from [] if value is None else ["--window" if value else "--no-window"]
        else:
            for each in value:
                yield from (dashed(name), ":".join(map(str, each)) if name == "heads" else str(each))


def shapes_named(candidates: tuple[Shape, ...], parameters: dict[str, Any]) -> tuple[Shape, ...]:
    """Return the candidates with every named value in place of theirs, without duplicates."""
    values = parameters | {"window": () if parameters["window"] is None else (parameters["window"],)}
    named = {field: values[name] for name, field in SHAPES.items() if values[name]}
    combined = [dict(zip(named, each, strict=True)) for each in itertools.product(*named.values())]
    for changes in combined:
        if "heads" in changes:
            changes["heads"], changes["kv_heads"] = changes["heads"]
    return tuple(dict.fromkeys(replace(shape, **each) for shape in candidates for each in combined))
