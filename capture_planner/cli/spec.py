"""``spec``: from the command line of an engine to a spec, from which plan, export and tune go on."""

from __future__ import annotations

from pathlib import Path

import click

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import OwnOptions, machine_named, refuse_outputs, show_lines, show_notes, to_json
from capture_planner.cli.engine import EngineName
from capture_planner.cli.options import FILE
from capture_planner.cli.tune_inputs import PLAIN_MODEL
from capture_planner.engines import emulate, find_engine
from capture_planner.engines.spec_of import spec_of
from capture_planner.engines.spec_sizes import with_sizes
from capture_planner.planning.planner import plan
from capture_planner.plugins import registry
from capture_planner.records.spec import Spec
from capture_planner.report.writing import printable


class SpecCommand(OwnOptions):
    """A command about the command line of an engine, which has no ``-o``."""

    own_short = ("-h", "-o")


@click.command(cls=SpecCommand, short_help="Write the spec of an engine's command line.")
@click.argument("name", type=EngineName())
@click.argument("flags", metavar="[FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("-o", "--output", type=FILE, help="Write the spec to this file.")
@options.environment
@options.formats()
def spec(name: str, flags: tuple[str, ...], output: Path | None, environment: str | None, form: str) -> None:
    """Write the spec of an engine's command line: spec vllm FLAGS -o spec.yaml.

    FLAGS are taken as engine takes them. The spec has the engine's limits, modes, drafts and adapters, and the sizes
    with which its plan captures the engine's graphs; what its plan captures otherwise is said. plan, export and
    tune go on from there.
    """
    refuse_outputs(None, {"--output": output})
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
