"""The time of choosing measured sizes: 8,192 tokens, three roles, eight LoRA cases, under several budgets.

Each case plans 256 requests and 8,192 tokens with EAGLE-3 (K = 3), by the traffic of 20,000 random steps (some 5,000
shapes): with 32 adapters and made-up profiles that grow with every token up to 8,192, and without adapters by the
shipped profile of an 8B model.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from _bench import CONSOLE, finish, parser, shipped_environments, table, verdict

from capture_planner.codec import load_profile
from capture_planner.codec.shipped import shipped_profiles
from capture_planner.modes import GraphMode, Role
from capture_planner.planning import planner
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Model, Speculative
from capture_planner.records.profile import CostCurve, GraphCost, Profile
from capture_planner.records.spec import Budget, KindGraphs, Limits, Lora, Policy, Sizes, Spec
from capture_planner.records.traffic import Traffic, TrafficCount

TOKENS = (1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), 1536, 2048)
STAIRCASE = {1: 1.44, 8: 1.49, 64: 1.55, 128: 1.68, 192: 1.80, 256: 1.99, 272: 2.18, 384: 2.63, 512: 3.25}
"""Milliseconds of eight dense layers of an 8B shape on an H100, by tokens."""


def affine(tokens: int) -> float:
    """6 ms to read the weights, and 6 more for every 512 tokens."""
    return 6 + 6 * tokens / 512


def staircase(tokens: int) -> float:
    """Four and a half times the measured eight layers; tiles of 128 tokens above."""
    known = next((ms for size, ms in STAIRCASE.items() if size >= tokens), None)
    return 4.5 * (3.25 + (math.ceil(tokens / 128) - 4) * 0.75 if known is None else known)


def experts(tokens: int) -> float:
    """Padded rows are routed like real ones: each token reads its experts until all of 128 are read."""
    return 2.5 + 9 * (1 - (1 - 8 / 128) ** tokens) + 5 * tokens / 512


SHAPES: dict[str, Callable[[int], float]] = {"affine": affine, "staircase": staircase, "experts": experts}


LIMIT = 8.0
"""Seconds that a plan may take."""

SPEC = Spec(
    model=Model(name="Qwen/Qwen3-8B", num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=40960),
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


SHIPPED = "qwen3-8b-eagle3.h200"

SHIPPED_BUDGETS = {
    "128 graphs": Budget(max_graphs=128),
    "128 graphs, 4 GiB, 40 s": Budget(max_graphs=128, memory=4 << 30, seconds=40),
    "400 graphs, 2 GiB": Budget(max_graphs=400, memory=2 << 30),
    "400 graphs, 4 GiB": Budget(max_graphs=400, memory=4 << 30),
    "400 graphs, 4 GiB, 40 s": Budget(max_graphs=400, memory=4 << 30, seconds=40),
    "400 graphs, 4 GiB, 8 s": Budget(max_graphs=400, memory=4 << 30, seconds=8),
    "4 GiB": Budget(memory=4 << 30),
    "8 s": Budget(seconds=8),
    "no bound": Budget(),
}


def made_up(name: str) -> Profile:
    """Return a profile of a shape, with times up to 8,192 tokens, so that each number of tokens may be a size.

    A drafter takes a twelfth of the target's time; eager passes take 12 ms more, and a drafter's 1 ms.
    """
    curves, graphs = [], []
    for role in SPEC.active_roles:
        part, launch = (1 / 12, 1.0) if role.is_drafter else (1.0, 12.0)
        for mode, more in ((GraphMode.FULL, 0.0), (GraphMode.PIECEWISE, launch / 6), (GraphMode.NONE, launch)):
            times = [round(part * SHAPES[name](tokens) + more, 6) for tokens in TOKENS]
            times += [2 * times[-1], 4 * times[-1]]
            curves.append(CostCurve(role=role, mode=mode, tokens=(*TOKENS, 4096, 8192), milliseconds=tuple(times)))
        graphs.append(GraphCost(role=role, mode=GraphMode.FULL, mib=8.0, driver_mib=4.0, seconds=0.08))
    return Profile(
        source="made up",
        date="2026-11-22T00:00:00Z",
        device=shipped_environments()["h200"].device,
        model=SPEC.model,
        speculative=SPEC.speculative,
        curves=tuple(curves),
        graphs=tuple(graphs),
    )


def cases() -> Iterator[tuple[str, str, Spec, Profile]]:
    """Yield each case: profile and budget in words, what is planned, and the profile."""
    for name in SHAPES:
        for words, budget in BUDGETS.items():
            yield name, words, replace(SPEC, budget=budget), made_up(name)
    known = load_profile(shipped_profiles()[SHIPPED])
    plain = replace(SPEC, model=known.model, lora=None)
    for words, budget in SHIPPED_BUDGETS.items():
        yield SHIPPED, words, replace(plain, budget=budget), known
    for objective in ("token", "p99", "regret"):
        sizes = Sizes(policy=Policy.MEASURED, objective=objective)
        yield SHIPPED, f"{objective}, 128 graphs", replace(plain, sizes=sizes, budget=Budget(max_graphs=128)), known
    adapters = Lora(max_active=64, specialize=True)
    for words in ("400 graphs, 4 GiB", "400 graphs, 4 GiB, 40 s"):
        yield SHIPPED, f"{words}, LoRA", replace(plain, lora=adapters, budget=SHIPPED_BUDGETS[words]), known
    wide = replace(plain, limits=Limits(max_num_reqs=1024, max_num_tokens=16384))
    yield (
        SHIPPED,
        "1,024 x 16,384: 200 graphs, 4 GiB",
        replace(wide, budget=Budget(max_graphs=200, memory=4 << 30)),
        known,
    )


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


def main() -> int:
    """Plan each case; fails where one takes longer than ``LIMIT``."""
    arguments = parser(__doc__).parse_args()
    environment, backends, observed = shipped_environments()["h200"], registry.load_backends(), traffic(20_000)
    rows: list[dict[str, Any]] = []
    for name, words, spec, known in cases():
        start = time.process_time()
        plan = planner.plan(spec, environment, backends, Measurements(traffic=observed, profile=known))
        rows.append(
            {"profile": name, "budget": words, "seconds": time.process_time() - start, "graphs": plan.num_graphs}
        )
        CONSOLE.print(f"{name}, {words}: {rows[-1]['seconds']:.1f} s, {plan.num_graphs} graphs")
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
