"""``environment``: this machine's facts, as an environment file."""

from __future__ import annotations

import click

from capture_planner import codec
from capture_planner._extras import refuse_missing
from capture_planner.cli.common import format_option
from capture_planner.codec import dumps_json, to_data


@click.command()
@click.option("-o", "--output", metavar="FILE", help="Write the file here instead of printing it.")
@click.option("--name", default="here", show_default=True, help="The environment's name.")
@format_option("text", "json")
def environment(output: str | None, name: str, form: str) -> None:
    """Write this machine's facts as an environment file: device, driver, and the packages that decide.

    A plan for it is executed here, and refused where a fact has changed that decides something: the
    device, its memory, a package. On a machine with several GPUs it is the first that CUDA sees.
    """
    refuse_missing()
    from capture_planner.runtime.host import notes, this_environment

    found = this_environment(name)
    for note in notes():
        click.echo(f"note: {note}", err=True)
    if output is not None:
        codec.write(output, codec.dumps(found))
        click.echo(f"written to {output}", err=form == "json")
    if form == "json":
        click.echo(dumps_json(to_data(found)))
    elif output is None:
        click.echo(codec.dumps(found), nl=False)
