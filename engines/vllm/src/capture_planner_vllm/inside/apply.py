"""From a plan to what one of vLLM's graph managers captures, and in which order it tries the graphs of a batch.

vLLM's ``CudaGraphManager.dispatch`` (vllm/v1/worker/gpu/cudagraph_utils.py, 0.33) looks up a list by the number of
tokens and the adapter case, and takes the first graph of it that is compatible. Where the list has every graph that
holds so many tokens, in the order of ``Entry.cost``, that is next fit over all entries (law 3). A graph behind another
that serves all its batches is never taken and does not stand in the list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner.records.batch_space import decode_tiers, draft_steps, served_cases
from capture_planner.records.model import Speculative
from capture_planner.records.plan import Decision, Plan, RolePlan
from capture_planner.records.text import counted

Key = tuple[int, int]
"""Tokens, padding of earlier steps included, and the adapter case."""
Shape = tuple[int, int | None, int | None]
"""Tokens, requests, query length."""


@attrs.frozen(kw_only=True)
class ManagerFacts:
    """What vLLM has decided about one graph manager before it captures."""

    role: Role
    mode: GraphMode
    """The resolved graph mode."""
    max_num_reqs: int
    max_num_tokens: int
    lora_cases: tuple[int, ...] = (0,)
    num_speculative_tokens: int = 0
    dynamic: bool = False
    """True if the draft length depends on the batch size."""
    varlen_query_len: int | None = None
    """Most tokens of a request in a decode graph of adaptive verification, 1 + K; None without it."""
    widest_mixed: int | None = None
    """Most tokens of a graph of mixed batches; None if the model does not bound them (recoverSSM does)."""
    ranks: int = 1
    """Data-parallel ranks that pad together."""
    reason: str = ""
    """The reason for the mode, as vLLM logged it."""


@attrs.frozen(kw_only=True)
class RoleTable:
    """What a manager captures, and what it looks up."""

    entries: tuple[Entry, ...]
    """Entries in capture order."""
    candidates: Mapping[Key, Sequence[Entry]]
    """Entries to try for each key, best first."""
    lora_dispatch: Mapping[int, int]
    """The adapter case of each count of active adapters; a count without a case stands for itself, and runs eager."""
    decisions: tuple[Decision, ...] = ()
    """Decisions of vLLM that differ from the plan, with reasons."""


def role_table(plan: Plan, facts: ManagerFacts) -> RoleTable:
    """Return what the manager of a planned role does; raises ``DispatchError`` for another role."""
    planned = plan.role(facts.role)
    left: dict[str, list[Entry]] = {}
    usable = []
    of_target = _of_target(plan, facts) if facts.role.is_drafter and Role.TARGET in plan.planned else None
    shapes = _full_shapes(plan, of_target or ())
    cases_of = _cases_by_shape(planned.entries)
    # GPUModelRunner.capture_model asks the target alone whether there is something to capture (0.33).
    bare = of_target == ()
    for entry in planned.entries:
        rule = "engine-bare-target" if bare else _obstacle(entry, facts, shapes)
        rule = rule or _ranks_obstacle(entry, facts, cases_of)
        if rule is None:
            usable.append(entry)
        else:
            left.setdefault(rule, []).append(entry)
    # With adaptive verification, entries of several query lengths may be one graph of vLLM.
    entries = tuple(dict.fromkeys(_as_captured(entry, facts) for entry in usable))
    cases = sorted({entry.active_loras for entry in entries})
    most = facts.lora_cases[-1]
    # An idle rank has the most adapters, and a batch not more than requests: without a case for it, all ran eager.
    dispatch = {n: next((case for case in cases if case >= min(n, facts.max_num_reqs)), n) for n in range(1, most + 1)}
    decisions = [_omission(planned, facts, rule, entries_left) for rule, entries_left in left.items()]
    # No omission: such a graph is captured, but vLLM looks up the batch's own adapter case only.
    crossing = _crossing(entries, plan, facts)
    if crossing:
        decisions.append(_adapters(planned, facts, crossing))
    return RoleTable(
        entries=entries, candidates=candidates(entries, plan, facts), lora_dispatch=dispatch, decisions=tuple(decisions)
    )


def candidates(entries: Iterable[Entry], plan: Plan, facts: ManagerFacts) -> dict[Key, tuple[Entry, ...]]:
    """Return for each number of tokens and adapter case the entries to try, best first."""
    return _listed(entries, plan, facts, lambda entry, case: entry.active_loras == case)


def _listed(
    entries: Iterable[Entry], plan: Plan, facts: ManagerFacts, serves: Callable[[Entry, int], bool]
) -> dict[Key, tuple[Entry, ...]]:
    by_cost = sorted(entries, key=lambda entry: entry.cost)
    table: dict[Key, tuple[Entry, ...]] = {}
    for case in sorted({entry.active_loras for entry in by_cost}):
        fitting = [entry for entry in by_cost if serves(entry, case)]
        first = 1
        for last in _stops(fitting, plan, facts):
            # Under a schedule the batch size gives the chain's length; graphs of other lengths do not serve it.
            steps = draft_steps(facts.role, last, plan.speculative) if facts.dynamic else None
            # An exact graph serves one number of tokens; any other serves all up to its own.
            tried = [
                entry
                for entry in fitting
                if (first == last == entry.num_tokens if _is_exact(entry, facts) else entry.num_tokens >= last)
                and (steps is None or entry.draft_steps in (None, steps))
            ]
            kept = tuple(_pruned(tried, last, facts))
            table |= {(tokens, case): kept for tokens in range(first, last + 1)}
            first = last + 1
    return table


def _stops(entries: Sequence[Entry], plan: Plan, facts: ManagerFacts) -> list[int]:
    """Return where the list of candidates can change: after each size, and after each tier of a schedule."""
    sizes = {entry.num_tokens for entry in entries}
    # The size of an exact graph is a range of its own.
    sizes |= {entry.num_tokens - 1 for entry in entries if _is_exact(entry, facts)} - {0}
    if facts.dynamic and facts.role is Role.DRAFT_DECODE and sizes:
        sizes |= {last for _, last, _ in decode_tiers(plan) if last < max(sizes)}
    return sorted(sizes)


def _pruned(entries: Iterable[Entry], num_tokens: int, facts: ManagerFacts) -> Iterator[Entry]:
    """Yield the entries that serve some batch of ``num_tokens`` which none before them serves."""
    kept: list[Entry] = []
    for entry in entries:
        # Requests of a uniform decode have query_len tokens each; others have one or more.
        uniform = entry.query_len is not None and facts.varlen_query_len is None
        most = min(num_tokens // (entry.query_len or 1) if uniform else num_tokens, facts.max_num_reqs)
        room = _room(entry, most)
        if not any(other.query_len in (None, entry.query_len) and _room(other, most) >= room for other in kept):
            kept.append(entry)
            yield entry


def _room(entry: Entry, num_reqs: int) -> int:
    # A PIECEWISE graph pads no requests, so it has room for any number.
    return num_reqs if entry.num_reqs is None else min(entry.num_reqs, num_reqs)


def _as_captured(entry: Entry, facts: ManagerFacts) -> Entry:
    """Return the entry as vLLM captures it: with adaptive verification, a decode graph has no fixed query length."""
    if facts.varlen_query_len is None or entry.query_len is None:
        return entry
    # Each request may have a single token, so the graph has room for that many requests.
    reqs = min(entry.num_tokens, facts.max_num_reqs)
    return attrs.evolve(entry, num_reqs=reqs, query_len=facts.varlen_query_len)


def _is_exact(entry: Entry, facts: ManagerFacts) -> bool:
    """Say whether a graph serves only batches of its own number of tokens.

    The draft prefill runs on the attention metadata that the target's batch has, padded as the target pads it
    (spec_decode/target_dependent_ar/speculator.py). The layout of some of it depends on the requests: the scheduler
    metadata of FlashAttention 3, the plans of FlashInfer. So a full graph must have just the target's shape; a
    piecewise one runs attention outside.
    """
    return facts.role is Role.DRAFT_PREFILL and entry.mode is GraphMode.FULL


def _of_target(plan: Plan, facts: ManagerFacts) -> tuple[Entry, ...]:
    """Return the target's entries that are within vLLM's limits, and that its ranks pad alike."""
    entries = plan.role(Role.TARGET).entries
    cases_of = _cases_by_shape(entries)
    return tuple(
        entry for entry in entries if not _exceeds(entry, facts) and _ranks_obstacle(entry, facts, cases_of) is None
    )


def _exceeds(entry: Entry, facts: ManagerFacts) -> bool:
    return entry.num_tokens > facts.max_num_tokens or (entry.num_reqs or 0) > facts.max_num_reqs


def _full_shapes(plan: Plan, of_target: Sequence[Entry]) -> frozenset[Shape]:
    """Return the shapes at which the target has a full graph for every adapter case; needed for draft prefills."""
    if not of_target:
        return frozenset()
    cases = tuple(sorted({entry.active_loras for entry in plan.role(Role.TARGET).entries}))
    found: dict[Shape, set[int]] = {}
    for entry in of_target:
        if entry.mode is GraphMode.FULL:
            found.setdefault(_shape(entry), set()).add(entry.active_loras)
    # The target's batch may have any number of adapters, and the drafter runs on its metadata all the same.
    return frozenset(shape for shape, has in found.items() if has.issuperset(served_cases(cases, shape[1] or 0)))


def _shape(entry: Entry) -> Shape:
    return entry.num_tokens, entry.num_reqs, entry.query_len


def _obstacle(entry: Entry, facts: ManagerFacts, shapes: Collection[Shape]) -> str | None:
    """Return the rule by which vLLM cannot run an entry, or None."""
    # vLLM resolves decodes and mixed batches apart, so each graph answers to its own half of the mode.
    half = facts.mode.mixed_mode if entry.query_len is None else facts.mode.decode_mode
    if half is not entry.mode:
        return "engine-mode"
    if _exceeds(entry, facts):
        return "engine-limits"
    if entry.active_loras > facts.lora_cases[-1]:
        return "engine-adapters"
    # Without a schedule vLLM runs chains of K - 1 steps only.
    if not facts.dynamic and entry.draft_steps not in (None, facts.num_speculative_tokens - 1):
        return "engine-draft-length"
    if _is_exact(entry, facts) and _shape(entry) not in shapes:
        return "engine-target-shape"
    if entry.query_len is None and facts.widest_mixed is not None and entry.num_tokens > facts.widest_mixed:
        return "engine-recurrent-state"
    return None


def _cases_by_shape(entries: Iterable[Entry]) -> Mapping[tuple[GraphMode, Shape], set[int]]:
    found: dict[tuple[GraphMode, Shape], set[int]] = {}
    for entry in entries:
        found.setdefault((entry.mode, _shape(entry)), set()).add(entry.active_loras)
    return found


def _ranks_obstacle(
    entry: Entry, facts: ManagerFacts, cases_of: Mapping[tuple[GraphMode, Shape], set[int]]
) -> str | None:
    """Return the rule by which an entry would let data-parallel ranks pad to different numbers of tokens, or None.

    Ranks agree on tokens and query length, and each then looks for a graph with its own requests and adapters
    (vllm/v1/worker/gpu/dp_utils.py, 0.33): neither may decide. An idle rank has one request and the most adapters.
    """
    if facts.ranks < 2:
        return None
    # With room for fewer requests than another rank may have, that rank would find another graph.
    room = min(entry.num_tokens, facts.max_num_reqs)
    if entry.query_len is None and entry.num_reqs is not None and entry.num_reqs < room:
        return "engine-ranks"
    # Adapters may not decide either, so a shape needs every case that any shape has.
    every = set().union(*cases_of.values())
    return None if cases_of[entry.mode, _shape(entry)] == every else "engine-ranks"


def _omission(planned: RolePlan, facts: ManagerFacts, rule: str, entries: Sequence[Entry]) -> Decision:
    before, after, why = {
        "engine-mode": (planned.mode.value, facts.mode.value, _mode_reason(facts)),
        "engine-bare-target": (
            planned.mode.value,
            GraphMode.NONE.value,
            "vLLM captures a drafter's graphs only if the target has graphs",
        ),
        "engine-limits": (
            str(max(entry.num_tokens for entry in entries)),
            str(facts.max_num_tokens),
            f"vLLM runs at most {facts.max_num_reqs} requests and {facts.max_num_tokens} tokens",
        ),
        "engine-adapters": (
            str(max(entry.active_loras for entry in entries)),
            str(facts.lora_cases[-1]),
            f"vLLM has room for {counted(facts.lora_cases[-1], 'adapter')}",
        ),
        "engine-draft-length": (
            ", ".join(str(steps) for steps in sorted({entry.draft_steps or 0 for entry in entries})),
            str(facts.num_speculative_tokens - 1),
            "vLLM has no schedule, and runs chains of one length",
        ),
        "engine-target-shape": (
            ", ".join(str(entry.num_tokens) for entry in entries[:6]),
            "the target's",
            "it runs on the target's attention metadata, and the target has no full graph of that shape",
        ),
        "engine-ranks": (
            ", ".join(str(entry.num_tokens) for entry in entries[:6]),
            "none",
            "data-parallel ranks with other requests or adapters would pad to another size, and have to pad alike",
        ),
        "engine-recurrent-state": (
            str(max(entry.num_tokens for entry in entries)),
            str(facts.widest_mixed),
            "the model's recurrent state has a workspace for decodes only",
        ),
    }[rule]
    verb = "is" if len(entries) == 1 else "are"
    message = f"{len(entries)} of {counted(len(planned.entries), 'graph')} {verb} not captured: {why}"
    return Decision(rule=rule, before=before, after=after, role=facts.role, message=message)


def _mode_reason(facts: ManagerFacts) -> str:
    reason = f"; {facts.reason}" if facts.reason else ""
    return f"vLLM resolved the {facts.role} to {facts.mode.value}{reason}"


def _crossing(entries: Sequence[Entry], plan: Plan, facts: ManagerFacts) -> int:
    """Return for how many keys a graph of more adapters would be cheaper; vLLM's dispatch takes the exact case only."""
    every = _listed(entries, plan, facts, lambda entry, case: entry.active_loras >= case)
    return sum(any(entry.active_loras != case for entry in tried) for (_, case), tried in every.items())


def _adapters(planned: RolePlan, facts: ManagerFacts, keys: int) -> Decision:
    message = (
        f"at {counted(keys, 'number')} of tokens the plan serves a batch from a graph of more adapters; "
        "vLLM takes graphs of the batch's own case only"
    )
    return Decision(rule="engine-adapter-case", before="next case", after="own case", role=facts.role, message=message)


def descriptor_fields(entry: Entry, varlen: bool) -> dict[str, Any]:
    """Return the fields of vLLM's ``BatchExecutionDescriptor`` for an entry; the mode by its name."""
    return {
        "cg_mode": entry.mode.name,
        "num_tokens": entry.num_tokens,
        "num_reqs": entry.num_reqs,
        # vLLM keeps prompts out of a varlen graph by max_query_len alone, and leaves the uniform length unset.
        "uniform_token_count": None if varlen else entry.query_len,
        "max_query_len": entry.query_len if varlen else None,
        "num_active_loras": entry.active_loras,
    }


def drafted_tokens(entry: Entry, speculative: Speculative | None, dynamic: bool) -> int | None:
    """Return K of a fused chain under a schedule, which vLLM has in the key of its graph; None for other graphs."""
    return entry.draft_steps + 1 if dynamic and speculative is not None and entry.draft_steps is not None else None
