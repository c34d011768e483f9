"""What the graphs of a plan cost, and what its budget costs: for the summary of a plan, and for ``check``."""

from __future__ import annotations

from collections.abc import Iterator

from capture_planner.planning import price
from capture_planner.records.environment import DeviceKind
from capture_planner.records.plan import Forecast, Plan
from capture_planner.records.spec import Budget
from capture_planner.records.text import counted, format_bytes, rounded_bytes


def price_lines(plan: Plan) -> Iterator[str]:
    """Yield what the graphs take, and what the budget did to them."""
    # Recorded graphs of a CPU take none of what the budget's figures are about.
    if plan.num_graphs and plan.environment.device.kind is DeviceKind.CUDA:
        yield _estimate(plan)
    if (line := budget_line(plan)) is not None:
        yield line


def _estimate(plan: Plan) -> str:
    graphs, budget, forecast = plan.num_graphs, plan.budget, plan.forecast
    if forecast is None:
        memory, seconds = graphs * budget.memory_per_graph, graphs * budget.seconds_per_graph
        source = f"at {format_bytes(budget.memory_per_graph)} and {budget.seconds_per_graph:g} s a graph"
    else:
        memory, seconds, source = round(forecast.mib * (1 << 20)), forecast.seconds, "by the profile"
    workspaces = sum(group.workspace.device for role in plan.roles for group in role.groups)
    apart = f"; workspaces of the backends, {rounded_bytes(workspaces)}, are not counted" if workspaces else ""
    taken = f"{rounded_bytes(memory)} and {seconds:.0f} s to capture"
    return f"estimate: {counted(graphs, 'graph')} take {taken}, {source}{_on_first_use(plan)}{apart}"


def _on_first_use(plan: Plan) -> str:
    timing = plan.capture
    if not plan.num_lazy or timing.memory is None or timing.seconds_per_minute is None:
        return ""
    budget = f"{format_bytes(timing.memory)} and {timing.seconds_per_minute:g} s a minute"
    return f"; {plan.num_lazy} of them on first use, within {budget}"


def budget_line(plan: Plan) -> str | None:
    """Say which limit of the budget was reached, and what that costs; of measured sizes, what they take of each limit.

    None for a plan without a budget.
    """
    decisions = (decision for role in plan.roles for decision in role.decisions)
    found = next((decision.message for decision in decisions if decision.rule == price.RULE), None)
    if found is not None:
        return f"budget: {found}"
    if plan.forecast is not None:
        return _measured_line(plan.budget, plan.forecast)
    kinds = {"decode": plan.budget.graphs.decode, "mixed": plan.budget.graphs.mixed}
    bounds = [text for _, text in plan.budget.bounds()] + [f"graphs.{k} {most:g}" for k, most in kinds.items() if most]
    return f"budget: no limit is reached ({', '.join(bounds)})" if bounds else None


def _measured_line(budget: Budget, forecast: Forecast) -> str | None:
    taken = {
        f"{forecast.graphs} of {budget.max_graphs} graphs": budget.max_graphs,
        f"{rounded_bytes(round(forecast.mib * (1 << 20)))} of {format_bytes(budget.memory or 0)}": budget.memory,
        f"{forecast.seconds:.0f} of {budget.seconds or 0:g} s": budget.seconds,
    }
    used = [text for text, limit in taken.items() if limit is not None]
    gain = f"one more graph takes {forecast.next_graph_ms:.2g} ms off the mean step"
    return f"budget: {', '.join(used)}, by the profile; {gain}" if used else None
