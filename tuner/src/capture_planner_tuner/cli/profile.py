"""``profile``: measure what passes and graphs of each size cost on this machine, or take it from an observation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from capture_planner.cli import options
from capture_planner.cli.commands import RUNNER, needs
from capture_planner.cli.common import (
    Output,
    command_line,
    machine_plan,
    plan_of,
    progress_bars,
    read_document,
    record_text,
)
from capture_planner.cli.ending import exit_interrupted
from capture_planner.cli.options import FiniteRange, option
from capture_planner.codec import shipped as catalog
from capture_planner.plugins import registry
from capture_planner.plugins.profiler import ProfileSettings
from capture_planner.records.observation import Observation
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Spec
from capture_planner.report.profile import profile_report
from capture_planner_tuner.observed_profile import observed_profile

MEASURING = ("model", "seed", "seconds", "context", "page_size", "pages", "threads", "any_plan", "any_environment")


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC")
@click.option("--from", "source", metavar="OBSERVATION", help="Take the figures from an engine, and measure nothing.")
@options.output("Write the profile to FILE.")
@options.model
@options.seed
@option(
    "--seconds",
    type=FiniteRange(min=0, min_open=True),
    default=60.0,
    help="Time for measuring, without loading and compiling the model.",
)
@option("--context", type=click.IntRange(0, 1 << 20), default=512, help="Tokens in the KV cache of each request.")
@options.page_size(None, " Default: 64, or 16 on a CPU.")
@options.pages("enough for every request at the context, within memory")
@options.threads
@options.admit("Measure")
@options.progress
@options.environment
@options.reports()
def profile(
    plan_file: str, source: str | None, output: Path | None, environment: str | None, to: Output, **values: Any
) -> None:
    """Measure what passes and graphs of each size cost on this machine.

    Time is a staircase of the size: its steps are found by bisection, up to the limits of a spec. The sizes of a
    plan's graphs are measured too. Also measured: eager passes, memory and seconds of a graph, and the rest of a
    step. With --from the figures are those of an engine that was observed, of the PLAN's or SPEC's model. Ctrl-C keeps
    what was measured. Measuring needs the distribution capture-planner-runner.
    """
    result = _measured(plan_file, environment, values) if source is None else _observed(plan_file, source, environment)
    to.show(lambda: result, partial(profile_report, result))
    if output is not None:
        to.write(output, lambda: record_text(output, result))
    # After the file is written: an interrupted profile is kept, and only its notes tell of the interruption.
    if any(note.startswith("interrupted") for note in result.notes):
        exit_interrupted()


def _observed(file: str, source: str, environment: str | None) -> Profile:
    """Take figures from an observation; the model is the plan's, and the device the plan's or the one named.

    Raises ``click.UsageError`` where the observation is of another device.
    """
    given = [options.dashed(name) for name in MEASURING if options.stated(name)]
    if given:
        raise click.UsageError(f"{given[0]} goes with measuring, and --from measures nothing.")
    observation = read_document(source).load(Observation)
    document = read_document(file)
    if document.is_plan:
        plan = plan_of(document, environment)
        model, device = plan.model, plan.environment.device
    else:
        machine = (
            catalog.environment_of_device(observation.device)
            if environment is None
            else catalog.find_environment(environment)
        )
        if machine is None:
            unknown = f"the device {observation.device}, which no shipped environment has"
            named = unknown if observation.device else "no device"
            raise click.UsageError(f"the observation names {named}; describe it with --environment.")
        model, device = document.load(Spec).model, machine.device
    # Figures of one device are no other's. An observation that names none is taken at the caller's word.
    if observation.device not in (None, device.name):
        raise click.UsageError(
            f"{source} was observed on {observation.device}, and {environment or file} is of {device.name}; give "
            f"the spec, or a plan for {observation.device}."
        )
    return observed_profile(observation, model, device, command_line())


def _measured(file: str, environment: str | None, values: dict[str, Any]) -> Profile:
    """Measure on this machine, by what a plugin brings: measuring needs torch."""
    profiler = registry.find_profiler()
    if profiler is None:
        raise needs("profile without --from", RUNNER)
    document = read_document(file)
    plan = machine_plan(document, environment, profiler.machine)
    settings = ProfileSettings(
        **{name: values[name] for name in MEASURING}, entries=document.is_plan, command=command_line()
    )
    return profiler.profile(plan, settings, progress_bars(values["progress"]))
