"""Reports of engines: what one captures and serves, what to fix, what an export loses, and two side by side."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from capture_planner.engines.check import EngineFinding, Together
from capture_planner.engines.deployments import BatchAnswer, walk
from capture_planner.engines.emulation import CapturedGraph, Emulation, EncoderGraphs, Manager
from capture_planner.engines.export import DRAFT_MODEL, Effect, Export, Proof
from capture_planner.engines.parsing import as_words
from capture_planner.engines.verdict import ranges, verdict
from capture_planner.modes import GraphMode
from capture_planner.records._base import grouped
from capture_planner.records.batch import Kind
from capture_planner.records.text import counted
from capture_planner.report.writing import Grid, Part, Report, Section, TonedText

# What an engine captures -------------------------------------------------------------------------


def emulation_report(emulation: Emulation) -> Report:
    """Return the verdict, modes, graphs by kind, what serves which batches, and what decided it."""
    answers = walk(emulation)
    name, at_most = f"{emulation.engine} {emulation.version}", "at most " if emulation.by_flags else ""
    parts: list[Part] = [
        *verdict(emulation, answers).lines,
        "",
        TonedText(f"{name}: {at_most}{_graphs(emulation)}", "strong"),
        TonedText(shlex.join(emulation.command) or "(no flags: all as by default)", "note"),
        f"sizes: {sizes_text(emulation.sizes)}",
    ]
    for alike in grouped(emulation.managers, lambda manager: _facts(manager, answers)).values():
        parts += ["", *_roles(alike, answers, at_most)]
    for encoder in emulation.encoders:
        parts += ["", *_encoder(encoder)]
    if emulation.decisions:
        rows = ((each.role, each.rule, each.before, each.after, each.message) for each in emulation.decisions)
        parts += ["", TonedText("decisions", "strong"), Grid.of(("role", "rule", "before", "after", "because"), rows)]
    settings = ((each.name, _value(each.value), each.source) for each in emulation.settings)
    parts += ["", TonedText("settings", "strong"), Grid.of(("setting", "value", "from"), settings)]
    return Report(kind="engine", title=name, sections=(Section(name="engine", title="", parts=parts),))


def _facts(manager: Manager, answers: Sequence[BatchAnswer]) -> tuple[object, ...]:
    """Return all that the tables say about a role: of two roles with the same, it is said once."""
    return (manager.mode, tuple(_graph_rows(manager)), tuple(_batch_rows(manager, answers)))


def _roles(alike: Sequence[Manager], answers: Sequence[BatchAnswer], at_most: str) -> Iterator[Part]:
    first, names = alike[0], " and ".join(manager.role for manager in alike)
    each = " each" if len(alike) > 1 else ""
    yield TonedText(f"{names} {at_most}{first.mode.value}, {counted(len(first.graphs), 'graph')}{each}", "strong")
    yield Grid.of(("graphs", "of", "LoRA", "tokens"), _graph_rows(first), right=("LoRA",))
    columns = ("batches", "run", "requests or tokens", "LoRA", "padding", "why")
    yield Grid.of(columns, _batch_rows(first, answers), right=("padding",))


def _graph_rows(manager: Manager) -> Iterator[tuple[str, str, str, str]]:
    kinds = grouped(manager.graphs, lambda graph: (graph.entry.mode.value, _of(graph), graph.entry.active_loras))
    for (name, of, loras), alike in kinds.items():
        sizes = sorted({graph.entry.num_tokens for graph in alike})
        yield name, of, str(loras) if loras else "", sizes_text(sizes)


def _graphs(emulation: Emulation) -> str:
    # Graphs of the encoder belong to no role, so they are not among the emulation's.
    encoder = sum(len(each.budgets) for each in emulation.encoders)
    return counted(len(emulation.graphs), "graph") + (f", and {encoder} of the encoder" if encoder else "")


def _encoder(encoder: EncoderGraphs) -> Iterator[Part]:
    largest = encoder.budgets[-1]
    beyond = f"; images of {largest + 1} to {encoder.reach} tokens run eager" if largest < encoder.reach else ""
    yield TonedText(f"encoder {GraphMode.FULL.value}, {counted(len(encoder.budgets), 'graph')}", "strong")
    items = f"up to {counted(encoder.max_items, 'image')} or videos in one, together up to its budget{beyond}"
    yield f"budgets, in tokens of the language model: {sizes_text(encoder.budgets)}; {items}"


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
    own = (one for one in answers if one.batch.role is manager.role)
    kinds = grouped(own, lambda one: (one.batch.query_len, one.answer.mode, one.answer.reason))
    for (query_len, mode, reason), group in kinds.items():
        batches = "mixed, by tokens" if query_len is None else f"decodes of {query_len}, by requests"
        loras = sorted({one.batch.active_loras for one in group})
        adapters = "" if loras == [0] else sizes_text(loras)
        yield batches, mode, _ranges(group), adapters, _padding(group), "" if reason is None else str(reason)


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
    # A bool is an int too, but no size.
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
        # A step is shorter to read than the sizes only from four of them on.
        if end - at < 3:
            parts.append(str(sizes[at]))
            at += 1
        else:
            parts.append(f"{sizes[at]}..{sizes[end]} by {sizes[at + 1] - sizes[at]}")
            at = end + 1
    return " ".join(parts) or "none"


def findings_report(
    emulation: Emulation,
    findings: Sequence[EngineFinding],
    program: str = "",
    together: Together | None = None,
    reached: str = "",
) -> Report:
    """Return one paragraph per fix: the findings, the fix, and where they were reported.

    :param program: what the flags of ``together`` are given to.
    :param reached: what a load reaches.
    """
    parts: list[Part] = []
    paragraphs = grouped(
        findings, lambda f: (f"{f.severity.value}: {f.rule.code} {f.rule.name}", f.fix, ", ".join(f.rule.threads))
    )
    for (title, fix, seen), alike in paragraphs.items():
        # Roles share the fix; their messages may differ.
        messages = []
        for text, roles in grouped(
            alike, lambda each: each.diagnosis.message.removeprefix(f"{each.diagnosis.role}: ")
        ).items():
            message = roles[0].diagnosis.message
            # Several roles, or one whose name its message begins with: name them once, in front.
            if message != text:
                message = f"{' and '.join(each.diagnosis.role for each in roles)}: {text}"
            messages.append(message)
        parts += [f"{title}: {'; '.join(messages)}", f"  fix: {fix}", f"  reported: {seen}"]
    if together is not None:
        # A change of TensorRT-LLM may be keys of its YAML file, which no command line takes.
        flags = all(flag.startswith("-") for change in together.changes for flag, _ in change.flags)
        line = f"{program} {shlex.join(together.command)}" if flags else ", then ".join(map(str, together.changes))
        left = f"leaves {', '.join(together.left)}" if together.left else "leaves nothing to report"
        parts += [f"together ({together.price}; {left}):", TonedText(f"  {line}", "verbatim")]
    total = counted(len(paragraphs), "finding") if findings else "nothing to report"
    title = f"{emulation.engine} {emulation.version}: {total}"
    parts += [reached] if reached else []
    return Report(kind="check", title=title, sections=(Section(name="check", title="", parts=(*parts, title)),))


# What an export loses ---------------------------------------------------------------------------

MOST_DIFFERENCES = 12
"""Ranges of batches that are shown; ``--format json`` has all of them."""


def launch_command(export: Export, plan_file: str, program: str) -> str:
    """Return the command that starts the engine under the plan itself: with its model, and the drafter to be named."""
    # The plan itself replaces all other settings.
    settings = {name: value for name, value in export.settings.items() if "model" in name or DRAFT_MODEL in str(value)}
    # vLLM's server takes the model without a flag.
    model = [str(settings.pop("model"))] if "model" in settings else []
    return shlex.join(["capture-planner", "launch", plan_file, "--", *program.split(), *model, *as_words(settings)])


def export_report(export: Export, output: Path | None, launch: str | None) -> Report:
    """Return the flags, what they lose, with what it costs, and what the engine makes of them.

    :param output: where the engine's configuration file is written.
    :param launch: the command that runs the plan itself; None if the engine has no plugin for it.
    """
    flags = shlex.join(export.command(str(output or export.file_name)))  # on one line, which a table would break
    parts: list[Part] = [TonedText(flags, "verbatim"), ""]
    if launch is not None:
        parts += [TonedText(f"to run the plan itself: {launch}", "verbatim"), ""]
    # Such an engine takes a file, which does not exist unless it is printed here.
    if export.by_file and output is None:
        parts += [TonedText(f"{export.file_name}:", "strong"), *export.file.rstrip().split("\n"), ""]
    parts += _losses(export)
    if export.proof is not None:
        parts += ["", *_proof(export.proof)]
    else:
        parts += ["", TonedText(f"not proved: {export.unproved}", "bad")]
    section = Section(name="export", title="", parts=parts)
    return Report(kind="export", title=f"A plan as flags of {export.engine}", sections=(section,))


def _losses(export: Export) -> Iterator[Part]:
    # A plugin names the losses that it knows; the proof compares the answers themselves.
    if not export.losses:
        if export.proof is not None and export.proof.loss is None:
            yield TonedText("nothing of the plan is lost", "good")
        elif export.proof is not None:
            yield TonedText(f"lost, though the engine's plugin names no loss: {export.proof.loss}", "bad")
        return
    rows = ((loss.name, loss.says, "" if loss.cost is None else str(loss.cost)) for loss in export.losses)
    yield Grid.of(("lost", "meaning", "cost"), rows)


def _proof(proof: Proof) -> Iterator[Part]:
    yield TonedText("as the engine reads it", "strong")
    yield (
        f"{counted(len(proof.same), 'graph')} as planned, {len(proof.lacks)} of the plan missing, "
        f"{len(proof.adds)} added; of {proof.batches} batches, "
        f"{sum(each.batches for each in proof.differences)} are answered differently"
    )
    if proof.unrun:
        yield f"the engine runs no separate passes of {', '.join(proof.unrun)}"
        yield from (f"assumed: {each}" for each in proof.assumptions)
    counts = ((effect, proof.count(effect)) for effect in Effect)
    if proof.differences:
        yield "; ".join(f"{count} {effect.value}" for effect, count in counts if count)
        yield Grid.of(("role", "batches", "planned", "engine", "effect"), _differences(proof))
    more = len(proof.differences) - MOST_DIFFERENCES
    if more > 0:
        yield f"and {more} more ranges; --format json has them"


def _differences(proof: Proof) -> Iterator[tuple[str, ...]]:
    # Of many ranges only some are shown: first those that lose a graph.
    worst_first = sorted(proof.differences, key=lambda each: list(Effect).index(each.effect))
    for each in worst_first[:MOST_DIFFERENCES]:
        span = f"{each.first}" if each.first == each.last else f"{each.first}..{each.last}"
        tokens = "token" if span == "1" else "tokens"
        unit = f"decodes of {each.query_len}: {span}" if each.kind is Kind.DECODE else f"mixed: {span} {tokens}"
        yield each.role, unit, str(each.planned or "eager"), str(each.emulated or "eager"), each.effect.value
