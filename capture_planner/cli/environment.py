"""``environment``: this machine's facts, as an environment file."""

from __future__ import annotations

from pathlib import Path

import click

from capture_planner import codec
from capture_planner._extras import refuse_missing
from capture_planner.cli import options
from capture_planner.cli.common import emit_file, refuse_outputs, refuse_to_replace, show_notes, to_json
from capture_planner.cli.options import FILE, option
from capture_planner.records.environment import Environment


@click.command(short_help="Describe this machine as an environment file.")
@click.option("-o", "--output", metavar="FILE", type=FILE, help="Write to FILE instead of printing.")
@option("--name", default="here", help="Name of the environment.")
@options.formats("text", "json")
def environment(output: Path | None, name: str, form: str) -> None:
    """Describe this machine as an environment file: device, driver, and the packages that matter.

    A plan for this environment runs on this machine, and is refused once the device, its memory or such a
    package has changed. On a machine with several GPUs, the first that CUDA sees is described.
    """
    if output is not None:
        refuse_to_replace(str(output), Environment)
        refuse_outputs(None, {"--output": output})
    refuse_missing("describing this machine", ("torch",))
    from capture_planner.runtime.host import notes, this_environment

    machine = this_environment(name)
    show_notes(notes())
    emit_file(form, output, lambda: codec.dumps(machine))
    if form == "json":
        click.echo(to_json(machine))
    elif output is None:
        click.echo(codec.dumps(machine), nl=False)
