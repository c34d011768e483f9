"""``init``: begin a spec from a model's configuration."""

from __future__ import annotations

from pathlib import Path

import click

from capture_planner import codec
from capture_planner.cli.options import FILE, flag
from capture_planner.errors import CapturePlannerError
from capture_planner.planning.from_config import find_config, spec_from_config


@click.command(short_help="Write a commented spec from a model's configuration.")
@click.argument("config", metavar="CONFIG.json|FOLDER|HF-NAME")
@click.option("-o", "--output", type=FILE, help="Write the spec to this file instead of printing it.")
@flag("--force", "Overwrite an existing file.")
def init(config: str, output: Path | None, force: bool) -> None:
    """Write a commented spec from a model's configuration.

    The configuration is a config.json, a folder with one, or a Hugging Face name, which is looked up in
    the local cache only. What it does not state is an error or a marked assumption in the spec.
    """
    text = spec_from_config(*find_config(config))
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists() and not force:
        raise CapturePlannerError(f"{output} already exists; name another file, or overwrite it with --force")
    codec.write(output, text)
    click.echo(f"written to {output}; next: capture-planner plan {output}")
