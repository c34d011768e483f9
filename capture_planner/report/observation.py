"""Observations as rich tables: what was captured, what ran on it, and what that took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from capture_planner.engines.observed_check import counted_steps, shape
from capture_planner.engines.observed_diff import ObservedDiff
from capture_planner.modes import GraphMode, Reason
from capture_planner.records.observation import Observation, ObservedGraph, ObservedRole
from capture_planner.records.text import counted
from capture_planner.report.terminal import mode_text, ran_text, table_of

MAX_ROWS = 20
"""Graphs and batches that a table lists, the most frequent first; ``--format json`` has all."""


def observation_tables(observation: Observation) -> RenderableType:
    """The whole observation: the process, then each role with its graphs, its steps and what they took."""
    parts: list[RenderableType] = [
        Text(f"{observation.engine} {observation.engine_version}: {_summary(observation)}", style="bold"),
        Padding(table_of("", "", rows=_facts(observation)), (0, 0, 0, 2)),
    ]
    for role in observation.roles:
        title = Text.assemble((f"{role.role} ", "bold underline"), mode_text(role.mode))
        title.append(f", {counted(len(role.graphs), 'graph')}, {counted_steps(role.steps)}")
        parts += [Text(""), title, *(Padding(part, (0, 0, 0, 2)) for part in _role(role))]
    if observation.decisions:
        rows = ((each.role, each.rule, each.before, each.after, each.message) for each in observation.decisions)
        table = table_of("role", "rule", "before", "after", "because", rows=rows)
        parts += [Text(""), Text("decisions", style="bold"), table]
    if observation.settings:
        parts += [Text(""), Text("settings", style="bold"), table_of("setting", "value", rows=observation.settings)]
    return Group(*parts, *(Text(f"note: {note}", style="yellow") for note in observation.notes))


def _summary(observation: Observation) -> str:
    graphs = counted(observation.num_graphs, "graph")
    steps = [role.steps for role in observation.roles]
    eager = sum(role.eager_steps for role in observation.roles)
    return f"{graphs}, {counted_steps(sum(steps))}" + (f", {eager / sum(steps):.1%} eager" if sum(steps) else "")


def _facts(observation: Observation) -> Iterator[tuple[str, str]]:
    yield "model", observation.model
    if observation.device is not None:
        versions = ((name, getattr(observation, name)) for name in ("driver", "torch"))
        yield "device", ", ".join([observation.device, *(f"{name} {each}" for name, each in versions if each)])
    if observation.world_size > 1:
        yield "rank", f"{observation.rank} of {observation.world_size}"
    yield "plan", "none: the engine by itself" if observation.plan is None else observation.plan
    limits = observation.limits
    yield "limits", f"{counted(limits.max_num_reqs, 'request')}, {counted(limits.max_num_tokens, 'token')}"
    yield "counted", f"{observation.seconds:,.0f} s from {observation.started}"
    capture = [(observation.capture_seconds, "s", 1), (observation.graph_mib, "MiB of graphs", 0)]
    costs = [f"{value:,.{digits}f} {unit}" for value, unit, digits in capture if value is not None]
    if costs:
        yield "capture", ", ".join(costs)
    if observation.kv_blocks is not None:
        yield "KV cache", counted(observation.kv_blocks, "block")
    if sum(observation.drafted):
        yield "accepted", ", ".join(_accepted(observation))


def _accepted(observation: Observation) -> Iterator[str]:
    """Yield the share of accepted drafts by position, and the mean length."""
    drafted, accepted = observation.drafted, observation.accepted
    for position, count in enumerate(drafted):
        taken = accepted[position] if position < len(accepted) else 0
        yield f"draft {position + 1}: {taken / count:.1%}" if count else f"draft {position + 1}: none proposed"
    if drafted[0]:
        yield f"{1 + sum(accepted) / drafted[0]:.2f} tokens per request and step"


def _role(role: ObservedRole) -> Iterator[RenderableType]:
    if role.graphs:
        yield _kinds(role)
    if role.steps:
        yield from (Text(""), _reasons(role), Text(""), _batches(role))
    if role.graphs and role.steps:
        yield from (Text(""), _graphs(role))
    if role.eager:
        rows = (
            (
                str(cost.num_reqs),
                str(cost.num_tokens),
                "" if cost.query_len is None else str(cost.query_len),
                f"{cost.milliseconds:.3f}",
            )
            for cost in role.eager
        )
        columns = ("requests", "tokens", "each", "ms")
        yield from (Text(""), Text("eager steps, measured after capture"), table_of(*columns, right=columns, rows=rows))


def _kinds(role: ObservedRole) -> RenderableType:
    """A row for each kind of graph: what was captured, and what it cost."""
    kinds: dict[tuple[str, str], list[ObservedGraph]] = {}
    for graph in role.graphs:
        kinds.setdefault((graph.entry.mode.value, _of(graph)), []).append(graph)
    figures = ("graphs", "tokens", "s", "MiB", "replay ms", "steps")
    table = table_of("captured", "of", *figures, right=figures)
    for (mode, of), graphs in kinds.items():
        tokens = [graph.entry.num_tokens for graph in graphs]
        table.add_row(
            mode,
            of,
            str(len(graphs)),
            f"{min(tokens)} to {max(tokens)}",
            _total((graph.seconds for graph in graphs), 2),
            _total((graph.mib for graph in graphs), 0),
            _span([graph.milliseconds for graph in graphs if graph.milliseconds is not None]),
            f"{sum(graph.replays for graph in graphs):,}",
        )
    return table


def _of(graph: ObservedGraph) -> str:
    entry = graph.entry
    if graph.max_query_len is not None:
        return f"decodes of 1 to {graph.max_query_len}"
    text = f"decodes of {entry.query_len}" if entry.query_len else "prompts" if graph.prompts_only else "any batch"
    text += f", chain of {entry.draft_steps}" if entry.draft_steps else ""
    return text + (f", {entry.active_loras} LoRA" if entry.active_loras else "")


def _total(values: Iterable[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known):,.{digits}f}" if known else ""


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}" if values else ""


def _reasons(role: ObservedRole) -> RenderableType:
    """How steps ran: by mode, and eager ones by reason."""
    ran: Counter[tuple[GraphMode, Reason | None]] = Counter()
    for graph in role.graphs:
        ran[graph.entry.mode, None] += graph.replays
    for count in role.batches:
        if count.graph is None:
            ran[GraphMode.NONE, count.reason] += count.steps
    table = table_of("ran", "steps", "share", "why", right=("steps", "share"))
    for (mode, reason), steps in ran.most_common():
        if steps:
            table.add_row(ran_text(mode), f"{steps:,}", f"{steps / role.steps:.1%}", reason or "")
    rest = role.steps - ran.total()
    if rest > 0:
        table.add_row(ran_text(GraphMode.NONE), f"{rest:,}", f"{rest / role.steps:.1%}", "shapes that are not listed")
    return table


def _batches(role: ObservedRole) -> RenderableType:
    """The most frequent batches: the graph of each, and the time of a step."""
    table = table_of("batch", "steps", "share", "ran on", "ms", right=("steps", "share", "ms"))
    for count in role.batches[:MAX_ROWS]:
        ran_on = f"eager ({count.reason})" if count.graph is None else str(role.graphs[count.graph].entry)
        milliseconds = "" if count.milliseconds is None else f"{count.milliseconds:.3f}"
        table.add_row(shape(count), f"{count.steps:,}", f"{count.steps / role.steps:.1%}", ran_on, milliseconds)
    others = role.steps - sum(count.steps for count in role.batches[:MAX_ROWS])
    if others:
        table.add_row("other batches", f"{others:,}", f"{others / role.steps:.1%}", "", "")
    return table


def _graphs(role: ObservedRole) -> RenderableType:
    """The graphs with the most steps."""
    figures = ("steps", "share", "replay ms", "capture s", "MiB")
    table = table_of("graph", *figures, right=figures)
    by_steps = sorted(role.graphs, key=lambda graph: -graph.replays)
    for graph in by_steps[:MAX_ROWS]:
        costs = ((graph.milliseconds, 3), (graph.seconds, 3), (graph.mib, 2))
        figures_of = ("" if value is None else f"{value:.{digits}f}" for value, digits in costs)
        table.add_row(str(graph.entry), f"{graph.replays:,}", f"{graph.replays / role.steps:.1%}", *figures_of)
    more = by_steps[MAX_ROWS:]
    if more:
        rest = sum(graph.replays for graph in more)
        name = f"{counted(len(more), 'other graph')}"
        table.add_row(name, f"{rest:,}", f"{rest / role.steps:.1%}", "", "", "")
    return table


def diff_text(diff: ObservedDiff) -> str:
    """One difference a line, then the notes."""
    changes = [change.message for change in diff.changes] or ["no differences"]
    return "\n".join([*changes, *(f"note: {note}" for note in diff.notes)])
