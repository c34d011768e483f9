"""The commands about an engine's flags, and ``init``.

``engine``: what an engine captures by them; ``export``: a plan as flags; ``spec``: the
spec of a command line; ``init``: one from a model's configuration.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

import attrs
import click

from capture_planner import codec
from capture_planner.cli import options
from capture_planner.cli.common import (
    FINDINGS,
    ChosenMachine,
    Output,
    OwnOptions,
    assumed,
    machine_named,
    plan_of,
    read_document,
    refuse_outputs,
    show_lines,
    show_notes,
    to_json,
)
from capture_planner.cli.components import EngineName, refuse_several, show_each
from capture_planner.cli.options import flag
from capture_planner.cli.ranks import answer_line, read_batches
from capture_planner.engines import INSTALL, components, emulate, engines, find_engine, is_engine, server, servers
from capture_planner.engines.deployments import why_inadmissible
from capture_planner.engines.export import prove, within_budget
from capture_planner.engines.placing import kustomization, plan_patch, values
from capture_planner.engines.spec_of import PLAIN_MODEL, spec_of, with_sizes
from capture_planner.errors import CapturePlannerError, FlagError, Problem
from capture_planner.planning.from_config import find_config, spec_from_config
from capture_planner.records.plan import Plan
from capture_planner.report.engine import emulation_report, export_report, launch_command
from capture_planner.report.printable import printable

DEPLOYMENTS = ("kubernetes", "kserve", "helm", "dynamo")
"""Formats of ``export`` that put a plan into a deployment."""

DEPLOYMENTS_TEXT = (
    "objects of Kubernetes with a pod template, KServe's LLMInferenceService, Dynamo's graphs, and values of vLLM's "
    "production stack and of llm-d; render other charts with helm template"
)


class EngineCommand(OwnOptions):
    """A command about one engine; its help lists the flags of the engine that is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # --help is answered while words are parsed, before the argument has its value.
        ctx.meta[_NAMED] = next((word for word in args if is_engine(word)), None)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        name = ctx.meta[_NAMED]
        if name is None:
            with formatter.section("Installed engines"):
                if not engines():
                    formatter.write_text(f"None: {INSTALL}.")
                    return
                rows = []
                for each, item in engines().items():
                    older = ", ".join(f"{each}=={one.version}" for one in item.value.older)
                    says = f"release {item.value.version}" + (f"; name {older} for an older one" if older else "")
                    rows.append((each, f"{says}, from {item.distribution} {item.version}"))
                formatter.write_dl(rows)
            with formatter.section("Engine flags"):
                first = next(iter(engines()))
                formatter.write_text(f"capture-planner {ctx.info_name} {first} --help lists its flags.")
            return
        with formatter.section(f"Flags of {name} that affect graphs; its other flags are accepted"):
            formatter.write_dl(list(find_engine(name).flags.items()))


_NAMED = f"{__name__}.named"


@click.command(cls=EngineCommand)
@click.argument("name", type=EngineName())
@click.argument("flags", metavar="[FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@options.batches
@options.environment
@options.download
@options.reports()
def engine(name: str, flags: tuple[str, ...], batches: IO[bytes] | None, environment: str | None, to: Output) -> None:
    """Show what an engine captures with its own flags, and which batches it serves from graphs.

    FLAGS are the engine's, as its server takes them, or a whole command line: with docker run or mpirun in front, in
    quotes, or as the file of a script or a service; - reads it from standard input. Neither the engine nor a GPU is
    needed. Lines and answers of --batches are as in explain: what the engine's own dispatcher would answer.
    """
    machine = machine_named(environment)
    several = components(name, flags)
    if len(several) > 1:
        refuse_several(several, to, of_text=batches is None)
        show_each(several, lambda each: _show(name, each.words, machine, to))
        return
    if batches is None:
        _show(name, flags, machine, to)
        return
    emulation = emulate(name, flags, machine.environment)
    show_notes(emulation.notes)
    to.refuse_batches()
    show_notes((*machine.assumptions, *emulation.assumptions))
    for batch in read_batches(batches, getattr(batches, "name", "<stdin>"), tuple(emulation.modes)):
        never = why_inadmissible(batch, emulation)
        line = answer_line(batch, emulation.dispatch(batch))
        click.echo(json.dumps(line if never is None else line | {"not_admissible": never}))


def _show(name: str, flags: Sequence[str], machine: ChosenMachine, to: Output) -> None:
    emulation = emulate(name, flags, machine.environment)
    show_notes(emulation.notes)
    assumptions = (*machine.assumptions, *emulation.assumptions)
    emulation = attrs.evolve(emulation, assumptions=assumptions)
    to.show(lambda: emulation, partial(emulation_report, emulation), assumptions)


@click.command()
@click.argument("plan_file", metavar="PLAN|SPEC")
@click.option("--to", "name", type=EngineName(), required=True, help="Engine to export to.")
@click.option(
    "--into", metavar="FILE[#COMPONENT]", help="Deployment that gets the plan: a manifest, or the values of a chart."
)
@click.option("--name", "config", metavar="NAME", help="Name of the ConfigMap. Default: made of the deployment's.")
@click.option("--namespace", metavar="NAME", help="Namespace of the ConfigMap. Default: the deployment's.")
@click.option("--image", metavar="IMAGE", help="Image in which an init container runs check. Default: the server's.")
@options.output("Write the engine's configuration, or what the deployment needs, to FILE.")
@flag("--strict", "Exit with 2 if the engine loses anything of the plan.")
@options.environment
@options.reports(*DEPLOYMENTS)
def export(
    plan_file: str,
    name: str,
    output: Path | None,
    strict: bool,
    environment: str | None,
    to: Output,
    **deployment: str | None,
) -> None:
    """Export a plan as the flags of an engine, or into a deployment that runs it.

    The flags come with what is lost and what that costs: they are emulated for every admissible batch, which
    shows what the engine would make of them. If the engine refuses them, as on a machine without a GPU,
    they are written with the reason, and the exit code is 2.

    An engine whose plugin runs a plan itself loses nothing: for those, the launch command is printed too. In
    the other formats the plan goes into a deployment, --into FILE: kubernetes, kserve and dynamo give a
    kustomization.yaml with a ConfigMap and the patch of the component, and helm gives values.
    """
    document, engine = read_document(plan_file), find_engine(name)
    plan = plan_of(document, environment, answers=True)
    if to.form in DEPLOYMENTS:
        if strict or to.html is not None:
            raise click.UsageError(f"--strict and --html are for flags; leave them out with --format {to.form}.")
        _export_into(plan, name, to, output, **deployment)
        return
    for option, value in deployment.items():
        if value is not None:
            flag_ = "--name" if option == "config" else f"--{option}"
            raise click.UsageError(f"{flag_} is for a deployment; give --format {', '.join(DEPLOYMENTS)}.")
    as_engine = partial(emulate, name)
    result = within_budget(prove(engine.export(plan), plan, as_engine), plan, as_engine)
    # An engine is given the file of a plan; a spec has none.
    runs_plans = document.is_plan and engine.launch is not None
    launch = launch_command(result, plan_file, engine.programs[0]) if runs_plans else None
    to.show(lambda: result, partial(export_report, result, output, launch), assumed())
    to.write(output, lambda: result.file)
    # None: the engine refuses the flags.
    if result.proof is None or (strict and not result.proof.exact):
        click.get_current_context().exit(FINDINGS)


def _export_into(
    plan: Plan,
    name: str,
    to: Output,
    output: Path | None,
    into: str | None,
    config: str | None,
    namespace: str | None,
    image: str | None,
) -> None:
    """Print or write what puts a plan into a deployment."""
    if into is None:
        raise click.UsageError(f"--format {to.form} is for a deployment; name its file: --into FILE or FILE#COMPONENT.")
    file = into if Path(into).is_file() else into.rpartition("#")[0]
    if not Path(file).is_file():
        raise click.UsageError(f"--into {into}: no such file.")
    component = server(name, [into])
    try:
        if component.form != to.form:
            known = f"give --format {component.form}" if component.form else f"known are {DEPLOYMENTS_TEXT}"
            raise FlagError([Problem(message=f"this is no deployment for --format {to.form}", remedy=known)])
        patch = plan_patch(
            plan,
            find_engine(name),
            codec.read(file),
            component,
            lambda text: servers(name, [text]),
            name=config,
            namespace=namespace,
            image=image,
        )
    except FlagError as error:
        # Problems of the component itself have no place yet.
        raise FlagError(
            attrs.evolve(each, file=file, line=component.line) if each.file is None else each for each in error.problems
        ) from None
    show_notes((*assumed(), *patch.notes))
    folder, source = (output or Path("kustomization.yaml")).absolute().parent.resolve(), Path(file).resolve()
    # kustomize reads resources only below its own folder.
    resource = str(source.relative_to(folder)) if source.is_relative_to(folder) else None
    again = f"Do not edit: export again when the plan or {printable(file)} changes."
    body = values(patch) if to.form == "helm" else kustomization(patch, resource)
    text = f"# Generated by `capture-planner export`. {again}\n{body}"
    if output is None:
        show_lines(text.rstrip("\n"))
    else:
        to.write(output, lambda: text)


@click.command(cls=OwnOptions)
@click.argument("name", type=EngineName())
@click.argument("flags", metavar="[FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@options.output("Write the spec to FILE.")
@options.environment
@options.formats()
def spec(name: str, flags: tuple[str, ...], output: Path | None, environment: str | None, form: str) -> None:
    """Write the spec of an engine's command line: spec vllm FLAGS -o spec.yaml.

    FLAGS are taken as engine takes them. The spec has the engine's limits, modes, drafts and adapters, and the sizes
    with which its plan captures the engine's graphs; differences are reported. plan, export and tune go on from there.
    """
    # ``check`` and ``engine`` need no planner, which takes a tenth of their time to import.
    from capture_planner.planning.planner import plan
    from capture_planner.plugins import registry

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
    origin = f"from the command line of {emulation.engine} {emulation.version} on {machine.environment.name}"
    comments = (origin, *(f"assumption: {each}" for each in assumptions))
    text = "".join(f"# {printable(line)}\n" for line in comments) + codec.dumps(derived.spec)
    if output is not None:
        codec.write(output, to_json(derived.spec) + "\n" if output.suffix == ".json" else text)
        show_notes(f"assumption: {each}" for each in assumptions)
        show_lines(f"written to {output}", err=form == "json")
    elif form == "text":
        show_lines(text.rstrip("\n"))


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
