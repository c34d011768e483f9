"""Re-emulation: what the engine makes of an export, compared with the plan it came from.

Every admissible batch is asked of both: decodes by requests, mixed batches by tokens, each with the
most requests and the fewest adapters of a range in which neither side has a size that ends.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
from capture_planner.engines.emulation import CapturedGraph, Emulation
from capture_planner.engines.export.export import BACKEND, BatchDifference, Effect, Export, Loss, Proof, all_scopes
from capture_planner.errors import FlagError, NotEmulated
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import decode_families, mixed_tokens, most_loras
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
        lost = Loss(name="backend", says=says, scope=all_scopes(plan))
        return prove(attrs.evolve(export.without_backend(), losses=(*export.losses, lost)), plan, emulate)
    proof = compared(plan, emulation)
    losses = tuple(attrs.evolve(loss, cost=proof.cost(loss.scope)) for loss in export.losses)
    return attrs.evolve(export, losses=losses, proof=proof)


def emulated(export: Export, environment: Environment, emulate: Emulate) -> Emulation:
    """Return what the engine does with the export; its file lies on disk meanwhile, where it needs one.

    Raises ``FlagError`` where the engine refuses the flags, with the name of the file as it is exported.
    """
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


def compared(plan: Plan, emulation: Emulation) -> Proof:
    """Compare a plan with an emulation, graph by graph and batch by batch."""
    run = {manager.role for manager in emulation.managers}
    roles = [role.role for role in plan.roles]
    ours = [_plain(CapturedGraph(role=role.role, entry=entry)) for role in plan.roles for entry in role.entries]
    theirs = [_plain(graph) for graph in emulation.graphs]
    compare = _Comparison(plan, emulation)
    for role in roles:
        if role in run:
            compare.role(role)
    return Proof(
        same=_both(ours, theirs),
        lacks=_without(ours, theirs),
        adds=_without(theirs, ours),
        batches=compare.batches,
        differences=tuple(compare.differences),
        unrun=tuple(role for role in roles if role not in run),
    )


def _plain(graph: CapturedGraph) -> CapturedGraph:
    """Return the graph as a plan has it: a chain of one draft decode is a single step."""
    if graph.entry.draft_steps != 1:
        return graph
    return attrs.evolve(graph, entry=attrs.evolve(graph.entry, draft_steps=None))


def _both(ours: Iterable[CapturedGraph], theirs: Iterable[CapturedGraph]) -> tuple[CapturedGraph, ...]:
    return tuple((Counter(ours) & Counter(theirs)).elements())


def _without(some: Iterable[CapturedGraph], others: Iterable[CapturedGraph]) -> tuple[CapturedGraph, ...]:
    return tuple((Counter(some) - Counter(others)).elements())


def effect(planned: Dispatch, emulated: Dispatch) -> Effect | None:
    """Say how the engine's answer differs from the plan's, or None where it does not."""
    ours, theirs = planned.entry, emulated.entry
    if ours is None or theirs is None:
        if ours is theirs:
            return None
        return Effect.CAPTURED if ours is None else Effect.EAGER
    if ours.mode is not theirs.mode:
        return Effect.WEAKER if ours.mode is GraphMode.FULL else Effect.STRONGER
    shapes = [(e.num_tokens, e.num_reqs or 0, e.active_loras) for e in (ours, theirs)]
    if shapes[0] == shapes[1]:
        return None
    return Effect.PADDED if any(b > a for a, b in zip(*shapes, strict=True)) else Effect.TIGHTER


class _Comparison:
    """All batches of a plan, asked of both sides."""

    def __init__(self, plan: Plan, emulation: Emulation) -> None:
        self.plan, self.emulation = plan, emulation
        self.dispatcher = Dispatcher(plan)
        self.batches = 0
        self.differences: list[BatchDifference] = []

    def role(self, role: Role) -> None:
        entries = [*self.plan.role(role).entries, *(g.entry for g in self.emulation.graphs if g.role is role)]
        rooms = list(_req_ranges(self.plan, entries))
        for low, high in _lora_ranges(role, self.plan, entries):
            for family in decode_families(role, self.plan):
                for count, _ in family.requests.counts(low):
                    self._compare(Batch.decode(role, count, family.query_len, low), min(high, count))
            for fewest, most in rooms:
                fewest = max(fewest, low)
                for tokens, _ in mixed_tokens(role, self.plan).counts(fewest) if fewest <= most else ():
                    self._compare(Batch.mixed(role, min(most, tokens), tokens, low), high, fewest)

    def _compare(self, batch: Batch, max_loras: int, min_reqs: int | None = None) -> None:
        """Dispatch a batch on both sides; a difference like the one before it is merged with it."""
        planned, emulated = self.dispatcher.dispatch(batch), self.emulation.dispatch(batch)
        kind = batch.kind
        size = batch.extent(kind)
        count = max_loras - batch.active_loras + 1
        self.batches += count
        found = effect(planned, emulated)
        if found is None:
            return
        new = BatchDifference(
            role=batch.role,
            kind=kind,
            query_len=batch.query_len,
            first=size,
            last=size,
            min_reqs=batch.num_reqs if min_reqs is None else min_reqs,
            max_reqs=batch.num_reqs,
            min_loras=batch.active_loras,
            max_loras=max_loras,
            effect=found,
            planned=planned.entry,
            emulated=emulated.entry,
            batches=count,
        )
        if self.differences and _like(self.differences[-1], new):
            before = self.differences.pop()
            new = attrs.evolve(
                new, first=before.first, min_reqs=min(before.min_reqs, new.min_reqs), batches=before.batches + count
            )
        self.differences.append(new)


def _like(before: BatchDifference, after: BatchDifference) -> bool:
    """Say whether two differences are one, of neighbouring counts."""
    named = ("role", "kind", "query_len", "min_loras", "effect", "planned", "emulated")
    return before.last + 1 == after.first and all(getattr(before, n) == getattr(after, n) for n in named)


def _lora_ranges(role: Role, plan: Plan, entries: Iterable[Entry]) -> Iterator[tuple[int, int]]:
    """Split the adapter counts at each case of either side; drafters take none."""
    most, low = most_loras(role, plan), 0
    for stop in sorted({0, most} | {e.active_loras for e in entries if e.active_loras <= most}):
        yield low, stop
        low = stop + 1


def _req_ranges(plan: Plan, entries: Iterable[Entry]) -> Iterator[tuple[int, int]]:
    """Split the requests of mixed batches where a full graph's room ends."""
    most, low = plan.limits.max_num_reqs, 1
    rooms = {e.num_reqs for e in entries if e.num_reqs is not None and e.query_len is None}
    for stop in sorted({room for room in rooms if 0 < room < most} | {most}):
        yield low, stop
        low = stop + 1
