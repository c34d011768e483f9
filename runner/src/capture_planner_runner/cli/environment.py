"""``environment``: this machine's facts, as an environment file."""

from __future__ import annotations

from pathlib import Path

import click

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import Output, record_text, refuse_outputs, show_notes, to_json
from capture_planner.cli.options import option
from capture_planner.records.environment import Environment
from capture_planner_runner._extras import refuse_missing


@click.command()
@options.output("Write to FILE instead of printing.", kind=Environment)
@option("--name", default="here", help="Name of the environment.")
@options.formats("text", "json")
def environment(output: Path | None, name: str, form: str) -> None:
    """Describe this machine as an environment file: device, driver, and the packages that matter.

    A plan for this environment runs on this machine, and is refused once the device, its memory or such a
    package has changed. On a machine with several GPUs, the first that CUDA sees is described.
    """
    refuse_outputs()
    refuse_missing("describing this machine", ("torch",))
    from capture_planner_runner.host import notes, this_environment

    machine = this_environment(name)
    show_notes(notes())
    if output is not None:
        Output(form).write(output, lambda: record_text(output, machine))
    if form == "json":
        click.echo(to_json(machine))
    elif output is None:
        click.echo(codec.dumps(machine), nl=False)
