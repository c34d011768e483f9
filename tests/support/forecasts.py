"""What a load takes under a plan, walked by the dispatcher."""

from __future__ import annotations

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.planning.costs import Costs
from capture_planner.planning.measured.steps import Judgement, judge, steps_of
from capture_planner.records.plan import Plan
from capture_planner.records.traffic import Traffic


def forecast(plan: Plan, traffic: Traffic, costs: Costs) -> Judgement:
    """Return what the steps of a traffic take under a plan."""
    dispatcher, modes = Dispatcher(plan), {role.role: role.mode for role in plan.roles}
    return judge(lambda batch: dispatcher.dispatch(batch).entry, steps_of(traffic, plan), costs, plan, modes)
