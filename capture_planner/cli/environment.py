"""``environment``: this machine's facts, as an environment file."""

from __future__ import annotations

import click

from capture_planner import codec
from capture_planner._extras import refuse_missing
from capture_planner.cli import options
from capture_planner.cli.common import to_json
from capture_planner.cli.options import option


@click.command(short_help="Describe this machine as an environment file.")
@click.option("-o", "--output", metavar="FILE", help="Write to FILE instead of printing.")
@option("--name", default="here", help="Name of the environment.")
@options.formats("text", "json")
def environment(output: str | None, name: str, form: str) -> None:
    """Describe this machine as an environment file: device, driver, and the packages that matter.

    A plan for this environment runs on this machine, and is refused once the device, its memory or such a
    package has changed. On a machine with several GPUs, the first that CUDA sees is described.
    """
    refuse_missing("describing this machine", ("torch",))
    from capture_planner.runtime.host import notes, this_environment

    found = this_environment(name)
    for note in notes():
        click.echo(f"note: {note}", err=True)
    if output is not None:
        codec.write(output, codec.dumps(found))
        click.echo(f"written to {output}", err=form == "json")
    if form == "json":
        click.echo(to_json(found))
    elif output is None:
        click.echo(codec.dumps(found), nl=False)
