"""``export``: the flags of an engine that come closest to a plan, what they lose, and the proof."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from capture_planner.cli import options
from capture_planner.cli.common import (
    FINDINGS,
    assumed,
    emit,
    emit_file,
    plan_of,
    read_document,
    refuse_outputs,
    show_assumptions,
)
from capture_planner.cli.engine import EngineName
from capture_planner.cli.options import FILE, flag
from capture_planner.engines import emulate, find_engine
from capture_planner.engines.export import prove, within_budget
from capture_planner.report.export import export_command, export_table, launch_command


@click.command(short_help="Export a plan as the flags of an engine.")
@click.argument("plan_file", metavar="PLAN|SPEC")
@click.option("--to", "name", type=EngineName(), required=True, help="Engine to export to.")
@click.option("-o", "--output", type=FILE, help="Write the engine's configuration file here.")
@flag("--strict", "Exit with 2 if the engine loses anything of the plan.")
@options.environment
@options.formats()
def export(plan_file: str, name: str, output: Path | None, strict: bool, environment: str | None, form: str) -> None:
    """Export a plan as the flags of an engine, with what is lost and what that costs.

    The flags are then emulated for every admissible batch, which shows what the engine would make of
    them, graph by graph and batch by batch. An engine whose plugin runs a plan itself loses nothing:
    for those, the launch command is printed too. If the engine refuses the flags, as on a machine without a
    GPU, they are written with the reason, and the exit code is 2.
    """
    refuse_outputs(plan_file, {"--output": output})
    document, engine = read_document(plan_file), find_engine(name)
    plan = plan_of(document, environment, answers=True)
    as_engine = partial(emulate, name)
    result = within_budget(prove(engine.export(plan), plan, as_engine), plan, as_engine)
    if form == "text":
        show_assumptions(assumed())
        click.echo(f"{export_command(result, output)}\n")
        if document.is_plan and engine.launch is not None:
            click.echo(f"to run the plan itself: {launch_command(result, plan_file, engine.programs[0])}\n")
    emit(form, lambda: result, partial(export_table, result, output), assumed() if form == "json" else None)
    emit_file(form, output, lambda: result.file)
    if result.proof is None or (strict and not result.proof.exact):
        click.get_current_context().exit(FINDINGS)
