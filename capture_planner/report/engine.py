"""Emulated engines as rich tables."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from capture_planner.engines.check import EngineFinding
from capture_planner.engines.emulation import CapturedGraph, Emulation, Manager
from capture_planner.engines.encoders import EncoderGraphs
from capture_planner.engines.verdict import ranges, verdict
from capture_planner.engines.walk import BatchAnswer, walk
from capture_planner.modes import GraphMode
from capture_planner.records._base import grouped
from capture_planner.records.batch import Kind
from capture_planner.records.text import counted
from capture_planner.report.terminal import mode_text, ran_text, table_of


def emulation_table(emulation: Emulation) -> RenderableType:
    """The whole emulation: the verdict, modes, graphs by kind, what serves which batches, and what decided it."""
    answers = walk(emulation)
    parts: list[RenderableType] = [
        *map(Text, verdict(emulation, answers).lines),
        Text(),
        Text(f"{emulation.engine} {emulation.version}: {_graphs(emulation)}", style="bold"),
        Text(shlex.join(emulation.command) or "(no flags: all as by default)", style="dim"),
        Text(f"sizes: {sizes_text(emulation.sizes)}"),
    ]
    for alike in grouped(emulation.managers, lambda manager: _facts(manager, answers)).values():
        parts += [Text(), *_roles(alike, answers)]
    for encoder in emulation.encoders:
        parts += [Text(), *_encoder(encoder)]
    if emulation.decisions:
        rows = ((each.role, each.rule, each.before, each.after, each.message) for each in emulation.decisions)
        table = table_of("role", "rule", "before", "after", "because", rows=rows)
        parts += [Text(), Text("decisions", style="bold"), table]
    settings = ((each.name, _value(each.value), each.source) for each in emulation.settings)
    parts += [Text(), Text("settings", style="bold"), table_of("setting", "value", "from", rows=settings)]
    return Group(*parts)


def _facts(manager: Manager, answers: Sequence[BatchAnswer]) -> tuple[object, ...]:
    """Return all that the tables say about a role: of two roles with the same, it is said once."""
    return (manager.mode, tuple(_graph_rows(manager)), tuple(_batch_rows(manager, answers)))


def _roles(alike: Sequence[Manager], answers: Sequence[BatchAnswer]) -> Iterator[RenderableType]:
    first, names = alike[0], " and ".join(manager.role for manager in alike)
    each = " each" if len(alike) > 1 else ""
    yield Text.assemble((f"{names} ", "bold"), mode_text(first.mode), f", {counted(len(first.graphs), 'graph')}{each}")
    if first.graphs:
        yield table_of("graphs", "of", "LoRA", "tokens", right=("LoRA",), rows=_graph_rows(first))
    titles = ("batches", "run", "requests or tokens", "LoRA", "padding", "why")
    rows = (
        (batches, ran_text(mode), extents, loras, padding, why)
        for batches, mode, extents, loras, padding, why in _batch_rows(first, answers)
    )
    yield table_of(*titles, right=("padding",), rows=rows)


def _graph_rows(manager: Manager) -> Iterator[tuple[str, str, str, str]]:
    kinds = grouped(manager.graphs, lambda graph: (graph.entry.mode.value, _of(graph), graph.entry.active_loras))
    for (name, of, loras), alike in kinds.items():
        sizes = sorted({graph.entry.num_tokens for graph in alike})
        yield name, of, str(loras) if loras else "", sizes_text(sizes)


def _graphs(emulation: Emulation) -> str:
    encoder = sum(len(each.budgets) for each in emulation.encoders)
    return counted(len(emulation.graphs), "graph") + (f", and {encoder} of the encoder" if encoder else "")


def _encoder(encoder: EncoderGraphs) -> Iterator[RenderableType]:
    largest = encoder.budgets[-1]
    beyond = f"; images of {largest + 1} to {encoder.reach} tokens run eager" if largest < encoder.reach else ""
    yield Text.assemble(("encoder ", "bold"), mode_text(GraphMode.FULL), f", {counted(len(encoder.budgets), 'graph')}")
    items = f"up to {counted(encoder.max_items, 'image')} or videos in one, together up to its budget{beyond}"
    yield Text(f"budgets, in tokens of the language model: {sizes_text(encoder.budgets)}; {items}")


def _of(graph: CapturedGraph) -> str:
    entry = graph.entry
    if graph.max_query_len is not None:
        return f"decodes of 1 to {graph.max_query_len}"
    text = f"decodes of {entry.query_len}" if entry.query_len else "any batch"
    text += f", in {graph.microbatches} microbatches" if graph.microbatches > 1 else ""
    return text + (f", chain of {entry.draft_steps}" if entry.draft_steps else "")


MOST_RANGES = 6
"""Ranges of batches that a row names; of more, only their number."""


def _batch_rows(
    manager: Manager, answers: Sequence[BatchAnswer]
) -> Iterator[tuple[str, GraphMode, str, str, str, str]]:
    """Yield which batches run how, for each kind and mode, and how far they are padded."""
    rows: dict[tuple[str, GraphMode, str], list[BatchAnswer]] = {}
    for one in answers:
        if one.batch.role is manager.role:
            decode = one.batch.kind is Kind.DECODE
            batches = f"decodes of {one.batch.query_len}, by requests" if decode else "mixed, by tokens"
            why = "" if one.answer.reason is None else str(one.answer.reason)
            rows.setdefault((batches, one.answer.mode, why), []).append(one)
    for (batches, mode, why), group in rows.items():
        loras = sorted({one.batch.active_loras for one in group})
        yield batches, mode, _ranges(group), "" if loras == [0] else sizes_text(loras), _padding(group), why


def _ranges(answers: Sequence[BatchAnswer]) -> str:
    """Write which batches they are, whatever adapters they have: ``1..16, 18, 20..32``."""
    ends = ranges(answers)
    text = ", ".join(f"{first}" if first == last else f"{first}..{last}" for first, last in ends[:MOST_RANGES])
    more = len(ends) - MOST_RANGES
    count = sum(last - first + 1 for first, last in ends)
    return f"{text}, and {more} more ranges, {count} in all" if more > 0 else text


def _padding(answers: Sequence[BatchAnswer]) -> str:
    computed = sum(one.answer.entry.num_tokens for one in answers if one.answer.entry is not None)
    padded = sum(one.answer.padded_tokens for one in answers)
    return f"{padded / computed:.0%}" if computed else ""


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        return sizes_text(value)
    return "none" if value is None else str(value)


def sizes_text(sizes: Sequence[int]) -> str:
    """Write ascending sizes with their steps: ``1 2 4 8..256 by 8 272..512 by 16``."""
    parts, at = [], 0
    while at < len(sizes):
        end = at + 1
        while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == sizes[at + 1] - sizes[at]:
            end += 1
        if end - at < 3:
            parts.append(str(sizes[at]))
            at += 1
        else:
            parts.append(f"{sizes[at]}..{sizes[end]} by {sizes[at + 1] - sizes[at]}")
            at = end + 1
    return " ".join(parts) or "none"


def findings_text(emulation: Emulation, findings: Sequence[EngineFinding]) -> RenderableType:
    """One finding a paragraph: what, which flag fixes it, and where it was seen; the same of several roles once."""
    parts: list[RenderableType] = []
    for (title, text, fix, seen), alike in grouped(findings, _paragraph).items():
        message = alike[0].diagnosis.message
        if message != text:
            message = f"{' and '.join(each.diagnosis.role for each in alike)}: {text}"
        parts += [Text.assemble((title, "bold"), f": {message}"), Text(f"  fix: {fix}"), Text(f"  seen: {seen}")]
    total = counted(len(findings), "finding") if findings else "nothing to report"
    return Group(*parts, Text(f"{emulation.engine} {emulation.version}: {total}"))


def _paragraph(finding: EngineFinding) -> tuple[str, str, str, str]:
    """Return what is shown of a finding; findings of several roles that differ in nothing else are shown together."""
    rule = finding.rule
    title = f"{finding.severity.value}: {rule.code} {rule.name}"
    return title, _unnamed(finding), finding.fix, ", ".join(rule.threads)


def _unnamed(finding: EngineFinding) -> str:
    return finding.diagnosis.message.removeprefix(f"{finding.diagnosis.role}: ")
