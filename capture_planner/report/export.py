"""Exports to engines as rich tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capture_planner.engines.export import Effect, Export, Proof
from capture_planner.engines.export.export import DRAFT_MODEL
from capture_planner.engines.parsing import as_words
from capture_planner.records.batch import Kind
from capture_planner.records.text import counted
from capture_planner.report.terminal import table_of

MOST_DIFFERENCES = 12
"""Ranges of batches that are shown; ``--format json`` has all of them."""


def export_command(export: Export, output: Path | None) -> str:
    """Return the flags as a shell takes them, on one line, which a table would break."""
    return shlex.join(export.command(str(output or export.file_name)))


def launch_command(export: Export, plan_file: str, program: str) -> str:
    """Return the command that starts the engine under the plan itself: with its model, and the drafter to be named."""
    settings = {name: value for name, value in export.settings.items() if "model" in name or DRAFT_MODEL in str(value)}
    # vLLM's server takes the model without a flag.
    model = [str(settings.pop("model"))] if "model" in settings else []
    return shlex.join(["capture-planner", "launch", plan_file, "--", *program.split(), *model, *as_words(settings)])


def export_table(export: Export, output: Path | None) -> RenderableType:
    """What the flags lose, with what it costs, and what the engine makes of them."""
    parts: list[RenderableType] = []
    if export.by_file and output is None:
        parts += [Text(f"{export.file_name}:", style="bold"), Text(export.file.rstrip()), Text()]
    parts += _losses(export)
    if export.proof is not None:
        parts += [Text(), *_proof(export.proof)]
    else:
        parts += [Text(), Text(f"not proved: {export.unproved}", style="bold red")]
    return Group(*parts)


def _losses(export: Export) -> Iterator[RenderableType]:
    if not export.losses:
        if export.proof is not None and export.proof.loss is None:
            yield Text("nothing of the plan is lost", style="green")
        elif export.proof is not None:
            yield Text(f"lost, though the engine's plugin names no loss: {export.proof.loss}", style="bold red")
        return
    rows = ((loss.name, loss.says, "" if loss.cost is None else str(loss.cost)) for loss in export.losses)
    yield table_of("lost", "meaning", "cost", rows=rows)


def _proof(proof: Proof) -> Iterator[RenderableType]:
    yield Text("as the engine reads it", style="bold")
    yield Text(
        f"{counted(len(proof.same), 'graph')} as planned, {len(proof.lacks)} of the plan missing, "
        f"{len(proof.adds)} added; of {proof.batches} batches, "
        f"{sum(each.batches for each in proof.differences)} are answered otherwise"
    )
    if proof.unrun:
        yield Text(f"run as no forward of their own: {', '.join(proof.unrun)}")
    counts = ((effect, proof.count(effect)) for effect in Effect)
    if proof.differences:
        yield Text("; ".join(f"{count} {effect.value}" for effect, count in counts if count))
        yield _differences(proof)
    more = len(proof.differences) - MOST_DIFFERENCES
    if more > 0:
        yield Text(f"and {more} more ranges; --format json has them")


def _differences(proof: Proof) -> Table:
    table = table_of("role", "batches", "planned", "engine", "effect")
    worst_first = sorted(proof.differences, key=lambda each: list(Effect).index(each.effect))
    for each in worst_first[:MOST_DIFFERENCES]:
        span = f"{each.first}" if each.first == each.last else f"{each.first}..{each.last}"
        tokens = "token" if span == "1" else "tokens"
        unit = f"decodes of {each.query_len}: {span}" if each.kind is Kind.DECODE else f"mixed: {span} {tokens}"
        table.add_row(each.role, unit, str(each.planned or "eager"), str(each.emulated or "eager"), each.effect.value)
    return table
