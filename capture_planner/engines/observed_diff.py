"""Differences between a plan and an observation of its engine (law 12), or between two observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import attrs

from capture_planner.analysis.diff import Change, differing_fields, graphs_text
from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines.check import shape, share, why
from capture_planner.engines.deployments import emulation_of
from capture_planner.engines.emulation import Emulation
from capture_planner.engines.export import BatchDifference, Effect, compared, single
from capture_planner.modes import Role
from capture_planner.records._base import digest, grouped
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_tiers, union
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.text import counted, ranges_text


@attrs.frozen(kw_only=True)
class ObservedDiff:
    """Changes from one deployment to another, of which at least one was observed."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    """Remarks, not differences: graphs that the traffic did not need, batches that the engine was not asked about."""


def observed_diff(old: Plan | Observation, new: Plan | Observation) -> ObservedDiff:
    """Compare two deployments: limits, modes, graphs, the answer to every admissible batch, and what really ran."""
    before, after = emulation_of(old), emulation_of(new)
    changes = [*_whole(old, new), *_passes(before, after), *_modes(before, after), *_graphs(before, after)]
    proof = compared(before, after, both_admit=True)
    changes += _answers(proof.differences)
    notes = []
    if proof.unknown:
        notes.append(f"not compared: {proof.unknown:,} of the allowed batches, which the engine was not asked about")
    for plan, observation in ((old, new), (new, old)):
        # What ran is compared with a plan alone: between two observations loads differ, which is no drift.
        if isinstance(plan, Plan) and isinstance(observation, Observation):
            changes += _ran_otherwise(plan, observation)
    for each in (old, new):
        if isinstance(each, Observation):
            notes += _never_replayed(each)
    return ObservedDiff(changes=tuple(changes), notes=tuple(notes))


def _whole(old: Plan | Observation, new: Plan | Observation) -> Iterator[Change]:
    """Compare what decides which batches are admissible, and the plan that was applied."""
    if old.limits != new.limits:
        yield Change(None, "limits", f"limits: {differing_fields(old.limits, new.limits)}")
    before, after = (", ".join(f"{k} from {first}" for first, _, k in decode_tiers(each)) for each in (old, new))
    # Schedules are compared by what they draft: two specs can say the same.
    if before != after:
        yield Change(None, "speculative", f"drafted tokens by requests: {before} became {after}")
    for name in ("lora", "parallel"):
        own, other = getattr(old, name), getattr(new, name)
        if own != other:
            yield Change(None, name, f"{name}: {differing_fields(own, other)}")
    applied = [digest(each) if isinstance(each, Plan) else each.plan for each in (old, new)]
    # An observation names its plan by digest, so that a plan can be told from its like.
    if applied[0] != applied[1]:
        before, after = ("none" if each is None else each[:19] for each in applied)
        yield Change(None, "plan", f"applied plan: {before} became {after}")


def _passes(before: Emulation, after: Emulation) -> Iterator[Change]:
    """Compare the tokens of each request in a pass of draft decodes."""
    role = Role.DRAFT_DECODE
    # A role that comes or goes is a change by itself (``_modes``).
    if role in before.modes and role in after.modes:
        old, new = (sorted({family.query_len for family in each.families(role)}) for each in (before, after))
        if old and new and old != new:
            tokens = " became ".join(", ".join(map(str, each)) for each in (old, new))
            yield Change(role, "drafts", f"{role}: tokens of each request in a pass: {tokens}")


def _modes(before: Emulation, after: Emulation) -> Iterator[Change]:
    for role in Role:
        old, new = before.modes.get(role), after.modes.get(role)
        if old is None and new is not None:
            yield Change(role, "role", f"{role} is new, with mode {new.value}")
        elif old is not None and new is None:
            yield Change(role, "role", f"{role} is gone, with mode {old.value}")
        elif old is not new and old is not None and new is not None:
            yield Change(role, "mode", f"{role}: mode {old.value} became {new.value}")


def _graphs(before: Emulation, after: Emulation) -> Iterator[Change]:
    for role in Role:
        old, new = (
            Counter((single(graph.entry), graph.max_query_len) for graph in each.graphs if graph.role is role)
            for each in (before, after)
        )
        for subject, words, graphs in (
            ("added", "also captures", new - old),
            ("gone", "no longer captures", old - new),
        ):
            for widest, alike in grouped(graphs.elements(), lambda graph: graph[1]).items():
                ordered = tuple(sorted((entry for entry, _ in alike), key=lambda entry: entry.capture_order))
                only = "" if widest is None else f", for decodes of up to {widest}"
                yield Change(role, subject, f"{role} {words} {graphs_text(ordered)}{only}", entries=ordered)


MAX_SPANS = 5
"""Ranges of batches that a change names."""

_EFFECTS = {
    Effect.EAGER: "run eager",
    Effect.WEAKER: "run PIECEWISE instead of FULL",
    Effect.PADDED: "are padded further",
    Effect.TIGHTER: "are padded less",
    Effect.STRONGER: "run FULL instead of PIECEWISE",
    Effect.CAPTURED: "have a graph, and had none",
    Effect.OTHER: "run on a graph of another query length or chain",
}


def _answers(differences: Iterable[BatchDifference]) -> Iterator[Change]:
    """Yield one change for all batches of one kind with the same difference."""
    alike = grouped(differences, lambda each: (each.role, each.kind, each.query_len, each.effect))
    for (role, kind, query_len, effect), group in alike.items():
        spans = union((each.first, each.last) for each in group)
        shown = ranges_text(spans[:MAX_SPANS]) + (", ..." if len(spans) > MAX_SPANS else "")
        if kind is Kind.DECODE:
            batches = f"decodes of {shown} requests, {query_len} each,"
        else:
            batches = f"mixed batches of {shown} tokens"
        loras = {each.max_loras for each in group} - {0}
        batches += f" with up to {max(loras)} LoRA" if loras else ""
        before, after = (group[0].planned or "eager"), (group[0].emulated or "eager")
        count = sum(each.batches for each in group)
        total = f"; {count:,} batches in all" if len(spans) > MAX_SPANS else ""
        message = f"{role}: {batches} {_EFFECTS[effect]}, such as {before}, which became {after}{total}"
        yield Change(role, "answer", message)


def _ran_otherwise(plan: Plan, observation: Observation) -> Iterator[Change]:
    """Yield the batches that ran on another graph than the plan's, or eager although the plan has one."""
    dispatcher = Dispatcher(plan)
    for role in observation.roles:
        steps: Counter[str] = Counter()
        examples: dict[str, str] = {}
        for count in role.batches if role.role in plan.planned else ():
            planned = dispatcher.dispatch(count.batch(role.role)).entry
            ran = None if count.graph is None else role.graphs[count.graph].entry
            # Graphs of one step are equal, whether they count as a chain or not.
            if planned is None or (ran is not None and single(planned) == single(ran)):
                continue
            subject = "eager" if ran is None else "graph"
            steps[subject] += count.steps
            how = why(count.reason) if ran is None else f"{ran}, not {planned}"
            examples.setdefault(subject, f"{shape(count)} ({how})")
        words = {"eager": "ran eager, and the plan has a graph", "graph": "ran on another graph than the plan's"}
        for subject in (each for each in words if steps[each]):
            says = f"{share(steps[subject], role.steps)} {words[subject]}, such as {examples[subject]}"
            yield Change(role.role, subject, f"{role.role}: {says}")


def _never_replayed(observation: Observation) -> Iterator[str]:
    for role in observation.roles:
        unused = tuple(graph.entry for graph in role.graphs if not graph.replays)
        # Other traffic may need them, so it is no change.
        if unused and role.steps:
            yield f"{role.role}: in {counted(role.steps, 'step')}, no step ran on {graphs_text(unused)}"
