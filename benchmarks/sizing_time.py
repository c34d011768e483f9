"""The time of choosing measured sizes: 8,192 tokens, three roles, eight LoRA cases, under several budgets.

Each case plans 256 requests and 8,192 tokens with EAGLE-3 (K = 3) and 32 adapters, by the traffic of 20,000 random
steps (some 5,000 shapes) and a profile that grows with every token up to 8,192.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from typing import Any

from _bench import CONSOLE, finish, parser, shipped_environments, table, verdict
from _profiles import SHAPES, made_up
from traces_held_out import MODEL

from capture_planner.modes import Role
from capture_planner.planning import planner
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Speculative
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Budget, KindGraphs, Limits, Lora, Policy, Sizes, Spec
from capture_planner.records.traffic import Traffic, TrafficCount

LIMIT = 3.0
"""Seconds that a plan may take."""

SPEC = Spec(
    model=MODEL,
    limits=Limits(max_num_reqs=256, max_num_tokens=8192),
    backend="flash_attention",
    speculative=Speculative(method=Method.EAGLE3, num_tokens=3),
    lora=Lora(max_active=32, specialize=True),
    sizes=Sizes(policy=Policy.MEASURED),
)

BUDGETS = {
    "128 graphs": Budget(max_graphs=128),
    "256 graphs": Budget(max_graphs=256),
    "256 graphs, 1 GiB, 20 s": Budget(max_graphs=256, memory=1 << 30, seconds=20),
    "96 decode, 64 mixed, 2 GiB": Budget(graphs=KindGraphs(decode=96, mixed=64), memory=2 << 30),
    "no bound": Budget(),
}


def traffic(steps: int) -> Traffic:
    """Return random steps, mixed and decodes."""
    rng, counts = random.Random(15), Counter[tuple[int, int, int | None]]()
    for _ in range(steps):
        num_reqs = min(256, 1 + int(rng.expovariate(1 / 60)))
        if rng.random() < 0.8:
            counts[num_reqs, num_reqs * 4, 4] += 1
        else:
            counts[num_reqs, min(8192, num_reqs * 4 + int(rng.expovariate(1 / 1500))), None] += 1
    lines = tuple(
        TrafficCount(
            role=Role.TARGET, num_reqs=n, num_tokens=tokens, query_len=q, past_prompt=q is not None, count=count
        )
        for (n, tokens, q), count in sorted(counts.items(), key=str)
    )
    return Traffic(sources=("random",), batches=lines)


def profile(name: str) -> Profile:
    """Return a made-up profile with times up to 8,192 tokens, so that each number of tokens may be a size."""
    made = made_up(name, SPEC, shipped_environments()["h200"])
    longer = tuple(
        replace(
            curve,
            tokens=(*curve.tokens, 4096, 8192),
            milliseconds=(*curve.milliseconds, curve.milliseconds[-1] * 2, curve.milliseconds[-1] * 4),
        )
        for curve in made.curves
    )
    return replace(made, curves=longer)


def main() -> int:
    """Plan each case; fails where one takes longer than ``LIMIT``."""
    arguments = parser(__doc__).parse_args()
    environment, backends, observed = shipped_environments()["h200"], registry.load_backends(), traffic(20_000)
    rows: list[dict[str, Any]] = []
    for name in SHAPES:
        measurements = Measurements(traffic=observed, profile=profile(name))
        for words, budget in BUDGETS.items():
            spec = replace(SPEC, budget=budget)
            start = time.process_time()
            plan = planner.plan(spec, environment, backends, measurements)
            rows.append(
                {"profile": name, "budget": words, "seconds": time.process_time() - start, "graphs": plan.num_graphs}
            )
    shown = table("Time to choose", *rows[0])
    for row in rows:
        shown.add_row(row["profile"], row["budget"], f"{row['seconds']:.2f}", str(row["graphs"]))
    CONSOLE.print(shown)
    slowest = max(row["seconds"] for row in rows)
    CONSOLE.print(f"at most {LIMIT:g} s of a processor: {verdict(slowest <= LIMIT)}")
    finish(arguments, {"rows": rows, "slowest": slowest, "batches": len(observed.batches)})
    return 0 if slowest <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
