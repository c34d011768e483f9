"""forecast(plan or answers, traffic, costs): what a load would take under a table of graphs, without running it."""

from __future__ import annotations

from collections.abc import Mapping

from capture_planner.dispatch.dispatcher import Dispatcher
from capture_planner.modes import GraphMode, Role
from capture_planner.planning.costs import Costs
from capture_planner.planning.judging import Answer, Judgement, judge
from capture_planner.planning.steps import steps_of
from capture_planner.records.batch_space import Deployment
from capture_planner.records.plan import Plan
from capture_planner.records.traffic import Traffic

__all__ = ["Answer", "Judgement", "forecast", "forecast_of"]


def forecast(plan: Plan, traffic: Traffic, costs: Costs) -> Judgement:
    """Return what the steps of a traffic take under a plan.

    Raises ``PlanningError`` where the profile has no times of a role.
    """
    dispatcher = Dispatcher(plan)
    modes = {role.role: role.mode for role in plan.roles}
    return forecast_of(lambda batch: dispatcher.dispatch(batch).entry, traffic, costs, plan, modes)


def forecast_of(
    answer: Answer,
    traffic: Traffic,
    costs: Costs,
    deployment: Deployment,
    modes: Mapping[Role, GraphMode] | None = None,
) -> Judgement:
    """Return what the steps of a traffic take where ``answer`` says which entry serves a batch, as an engine's does.

    :param deployment: the limits, the schedule and the rest that makes batches admissible: a plan, a spec or an
        emulation.
    :param modes: the mode of each role, for the regret; None: FULL_AND_PIECEWISE for all.
    :raises PlanningError: the profile has no times of a role.
    """
    in_modes = dict.fromkeys(Role, GraphMode.FULL_AND_PIECEWISE) if modes is None else modes
    return judge(answer, steps_of(traffic, deployment), costs, deployment, in_modes)
