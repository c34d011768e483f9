"""Reports of observations: what was captured, what ran on it, what that took, and what data-parallel ranks brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from capture_planner.analysis.data_parallel import explain_share, shape_text
from capture_planner.codec import plain
from capture_planner.engines.check import shape
from capture_planner.errors import CapturePlannerError
from capture_planner.measuring.step_times import step_times
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records._base import grouped
from capture_planner.records.batch import Entry
from capture_planner.records.observation import Observation, ObservedGraph, ObservedRole, ObservedVector
from capture_planner.records.text import counted
from capture_planner.report.writing import Grid, Part, Report, Section, TonedText, warned

MAX_ROWS = 20
"""Graphs and batches that a table lists, the most frequent first; ``--format json`` has all."""


def observation_report(observation: Observation) -> Report:
    """Return the report: the process, then each role with its graphs, its steps and what they took."""
    title = f"{observation.engine} {observation.engine_version}: {_summary(observation)}"
    sections = [Section(name="engine", title=title, parts=(Grid.facts(_facts(observation)),))]
    for role in observation.roles:
        heading = f"{role.role} {role.mode.value}, {counted(len(role.graphs), 'graph')}, {counted(role.steps, 'step')}"
        sections.append(Section(name=role.role, title=heading, parts=_role(role)))
    rows = ((each.role, each.rule, each.before, each.after, each.message) for each in observation.decisions)
    rest: list[Part] = []
    for name, grid in (
        ("decisions", Grid.of(("role", "rule", "before", "after", "because"), rows)),
        ("settings", Grid.of(("setting", "value"), observation.settings)),
    ):
        rest += ("", TonedText(name, "strong"), grid) if grid.rows else ()
    rest += warned(*(f"note: {note}" for note in observation.notes))
    sections.append(Section(name="rest", title="", parts=rest))
    return Report(kind="observation", title=title, sections=tuple(sections))


def _summary(observation: Observation) -> str:
    graphs = counted(observation.num_graphs, "graph")
    passes = sum(role.steps for role in observation.roles)
    eager = sum(role.eager_steps for role in observation.roles)
    return f"{graphs}, {passes:,} pass{'es' * (passes != 1)}" + (f", {eager / passes:.1%} eager" if passes else "")


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
    tokens = observation.kv_tokens(observation.graph_mib or 0.0)
    if costs:
        yield "capture", ", ".join(costs) + (f", the room of {tokens:,} KV-cache tokens" if tokens else "")
    if observation.kv_blocks is not None:
        yield "KV cache", counted(observation.kv_blocks, "block")
    if (mean := _mean_step(observation)) is not None:
        yield "mean step", mean
    if sum(observation.drafted):
        yield "accepted", ", ".join(_accepted(observation))


def _mean_step(observation: Observation) -> str | None:
    """Return what the target's steps took until the next ones; None where they were not measured."""
    try:
        times = step_times(observation)
    except CapturePlannerError:
        # Its steps were not timed: the report goes on without it.
        return None
    stalls = sum(role.stalls for role in observation.roles)
    apart = f"; {counted(stalls, 'stall')} apart" if stalls else ""
    return f"{times.mean_ms:.3f} ms, standard error {times.error_ms:.2g} ms, of {counted(times.steps, 'step')}{apart}"


def _accepted(observation: Observation) -> Iterator[str]:
    """Yield the share of accepted drafts by position, and the mean length."""
    drafted, accepted = observation.drafted, observation.accepted
    for number, (count, taken) in enumerate(zip(drafted, accepted, strict=True), 1):
        yield f"draft {number}: {taken / count:.1%}" if count else f"draft {number}: none proposed"
    # Each request that drafts in a step has a draft at the first position.
    if drafted[0]:
        yield f"{1 + sum(accepted) / drafted[0]:.2f} tokens per request and step"


def _role(role: ObservedRole) -> Iterator[Part]:
    """Yield the tables of a role, a blank line before each but the first."""
    yield _kinds(role)
    if role.steps:
        yield from ("", _reasons(role), "", _batches(role))
    if role.graphs and role.steps:
        yield from ("", _graphs(role))
    if role.trials:
        yield from ("", "captured for a moment, timed and given back", _trials(role))
    if role.eager:
        rows = (
            (str(cost.num_reqs), str(cost.num_tokens), _figure(cost.query_len, ""), _figure(cost.milliseconds, ".3f"))
            for cost in role.eager
        )
        yield from ("", "eager steps, measured after capture")
        yield Grid.of(("requests", "tokens", "each", "ms"), rows, text=0)


def _figure(value: float | None, form: str) -> str:
    """Write a figure; nothing where it was not measured."""
    return "" if value is None else format(value, form)


def _trials(role: ObservedRole) -> Grid:
    rows = (
        (
            graph.entry.mode.value,
            _of(graph),
            str(graph.entry.num_tokens),
            _figure(graph.milliseconds, ".3f"),
            _figure(graph.mib, ",.1f"),
        )
        for graph in role.trials
    )
    return Grid.of(("mode", "of", "tokens", "replay ms", "MiB alone"), rows, text=2)


def _kinds(role: ObservedRole) -> Grid:
    """Return a row for each kind of graph: what was captured, and what it cost."""
    rows = []
    for (mode, of), graphs in grouped(role.graphs, lambda graph: (graph.entry.mode.value, _of(graph))).items():
        tokens = [graph.entry.num_tokens for graph in graphs]
        times = [graph.milliseconds for graph in graphs if graph.milliseconds is not None]
        rows.append(
            (
                mode,
                of,
                str(len(graphs)),
                f"{min(tokens)} to {max(tokens)}",
                _total((graph.seconds for graph in graphs), 2),
                _total((graph.mib for graph in graphs), 0),
                f"{min(times):.3f} to {max(times):.3f}" if times else "",
                f"{sum(graph.replays for graph in graphs):,}",
            )
        )
    return Grid.of(("captured", "of", "graphs", "tokens", "s", "MiB", "replay ms", "steps"), rows, text=2)


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


def _share(steps: int, role: ObservedRole) -> tuple[str, str]:
    return f"{steps:,}", f"{steps / role.steps:.1%}"


def _reasons(role: ObservedRole) -> Grid:
    """Return how steps ran: by mode, and eager ones by reason."""
    counts: Counter[tuple[GraphMode, Reason | None]] = Counter()
    for graph in role.graphs:
        counts[graph.entry.mode, None] += graph.replays
    for count in role.batches:
        if count.graph is None:
            counts[GraphMode.NONE, count.reason] += count.steps
    rows = [(mode, *_share(steps, role), reason or "") for (mode, reason), steps in counts.most_common() if steps]
    # An observer lists the most frequent shapes alone, so counts may not add up to all steps.
    rest = role.steps - counts.total()
    if rest > 0:
        rows.append((GraphMode.NONE, *_share(rest, role), "shapes that are not listed"))
    return Grid.of(("ran", "steps", "share", "why"), rows, right=("steps", "share"))


def _batches(role: ObservedRole) -> Grid:
    """Return the most frequent batches: the graph of each, and the time of a step."""
    rows = [
        (
            shape(count),
            *_share(count.steps, role),
            f"eager ({count.reason})" if count.graph is None else str(role.graphs[count.graph].entry),
            _figure(count.milliseconds, ".3f"),
        )
        for count in role.batches[:MAX_ROWS]
    ]
    # The last row makes the shares add up to all steps.
    others = role.steps - sum(count.steps for count in role.batches[:MAX_ROWS])
    if others:
        rows.append(("other batches", *_share(others, role), "", ""))
    return Grid.of(("batch", "steps", "share", "ran on", "ms"), rows, right=("steps", "share", "ms"))


def _graphs(role: ObservedRole) -> Grid:
    """Return the graphs with the most steps."""
    by_steps = sorted(role.graphs, key=lambda graph: -graph.replays)
    rows = [
        (
            str(graph.entry),
            *_share(graph.replays, role),
            _figure(graph.milliseconds, ".3f"),
            _figure(graph.seconds, ".3f"),
            _figure(graph.mib, ".2f"),
        )
        for graph in by_steps[:MAX_ROWS]
    ]
    if more := by_steps[MAX_ROWS:]:
        rest = sum(graph.replays for graph in more)
        rows.append((counted(len(more), "other graph"), *_share(rest, role), "", "", ""))
    return Grid.of(("graph", "steps", "share", "replay ms", "capture s", "MiB"), rows, text=1)


# Data-parallel ranks -----------------------------------------------------------------------------

NO_VECTORS = "no vector of several ranks is in this observation: one rank ran, or the engine's observer records none"


def _listed(observation: Observation, role: Role | None) -> Iterator[tuple[ObservedRole, ObservedVector, Entry | None]]:
    for each in observation.roles:
        for vector in each.vectors if role in (None, each.role) else ():
            yield each, vector, None if vector.graph is None else each.graphs[vector.graph].entry


def _other_steps(observation: Observation, role: Role | None) -> int:
    return sum(each.other_vectors for each in observation.roles if role in (None, each.role))


def vectors_json(observation: Observation, role: Role | None = None) -> dict[str, Any]:
    """Return each vector with what all ranks ran and why, by rank; of one role, or of all."""
    vectors = [
        {
            "role": seen.role.value,
            "steps": vector.steps,
            "mode": (GraphMode.NONE if entry is None else entry.mode).value,
            "entry": plain(entry),
            "reason": plain(vector.reason),
            "ranks": [
                {
                    "num_reqs": vector.num_reqs[rank],
                    "num_tokens": vector.num_tokens[rank],
                    "query_len": vector.query_len[rank],
                    "past_prompt": vector.past_prompt[rank],
                    "alone": vector.modes[rank].value,
                    "message": explain_share(seen.role, vector, rank, entry),
                }
                for rank in range(vector.num_ranks)
            ],
        }
        for seen, vector, entry in _listed(observation, role)
    ]
    others = _other_steps(observation, role)
    return {"vectors": vectors, "other_steps": others, "idle_steps": observation.idle_steps}


def vectors_report(observation: Observation, role: Role | None = None) -> Report:
    """Return each vector as a table by rank, the most frequent first; and how many steps are of others."""
    sections = []
    for number, (seen, vector, entry) in enumerate(_listed(observation, role)):
        batches = [vector.batch(seen.role, rank) for rank in range(vector.num_ranks)]
        rows = (
            (
                str(rank),
                "idle" if batch is None else shape_text(batch),
                vector.modes[rank],
                explain_share(seen.role, vector, rank, entry),
            )
            for rank, batch in enumerate(batches)
        )
        title = f"{seen.role}, {counted(vector.steps, 'step')} -> {'eager' if entry is None else entry}"
        grid = Grid.of(("rank", "brings", "alone", "because"), rows)
        sections.append(Section(name=f"vector-{number}", title=title, parts=(grid,)))
    others, rest = _other_steps(observation, role), []
    if not sections:
        rest.append(NO_VECTORS)
    elif others:
        rest.append(f"and {counted(others, 'step')} of vectors that are not listed")
    if sections and observation.idle_steps:
        rest.append(f"{counted(observation.idle_steps, 'step')} without work: a dummy batch ran along")
    sections.append(Section(name="rest", title="", parts=rest))
    return Report(kind="observation of ranks", title="What data-parallel ranks ran", sections=tuple(sections))
