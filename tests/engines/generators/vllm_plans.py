"""Random plans within limits that a test can ask exhaustively, and what vLLM can run of a plan, by its rules alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
from hypothesis import reject
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import served_cases
from capture_planner.records.model import Model
from capture_planner.records.plan import Plan
from capture_planner.testing import deployments
from engines.generators.vllm_random import random_plan

TINY = Model(
    name="tiny", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=256, vocab_size=64,
    max_model_len=512,
)  # fmt: skip


@st.composite
def vllm_plans(draw: st.DrawFn, *, max_reqs: int = 64, max_tokens: int = 512) -> Plan:
    """Return plans that the planner made."""
    inputs = draw(deployments(max_reqs=max_reqs, max_tokens=max_tokens, varying=False))
    speculative = inputs.spec.speculative
    if speculative is not None and draw(st.integers(0, 3)):
        lengths = draw(st.lists(st.integers(0, speculative.num_tokens), min_size=1, max_size=3))
        width = draw(st.integers(1, 24))
        tiers = tuple((1 + index * width, (1 + index) * width, k) for index, k in enumerate(lengths))
        spec = replace(inputs.spec, speculative=replace(speculative, schedule=tiers))
        inputs = attrs.evolve(inputs, spec=spec)
    try:
        return inputs.plan()
    except PlanningError:
        reject()


def random_plans() -> st.SearchStrategy[Plan]:
    """Return plans whose roles have sizes of their own, some beyond the limits (``vllm_random``)."""
    return st.integers(0, 1 << 32).map(
        lambda number: random_plan(
            random.Random(number), model=TINY, max_num_reqs=(1, 4, 16, 48), max_num_tokens=(48, 128, 384)
        )
    )


def runnable(plan: Plan) -> Plan:
    """Return the plan without the graphs that vLLM cannot run.

    It has no buffers beyond its limits, where sequence parallelism aligns graphs; and a draft prefill runs on the
    target's attention metadata, so that its full graphs are of shapes that the target has for all of its adapter cases.
    Where the target has no graph, a drafter has none.
    """
    limits, target = plan.limits, plan.role(Role.TARGET).entries
    cases = tuple(sorted({entry.active_loras for entry in target}))
    found: dict[tuple[int, int | None, int | None], set[int]] = {}
    for entry in target:
        if entry.mode is GraphMode.FULL:
            found.setdefault((entry.num_tokens, entry.num_reqs, entry.query_len), set()).add(entry.active_loras)
    full = {shape for shape, has in found.items() if has.issuperset(served_cases(cases, shape[1] or 0))}

    def runs(entry: Entry, role: Role) -> bool:
        if entry.num_tokens > limits.max_num_tokens or (entry.num_reqs or 0) > limits.max_num_reqs:
            return False
        has_shape = (entry.num_tokens, entry.num_reqs, entry.query_len) in full
        return role is not Role.DRAFT_PREFILL or entry.mode is not GraphMode.FULL or has_shape

    captures = any(runs(entry, Role.TARGET) for entry in target)
    roles = (
        replace(role, entries=tuple(entry for entry in role.entries if captures and runs(entry, role.role)))
        for role in plan.roles
    )
    return replace(plan, roles=tuple(roles))


def runnable_by_ranks(plan: Plan) -> Plan:
    """Return the plan without the graphs that vLLM cannot run where data-parallel ranks pad together.

    Each rank looks for a graph with its own requests and adapters, so neither may decide how far it pads: a graph of
    mixed batches has room for as many requests as it can have, and each shape is there for every adapter case. All
    draft K tokens, whatever a schedule says.
    """
    steps = (None, plan.speculative.num_tokens - 1) if plan.speculative is not None else (None,)

    def pads_alike(entry: Entry, entries: tuple[Entry, ...]) -> bool:
        cases = {each.active_loras for each in entries}
        shape = attrs.evolve(entry, active_loras=0)
        same = {each.active_loras for each in entries if attrs.evolve(each, active_loras=0) == shape}
        most = min(entry.num_tokens, plan.limits.max_num_reqs)
        return same == cases and (entry.query_len is not None or entry.num_reqs in (None, most))

    roles = []
    for role in plan.roles:
        left = tuple(entry for entry in role.entries if pads_alike(entry, role.entries) and entry.draft_steps in steps)
        roles.append(replace(role, entries=left))
    return runnable(replace(plan, roles=tuple(roles)))


def rank_answers(plan: Plan, batches: Sequence[Batch]) -> list[Entry | None]:
    """Return the graph of the target on each rank, by a scan.

    The rule of vllm/v1/worker/gpu/dp_utils.py, 0.33: where one rank has no graph, none has. Else each looks for its
    own requests and adapters, with the most tokens of any.
    """
    entries = plan.role(Role.TARGET).entries

    def fit(batch: Batch, tokens: int, uniform: int | None) -> Entry | None:
        cases = sorted({entry.active_loras for entry in entries})
        loras = min(batch.active_loras, plan.limits.max_num_reqs)
        case = loras if loras == 0 else next((case for case in cases if case >= loras), loras)
        able = (
            entry
            for entry in entries
            if entry.active_loras == case
            and entry.num_tokens >= tokens
            and entry.query_len in (None, uniform)
            and (entry.num_reqs is None or entry.num_reqs >= batch.num_reqs)
        )
        return min(able, key=lambda entry: entry.cost, default=None)

    uniforms = {batch.uniform_query_len for batch in batches}
    uniform = uniforms.pop() if len(uniforms) == 1 else None
    if any(fit(batch, batch.num_tokens, batch.uniform_query_len) is None for batch in batches):
        return [None] * len(batches)
    tokens = max(batch.num_tokens for batch in batches)
    return [fit(batch, tokens, uniform) for batch in batches]


def own_case(plan: Plan, batch: Batch) -> Plan:
    """Return the plan with the graphs of one adapter case alone, the smallest that has room for the batch.

    vLLM takes no graph of more adapters than that, even where it would be cheaper; the plugin reports it
    (``engine-adapter-case``).
    """
    role = plan.role(batch.role)
    cases = sorted({entry.active_loras for entry in role.entries})
    loras = batch.active_loras
    case = loras if loras == 0 else next((case for case in cases if case >= loras), loras)
    entries = tuple(entry for entry in role.entries if entry.active_loras == case)
    if entries == role.entries:
        return plan
    kept = replace(role, entries=entries)
    return replace(plan, roles=tuple(kept if each is role else each for each in plan.roles))


def next_fit(plan: Plan, batch: Batch, tokens: int) -> Entry | None:
    """Return the cheapest entry for a draft prefill on ``tokens`` of the target, by a scan: full graphs fit exactly."""
    serving = [
        entry
        for entry in plan.role(batch.role).entries
        if entry.rejection(batch) is None
        and (entry.num_tokens == tokens if entry.mode is GraphMode.FULL else entry.num_tokens >= tokens)
    ]
    return min(serving, key=lambda entry: entry.cost, default=None)
