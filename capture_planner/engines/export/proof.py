"""Re-emulation: what the engine makes of an export, compared with the plan it came from.

Every admissible batch is asked of both: decodes by requests, mixed batches by tokens, each with the
most requests and the fewest adapters of a range in which neither side has a size that ends.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from capture_planner.engines.emulation import CapturedGraph, Emulation
from capture_planner.engines.export.export import (
    BACKEND,
    DRAFTER_BACKEND,
    BatchDifference,
    Effect,
    Export,
    Loss,
    Proof,
    all_scopes,
)
from capture_planner.engines.side_by_side import emulation_of_plan
from capture_planner.errors import FlagError, NotEmulated
from capture_planner.modes import GraphMode, Reason, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import mixed_tokens, most_loras, split_at, split_when
from capture_planner.records.environment import Environment
from capture_planner.records.plan import Plan

Emulate = Callable[[Sequence[str], Environment], Emulation]
"""From an engine's own command line and the machine it runs on, as ``Engine.emulate``."""


def prove(export: Export, plan: Plan, emulate: Emulate) -> Export:
    """Return the export with its proof, and with the cost of each loss.

    A backend that the engine refuses on this machine is left out, which is a loss. Where the engine refuses
    the flags for another reason, as on a machine without a GPU, there is no proof, and ``unproved`` says why.
    """
    try:
        emulation = emulated(export, plan.environment, emulate)
    except FlagError as error:
        machine = plan.environment.name
        if (other := _without_drafter_backend(export, plan, error)) is not None:
            return prove(other, plan, emulate)
        if export.backend is None or not all(problem.path[:1] == (f"--{BACKEND}",) for problem in error.problems):
            reason = "; ".join(map(str, error.problems))
            says = f"{export.engine} does not start with these flags on {machine}"
            if isinstance(error, NotEmulated):
                says = f"{export.engine} may start with these flags on {machine}, and that cannot be followed here"
            return attrs.evolve(export, unproved=f"{says}: {reason}")
        says = (
            f"the plan's backend is left out, and the engine chooses its own, which decides the modes; on {machine}: "
            + "; ".join(problem.message for problem in error.problems)
        )
        lost = Loss("backend", says, all_scopes(plan))
        settings = {name: value for name, value in export.settings.items() if name != BACKEND}
        return prove(attrs.evolve(export, settings=settings, losses=(*export.losses, lost)), plan, emulate)
    proof = compared(plan, emulation)
    losses = tuple(attrs.evolve(loss, cost=proof.cost(loss.scope)) for loss in export.losses)
    return attrs.evolve(export, losses=losses, proof=proof)


def _without_drafter_backend(export: Export, plan: Plan, error: FlagError) -> Export | None:
    """Return the export without the drafter's backend, where the engine refuses that and nothing else."""
    flag, key = export.drafter_backend or ("", "")
    others = any(problem.path[:1] != (f"--{flag}",) for problem in error.problems)
    if others or key not in export.settings.get(flag, {}):
        return None
    value = {name: item for name, item in export.settings[flag].items() if name != key}
    says = "the plan's backend of the drafter is left out, and the engine chooses its own; " + "; ".join(
        problem.message for problem in error.problems
    )
    lost = Loss(DRAFTER_BACKEND, says, tuple(scope for scope in all_scopes(plan) if scope[0].is_drafter))
    settings = {**export.settings, flag: value}
    return attrs.evolve(export, settings=settings, drafter_backend=None, losses=(*export.losses, lost))


def emulated(export: Export, environment: Environment, emulate: Emulate) -> Emulation:
    """Emulate the export, its file on disk meanwhile; raises ``FlagError`` with the file's name as it is exported."""
    if not export.by_file:
        return emulate(export.flags, environment)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, export.file_name)
        path.write_text(export.file, encoding="utf-8")
        try:
            return emulate(export.command(str(path)), environment)
        except FlagError as error:
            raise type(error)(
                attrs.evolve(problem, file=problem.file and export.file_name) for problem in error.problems
            ) from None


def compared(plan: Plan | Emulation, emulation: Emulation, *, both_admit: bool = False) -> Proof:
    """Compare a plan with an emulation, or two emulations, graph by graph and batch by batch.

    Batches of which an observation knows no answer are counted in ``unknown``, and are no differences.

    :param both_admit: leave out batches that one of the two does not admit.
    """
    left = emulation_of_plan(plan) if isinstance(plan, Plan) else plan
    ours, theirs = (Counter(map(_plain, each.graphs)) for each in (left, emulation))
    batches = unknown = 0
    differences: list[BatchDifference] = []
    for role in (role for role in left.modes if role in emulation.modes):
        for batch, max_loras, min_reqs in _batches(role, left, emulation):
            count = max_loras - batch.active_loras + 1
            batches += count
            answers = left.dispatch(batch), emulation.dispatch(batch)
            if both_admit and any(answer.reason is Reason.NOT_ADMISSIBLE for answer in answers):
                continue
            if any(answer.reason is Reason.UNKNOWN for answer in answers):
                unknown += count
                continue
            planned, emulated = (answer.entry for answer in answers)
            found = effect(planned, emulated)
            if found is None:
                continue
            size = batch.extent(batch.kind)
            differences.append(
                BatchDifference(
                    role=role,
                    kind=batch.kind,
                    query_len=batch.query_len,
                    first=size,
                    last=size,
                    min_reqs=min_reqs,
                    max_reqs=batch.num_reqs,
                    min_loras=batch.active_loras,
                    max_loras=max_loras,
                    effect=found,
                    planned=planned,
                    emulated=emulated,
                    batches=count,
                )
            )
    return Proof(
        same=tuple((ours & theirs).elements()),
        lacks=tuple((ours - theirs).elements()),
        adds=tuple((theirs - ours).elements()),
        batches=batches,
        differences=tuple(map(_merged, split_when(_unlike, differences))),
        unrun=tuple(role for role in left.modes if role not in emulation.modes),
        unknown=unknown,
    )


def _plain(graph: CapturedGraph) -> CapturedGraph:
    entry = single(graph.entry)
    return graph if entry is graph.entry else attrs.evolve(graph, entry=entry)


def single(entry: Entry) -> Entry:
    """Return the entry as a plan has it: a chain of one draft decode is a single step."""
    return attrs.evolve(entry, draft_steps=None) if entry.draft_steps == 1 else entry


def effect(ours: Entry | None, theirs: Entry | None) -> Effect | None:
    """Say how the engine's graph for a batch differs from the plan's, or None where it does not."""
    if ours is None or theirs is None:
        if ours is theirs:
            return None
        return Effect.CAPTURED if ours is None else Effect.EAGER
    if ours.mode is not theirs.mode:
        return Effect.WEAKER if ours.mode is GraphMode.FULL else Effect.STRONGER
    shapes = [(e.num_tokens, e.num_reqs or 0, e.active_loras) for e in (ours, theirs)]
    if shapes[0] == shapes[1]:
        return None if single(ours) == single(theirs) else Effect.OTHER
    return Effect.PADDED if any(b > a for a, b in zip(*shapes, strict=True)) else Effect.TIGHTER


def _batches(role: Role, left: Emulation, emulation: Emulation) -> Iterator[tuple[Batch, int, int]]:
    """Yield every batch to compare, with the most adapters and the fewest requests that it represents."""
    entries = [graph.entry for graph in (*left.graphs, *emulation.graphs) if graph.role is role]
    # A full graph's room for requests ends with it.
    rooms = {entry.num_reqs or 0 for entry in entries if entry.query_len is None}
    requests = list(split_at(1, left.limits.max_num_reqs, rooms))
    for low, high in split_at(0, most_loras(role, left), {0, *(entry.active_loras for entry in entries)}):
        for family in left.families(role):
            for count, _ in family.requests.counts(low):
                yield Batch.decode(role, count, family.query_len, low), min(high, count), count
        for fewest, most in requests:
            fewest = max(fewest, low)
            for tokens, _ in mixed_tokens(role, left).counts(fewest) if fewest <= most else ():
                yield Batch.mixed(role, min(most, tokens), tokens, low), high, fewest


def _unlike(before: BatchDifference, after: BatchDifference) -> bool:
    named = ("role", "kind", "query_len", "min_loras", "effect", "planned", "emulated")
    return before.last + 1 != after.first or any(getattr(before, n) != getattr(after, n) for n in named)


def _merged(run: Sequence[BatchDifference]) -> BatchDifference:
    fewest, batches = min(each.min_reqs for each in run), sum(each.batches for each in run)
    return attrs.evolve(run[-1], first=run[0].first, min_reqs=fewest, batches=batches)
