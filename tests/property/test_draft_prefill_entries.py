"""The draft prefill runs on the target's batch: wherever it has the target's mode, it has the target's graphs too.

vLLM dispatches once for both. Here each role is dispatched by its own entries, so this holds that the answers agree.
"""

import attrs
from hypothesis import assume, event, given, reject, settings

from capture_planner.dispatch import Dispatcher
from capture_planner.errors import PlanningError
from capture_planner.modes import Role
from capture_planner.records.batch_space import batches
from capture_planner.records.spec import Budget, Policy, RoleSpec
from capture_planner.testing import deployments

OWN = ("backend-max-graphs", "varying-decode-unsupported")
"""Decisions by which one role alone loses graphs, or has others than the other role."""


def same(found):
    """Return what must agree: the entry and the padding."""
    return found.entry, found.padded_tokens, found.padded_reqs


def is_shared(spec):
    """Whether the draft prefill has the target's rows, and no sizes are measured."""
    is_drafted = spec.speculative is not None and not spec.speculative.has_own_rows
    return is_drafted and spec.sizes.policy is not Policy.MEASURED


@settings(max_examples=max(settings.default.max_examples // 2, 3))
@given(deployments(max_reqs=24, max_tokens=128, where=is_shared))
def test_the_draft_prefill_has_the_targets_graphs_wherever_it_has_its_mode(deployment):
    """But for adapters, which drafters have none of, and drafters with rows of their own; without a budget."""
    spec = deployment.spec
    roles = attrs.evolve(spec.roles, draft_prefill=attrs.evolve(spec.roles.draft_prefill or RoleSpec(), sizes=None))
    roles = attrs.evolve(roles, target=attrs.evolve(spec.roles.target, sizes=None))
    try:
        plan = attrs.evolve(deployment, spec=attrs.evolve(spec, budget=Budget(), roles=roles)).plan()
    except PlanningError:
        reject()
    target, prefill = plan.role(Role.TARGET), plan.role(Role.DRAFT_PREFILL)
    caps = [{group.support.max_num_reqs for group in role.groups} for role in (target, prefill)]
    own = [decision for role in (target, prefill) for decision in role.decisions if decision.rule in OWN]
    assume(target.mode is prefill.mode and caps[0] == caps[1] and not own)
    event(target.mode.value)
    assert [entry for entry in target.entries if not entry.active_loras] == list(prefill.entries)
    dispatcher = Dispatcher(plan)
    for batch, _ in batches(Role.TARGET, plan):
        if not batch.active_loras:
            mine = dispatcher.dispatch(attrs.evolve(batch, role=Role.DRAFT_PREFILL))
            assert same(dispatcher.dispatch(batch)) == same(mine)
