"""Plans that a planner would not make, and somebody may write all the same."""

from capture_planner.modes import GraphMode, Role
from capture_planner.records._base import replace
from capture_planner.records.batch import Entry

PIECEWISE = GraphMode.PIECEWISE


def with_piecewise_draft_decode(plan, *sizes):
    """Return the plan with PIECEWISE graphs of so many tokens for its draft decodes (vllm#39773)."""
    graphs = tuple(Entry(mode=PIECEWISE, num_tokens=size) for size in sizes)
    roles = [
        replace(role, mode=PIECEWISE, requested=PIECEWISE, decisions=(), entries=graphs, waivers=())
        if role.role is Role.DRAFT_DECODE
        else role
        for role in plan.roles
    ]
    return replace(plan, roles=tuple(roles))
