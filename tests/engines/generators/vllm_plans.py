"""Random plans within limits that a test can ask exhaustively, and what vLLM can run of a plan, by its rules alone."""

from __future__ import annotations

import attrs
from hypothesis import reject
from hypothesis import strategies as st

from capture_planner.errors import PlanningError
from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.batch_space import served_cases
from capture_planner.records.plan import Plan
from capture_planner.testing import deployments


@st.composite
def vllm_plans(draw: st.DrawFn, *, max_reqs: int = 64, max_tokens: int = 512) -> Plan:
    """Return plans that the planner made."""
    inputs = draw(deployments(max_reqs=max_reqs, max_tokens=max_tokens))
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


def runnable(plan: Plan) -> Plan:
    """Return the plan without the graphs that vLLM cannot run.

    It has no buffers beyond its limits, where sequence parallelism aligns graphs; and a draft prefill runs on the
    target's attention metadata, so that its full graphs are of shapes that the target has for all of its adapter cases.
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

    roles = (
        replace(role, entries=tuple(entry for entry in role.entries if runs(entry, role.role))) for role in plan.roles
    )
    return replace(plan, roles=tuple(roles))


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
