"""Sizes chosen on the first two thirds of a trace, judged on the last third.

For each trace and profile: the mean step with measured sizes, against a graph of every size, and against vLLM's own
list, each through the dispatcher; and with sizes chosen on the last third itself, which no choice can be much better
than. Limits are 256 requests and 8,192 tokens, without speculation and with three draft
tokens of EAGLE-3. The budget is a third of vLLM's graphs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from _bench import CONSOLE, finish, parser, shipped_environments, table, verdict
from _profiles import SHAPES, made_up

from capture_planner.analysis.arrivals import Arrival, batches_of
from capture_planner.analysis.forecast import forecast
from capture_planner.analysis.trace import read_trace
from capture_planner.codec import load_profile
from capture_planner.codec.shipped import shipped_profiles
from capture_planner.planning import planner
from capture_planner.planning.costs import Costs
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Model, Speculative
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Budget, Limits, Policy, Sizes, Spec
from capture_planner.records.traffic import Traffic, TrafficCount

MODEL = Model(name="Qwen/Qwen3-8B", num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=40960)
LOST = 1.005
"""Most that the mean step may be above that of every size."""


def spec_of(drafts: int) -> Spec:
    """Return the deployment, with vLLM's own sizes."""
    return Spec(
        model=MODEL,
        limits=Limits(max_num_reqs=256, max_num_tokens=8192),
        backend="flash_attention",
        speculative=Speculative(method=Method.EAGLE3, num_tokens=drafts) if drafts else None,
        sizes=Sizes(policy=Policy.VLLM),
    )


def traffic_of(requests: list[Arrival], spec: Spec) -> Traffic:
    """Return the batches that the scheduler makes of requests, as traffic."""
    counts = sorted(batches_of(requests, spec).items(), key=lambda item: (item[0].num_tokens, item[0].num_reqs))
    return Traffic(
        sources=("a trace",),
        batches=tuple(
            TrafficCount(
                role=batch.role,
                num_reqs=batch.num_reqs,
                num_tokens=batch.num_tokens,
                query_len=batch.query_len,
                past_prompt=batch.past_prompt,
                count=count,
            )
            for batch, count in counts
        ),
    )


def profiles_of(spec: Spec) -> dict[str, Profile]:
    """Return the made-up profiles, and those that ship and have times of the spec's drafter, if it has one."""
    device = shipped_environments()["h200"]
    shipped = {name: load_profile(path) for name, path in shipped_profiles().items()}
    fitting = {name: each for name, each in shipped.items() if each.speculative or not spec.speculative}
    return {name: made_up(name, spec, device) for name in SHAPES} | fitting


def judged(trace: Path, drafts: int) -> list[dict[str, Any]]:
    """Return a row for each profile."""
    spec, environment, backends = spec_of(drafts), shipped_environments()["h200"], registry.load_backends()
    requests: list[Any] = sorted(read_trace(trace), key=lambda request: request.arrival)
    cut = len(requests) * 2 // 3
    start = requests[cut].arrival
    seen = traffic_of(requests[:cut], spec)
    rest = traffic_of([replace(each, arrival=each.arrival - start) for each in requests[cut:]], spec)
    theirs = planner.plan(spec, environment, backends)
    rows = []
    for name, profile in profiles_of(spec).items():
        costs = Costs(profile)
        measured = replace(spec, sizes=Sizes(policy=Policy.MEASURED), budget=Budget(max_graphs=theirs.num_graphs // 3))
        ours = planner.plan(measured, environment, backends, Measurements(traffic=seen, profile=profile))
        free = replace(measured, budget=Budget())
        unbounded = planner.plan(free, environment, backends, Measurements(traffic=seen, profile=profile))
        late = planner.plan(measured, environment, backends, Measurements(traffic=rest, profile=profile))
        mine, other, most, hindsight = (forecast(plan, rest, costs) for plan in (ours, theirs, unbounded, late))
        rows.append(
            {
                "trace": trace.stem,
                "drafts": drafts,
                "profile": name,
                "steps": mine.steps,
                "graphs": ours.num_graphs,
                "vllm_graphs": theirs.num_graphs,
                "ratio": mine.mean_step_ms / mine.every_size_ms,
                "hindsight_ratio": hindsight.mean_step_ms / hindsight.every_size_ms,
                "vllm_ratio": other.mean_step_ms / mine.every_size_ms,
                "eager": mine.eager_share,
                "vllm_eager": other.eager_share,
                "unbounded_graphs": unbounded.num_graphs,
                "unbounded_ratio": most.mean_step_ms / most.every_size_ms,
            }
        )
    return rows


def main() -> int:
    """Judge each trace; fails where one is above ``LOST`` or has more than a third of vLLM's graphs."""
    options = parser(__doc__)
    options.add_argument("traces", nargs="+", type=Path, help="CSV files of requests")
    arguments = options.parse_args()
    rows = [row for trace in arguments.traces for drafts in (0, 3) for row in judged(trace, drafts)]
    shown = table("Held-out traces", *rows[0])
    for row in rows:
        shown.add_row(*(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
    CONSOLE.print(shown)
    near = all(row["ratio"] <= LOST for row in rows)
    few = all(3 * row["graphs"] <= row["vllm_graphs"] for row in rows)
    CONSOLE.print(f"at most {LOST} times every size: {verdict(near)}; at most a third of the graphs: {verdict(few)}")
    finish(arguments, {"rows": rows, "worst": max(row["ratio"] for row in rows), "held": near and few})
    return 0 if near and few else 1


if __name__ == "__main__":
    sys.exit(main())
