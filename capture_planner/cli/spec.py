"""``spec`` and ``init``: a spec from the command line of an engine, or from a model's configuration."""

from __future__ import annotations

from pathlib import Path

import click

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import OwnOptions, machine_named, refuse_outputs, show_lines, show_notes, to_json
from capture_planner.cli.engine import EngineName
from capture_planner.cli.options import flag
from capture_planner.engines import emulate, find_engine
from capture_planner.engines.spec_of import spec_of, with_sizes
from capture_planner.engines.tuning.inputs import PLAIN_MODEL
from capture_planner.errors import CapturePlannerError
from capture_planner.planning.from_config import find_config, spec_from_config
from capture_planner.planning.planner import plan
from capture_planner.plugins import registry
from capture_planner.records.spec import Spec
from capture_planner.report.printable import printable


class SpecCommand(OwnOptions):
    """A command about the command line of an engine, which has no ``-o``."""

    own_short = ("-h", "-o")


@click.command(cls=SpecCommand)
@click.argument("name", type=EngineName())
@click.argument("flags", metavar="[FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@options.output("Write the spec to FILE.")
@options.environment
@options.formats()
def spec(name: str, flags: tuple[str, ...], output: Path | None, environment: str | None, form: str) -> None:
    """Write the spec of an engine's command line: spec vllm FLAGS -o spec.yaml.

    FLAGS are taken as engine takes them. The spec has the engine's limits, modes, drafts and adapters, and the sizes
    with which its plan captures the engine's graphs; differences are reported. plan, export and tune
    go on from there.
    """
    refuse_outputs()
    machine = machine_named(environment)
    emulation = emulate(name, flags, machine.environment)
    backends = registry.load_backends()
    derived = with_sizes(
        spec_of(emulation, find_engine(name), PLAIN_MODEL),
        emulation,
        lambda candidate: plan(candidate, machine.environment, backends),
    )
    assumptions = (*machine.assumptions, *emulation.assumptions, *derived.assumptions)
    show_notes(emulation.notes)
    if form == "json":
        click.echo(codec.dumps_json({"assumptions": list(assumptions), "spec": codec.plain(derived.spec)}))
    text = spec_file(derived.spec, assumptions, f"{emulation.engine} {emulation.version} on {machine.environment.name}")
    if output is not None:
        codec.write(output, to_json(derived.spec) + "\n" if output.suffix == ".json" else text)
        show_notes(f"assumption: {each}" for each in assumptions)
        show_lines(f"written to {output}", err=form == "json")
    elif form == "text":
        show_lines(text.rstrip("\n"))


def spec_file(spec: Spec, assumptions: tuple[str, ...], origin: str) -> str:
    """Return a spec as YAML, with where it comes from and what it rests on as comments."""
    lines = [f"from the command line of {origin}", *(f"assumption: {each}" for each in assumptions)]
    return "".join(f"# {printable(line)}\n" for line in lines) + codec.dumps(spec)


@click.command()
@click.argument("config", metavar="CONFIG.json|FOLDER|HF-NAME")
@options.output("Write the spec to FILE instead of printing it.")
@flag("--force", "Overwrite an existing file.")
def init(config: str, output: Path | None, force: bool) -> None:
    """Write a commented spec from a model's configuration.

    The configuration is a config.json, a folder with one, or a Hugging Face name, which is looked up in
    the local cache only. What it does not state is an error or a marked assumption in the spec.
    """
    refuse_outputs()
    text = spec_from_config(*find_config(config))
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists() and not force:
        raise CapturePlannerError(f"{output} already exists; name another file, or overwrite it with --force")
    codec.write(output, text)
    click.echo(f"written to {output}; next: capture-planner plan {output}")
