"""Worst padding by size policy, and the graphs that no batch can reach.

Padding is the worst padded/real ratio minus one over the batch sizes that a policy covers; sizes
that it leaves to eager are counted too. Reachability is over every admissible batch of every
shipped spec on every shipped environment.
"""

from __future__ import annotations

import sys
from typing import Any

from _bench import CONSOLE, conclude, parser, print_table, shipped_environments, shipped_specs

from capture_planner.analysis.coverage import coverage
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Role
from capture_planner.planning import planner
from capture_planner.planning.sizing.minimax import worst_ratio
from capture_planner.planning.sizing.policies import Context, decode_sizes
from capture_planner.plugins import registry
from capture_planner.records.batch_space import Domain
from capture_planner.records.spec import Limits, Parallel, Policy, Sizes

POLICIES = {
    "default": Sizes(),
    "minimax, 18 sizes": Sizes(policy=Policy.MINIMAX, graphs=18),
    "minimax, 35 sizes": Sizes(policy=Policy.MINIMAX, graphs=35),
    "powers_of_two": Sizes(policy=Policy.POWERS_OF_TWO),
    "vllm": Sizes(policy=Policy.VLLM),
    "sglang": Sizes(policy=Policy.SGLANG),
    "tensorrt_llm": Sizes(policy=Policy.TENSORRT_LLM),
    "tensorrt_llm, padding on": Sizes(policy=Policy.TENSORRT_LLM, padding=True),
    "tensorrt_llm, padding on, to the limit": Sizes(policy=Policy.TENSORRT_LLM, padding=True, max_reqs=512),
}


def padding(most: int) -> list[dict[str, Any]]:
    """Return what each policy does to decodes of 1 to ``most`` requests of one token."""
    context = Context(
        limits=Limits(max_num_reqs=most, max_num_tokens=8192),
        speculative=None,
        parallel=Parallel(),
        environment=shipped_environments()["h100"],
    )
    rows = []
    for name, sizes in POLICIES.items():
        choice = decode_sizes(sizes, Domain.upto(most), 1, context)
        covered = choice.sizes[-1] if choice.sizes else 0
        mean, previous = 0.0, 0
        for size in choice.sizes:
            mean += sum(size / real - 1 for real in range(previous + 1, size + 1))
            previous = size
        rows.append(
            {
                "policy": name,
                "sizes": len(choice.sizes),
                "largest": covered,
                "worst_padding": round(float(worst_ratio(choice.domain, choice.sizes) - 1), 4),
                "mean_padding": round(mean / max(covered, 1), 4),
                "eager": max(most - covered, 0),
            }
        )
    return rows


def reachability() -> list[dict[str, Any]]:
    """Return, for every shipped plan, its graphs, and those that no batch can reach."""
    backends = registry.load_backends()
    rows: list[dict[str, Any]] = []
    for name, spec in shipped_specs().items():
        for other, environment in shipped_environments().items():
            try:
                plan = planner.plan(spec, environment, backends)
            except CapturePlannerError as error:
                rows.append({"spec": name, "environment": other, "refused": str(error)})
                continue
            walked = coverage(plan)
            idle = sum(len(set(role.entries) - walked.reached(role.role)) for role in plan.roles)
            rows.append(
                {
                    "spec": name,
                    "environment": other,
                    "mode": plan.role(Role.TARGET).mode.value,
                    "graphs": plan.num_graphs,
                    "unreachable": idle,
                    "uncovered_cells": len(walked.uncovered),
                    "target_graphs": len(plan.role(Role.TARGET).entries),
                }
            )
    return rows


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    arguments = parser(__doc__).parse_args()
    results: dict[str, Any] = {}
    for most in (256, 512):
        rows = results[f"1..{most}"] = padding(most)
        cells = ((f"{value:.1%}" if isinstance(value, float) else value for value in row.values()) for row in rows)
        print_table(f"decodes of 1 to {most} requests", rows[0], cells)
    rows = results["reachability"] = reachability()
    keys = ("graphs", "unreachable", "uncovered_cells", "target_graphs")
    plans = (
        (f"{row['spec']} @ {row['environment']}", *(["refused"] if "refused" in row else [row[key] for key in keys]))
        for row in rows
    )
    print_table("graphs of shipped plans", ("spec @ environment", *keys), plans)
    planned_rows = [row for row in rows if "refused" not in row]
    totals = {key: sum(row[key] for row in planned_rows) for key in ("graphs", "unreachable", "uncovered_cells")}
    results["totals"] = totals
    CONSOLE.print(totals)
    targets = {
        f"no unreachable graph in {len(planned_rows)} shipped plans": not totals["unreachable"],
        "no uncovered batch": not totals["uncovered_cells"],
    }
    return conclude(arguments, {"results": results}, targets)


if __name__ == "__main__":
    sys.exit(main())
