"""What must hold for the observations of all workers of one vLLM under a plan; by name, with what was seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.engines.observed import emulation_of
from capture_planner.modes import Role
from capture_planner.records._base import digest
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.observation import Observation, ObservedRole
from capture_planner.records.plan import Plan

Finding = tuple[str, bool]


def worker_figures(seen: Observation) -> dict[str, Any]:
    """Return what a result has of one worker."""
    return {
        "rank": seen.rank,
        "replica": seen.replica,
        "plan": seen.plan,
        "graphs": {role.role.value: len(role.graphs) for role in seen.roles},
        "capture_seconds": seen.capture_seconds,
        "graph_mib": seen.graph_mib,
        "kv_blocks": seen.kv_blocks,
        "idle_steps": seen.idle_steps,
        "steps": {role.role.value: _by_mode(role) for role in seen.roles},
        "vectors": [
            {"requests": each.num_reqs, "tokens": each.num_tokens, "steps": each.steps, "reason": each.reason}
            for role in seen.roles
            for each in role.vectors[:6]
        ],
        "decisions": [each.message for each in seen.decisions],
        "notes": list(seen.notes),
    }


def _by_mode(role: ObservedRole) -> dict[str, int]:
    counts: Counter[str] = Counter({"other": role.other_batches})
    for batch in role.batches:
        counts["NONE" if batch.graph is None else role.graphs[batch.graph].entry.mode.value] += batch.steps
    return dict(counts)


def entries_of(seen: Observation, role: Role) -> tuple[Entry, ...]:
    """Return what a worker captured for a role, in order."""
    return next((tuple(g.entry for g in each.graphs) for each in seen.roles if each.role is role), ())


def capture_findings(plan: Plan, workers: Sequence[Observation]) -> Iterator[Finding]:
    """Yield whether all workers captured the plan's entries, in its order, and have its digest."""
    yield f"plan {digest(plan)[:15]} on {len(workers)} workers", all(each.plan == digest(plan) for each in workers)
    for role in plan.roles:
        counts = [len(entries_of(each, role.role)) for each in workers]
        same = all(entries_of(each, role.role) == role.entries for each in workers)
        yield f"{role.role.value}: captured {counts}, planned {len(role.entries)}, same in order", same


def answer_findings(plan: Plan, workers: Sequence[Observation]) -> Iterator[Finding]:
    """Yield whether each worker's dispatcher answers every decode as ours, and no decode is eager that ours serves."""
    dispatcher = Dispatcher(plan)
    for seen in workers:
        engine, wrong, asked = emulation_of(seen), [], 0
        for role in plan.planned:
            length = (
                1 if role is Role.DRAFT_DECODE else 1 + (0 if plan.speculative is None else plan.speculative.num_tokens)
            )
            for reqs in range(1, plan.limits.max_num_reqs + 1):
                batch = Batch.decode(role, reqs, length)
                asked += 1
                if engine.dispatch(batch).entry != dispatcher.dispatch(batch).entry:
                    wrong.append(f"{role.value} {reqs}")
        place = f"rank {seen.rank}"
        yield f"{place}: {asked - len(wrong)} of {asked} decodes answered as planned {wrong[:4] or ''}", not wrong


def step_findings(plan: Plan, workers: Sequence[Observation]) -> Iterator[Finding]:
    """Yield whether each step of tensor-parallel workers ran on the planned entry, and all took the same steps."""
    dispatcher = Dispatcher(plan)
    tallies = []
    for seen in workers:
        steps: Counter[tuple[Any, ...]] = Counter()
        wrong = 0
        for role in seen.roles:
            for count in role.batches:
                entry = None if count.graph is None else role.graphs[count.graph].entry
                batch = count.batch(role.role)
                steps[role.role, batch, entry] += count.steps
                wrong += count.steps * (dispatcher.dispatch(batch).entry != entry)
        tallies.append(steps)
        total = steps.total()
        yield f"rank {seen.rank}: {total - wrong} of {total} passes ran on the planned entry", not wrong and total > 0
    totals = [each.total() for each in tallies]
    yield f"the workers took the same steps ({totals})", all(each == tallies[0] for each in tallies)


def agreement_findings(workers: Sequence[Observation]) -> Iterator[Finding]:
    """Yield whether data-parallel ranks ran the same mode and tokens in each step with the same vector."""
    ran: dict[tuple[Any, ...], set[tuple[str, int] | None]] = {}
    steps = 0
    for seen in workers:
        for role in seen.roles:
            for each in role.vectors:
                entry = None if each.graph is None else role.graphs[each.graph].entry
                key = (role.role, each.num_reqs, each.num_tokens, each.query_len, each.past_prompt, each.modes)
                ran.setdefault(key, set()).add(None if entry is None else (entry.mode.value, entry.num_tokens))
                steps += each.steps
    differing = [key[1:3] for key, answers in ran.items() if len(answers) > 1]
    yield f"{len(ran)} vectors of {steps} steps, ranks differ in {differing[:3] or 'none'}", not differing and steps > 0
    idle = [each.idle_steps for each in workers]
    yield f"ranks without work ran along ({idle})", any(idle)
