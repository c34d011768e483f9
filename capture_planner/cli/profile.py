"""``profile``: measure what passes and graphs of each size cost on this machine, or take it from an observation."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from capture_planner import codec
from capture_planner._extras import refuse_missing
from capture_planner.cli import options
from capture_planner.cli.bench import machine_plan, without_folder
from capture_planner.cli.common import (
    INTERRUPTED,
    emit,
    emit_file,
    prepare_torch,
    progress_bars,
    read_document,
    refuse_outputs,
)
from capture_planner.cli.options import FILE, option
from capture_planner.plugins import registry
from capture_planner.records.profile import Profile
from capture_planner.report.profile import profile_tables

MEASURING = ("model", "seed", "seconds", "context", "page_size", "pages", "threads", "any_plan", "any_environment")


@click.command(short_help="Measure what each size of graph costs on this machine.")
@click.argument("plan_file", metavar="PLAN|SPEC", required=False)
@click.option("--from", "source", metavar="OBSERVATION", help="Take the figures from an engine; measures nothing.")
@click.option("-o", "--output", type=FILE, help="Write the profile to this file.")
@options.model
@options.seed
@option("--seconds", type=click.FloatRange(min=0, min_open=True), default=60.0, help="Time for measuring.")
@option("--context", type=click.IntRange(0, 1 << 20), default=512, help="Tokens in the KV cache of each request.")
@options.page_size(None, " Default: 64, or 16 on a CPU.")
@options.pages("enough for every request at the context, within memory")
@options.threads
@options.admit("Measure")
@options.progress
@options.environment
@options.formats()
def profile(
    plan_file: str | None, source: str | None, output: Path | None, environment: str | None, form: str, **values: Any
) -> None:
    """Measure what passes and graphs of each size cost on this machine.

    Time is a staircase of the size: its steps are found by bisection, up to the limits of a spec. The sizes of a
    plan's graphs are measured besides. Also measured: eager passes, memory and seconds of a graph, and the rest of a
    step. With --from the figures are those of an engine that was observed. Ctrl-C keeps what was measured.
    """
    refuse_outputs(plan_file, {"--output": output})
    if (plan_file is None) is (source is None):
        raise click.UsageError("Give either PLAN|SPEC or --from OBSERVATION.")
    if source is not None:
        given = [options.dashed(name) for name in MEASURING if options.stated(name)]
        if given or environment is not None:
            raise click.UsageError(f"{(given or ['--environment'])[0]} goes with measuring; --from measures nothing.")
        result = _observed(source)
    else:
        assert plan_file is not None, "one of the two was given"
        result = _measured(plan_file, environment, values)
    emit(form, lambda: result, partial(profile_tables, result))
    emit_file(form, output, lambda: codec.dumps(result))
    if any(note.startswith("interrupted") for note in result.notes):
        click.get_current_context().exit(INTERRUPTED)


def _observed(source: str) -> Profile:
    raise NotImplementedError


def _measured(file: str, environment: str | None, values: dict[str, Any]) -> Profile:
    refuse_missing()
    from capture_planner.bench.profiling import ProfileSettings
    from capture_planner.bench.profiling import profile as measure

    document = read_document(file)
    plan = machine_plan(document, environment)
    prepare_torch(values["threads"])
    same = ("model", "seed", "seconds", "context", "page_size", "pages", "any_environment", "any_plan")
    settings = ProfileSettings(
        **{name: values[name] for name in same},
        entries=document.is_plan,
        command=shlex.join(["capture-planner", *map(without_folder, sys.argv[1:])]),
    )
    return measure(plan, registry.load_backends(), settings, progress_bars(values["progress"]))
