"""Time to import, to plan every shipped spec, to plan a large one, to choose measured sizes, and how planning scales.

Import time is taken inside fresh processes. All other times are the best of the repeats, in this
process. The slope is of log time over log number of entries, in the upper half of a family
of growing specs, where constant costs no longer hide it: 1 is linear. Measured sizes are chosen by the
shipped profile of an 8B model with EAGLE-3 (K = 3) and by 20,000 random steps, some 5,000 shapes.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from _bench import CONSOLE, ROOT, conclude, parser, print_table, shipped_environments, shipped_specs

from capture_planner import codec
from capture_planner.analysis.lint import lint
from capture_planner.codec.shipped import shipped_profiles
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Role
from capture_planner.planning import planner
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Budget, KindGraphs, Limits, Lora, Policy, Sizes, Spec
from capture_planner.records.traffic import Traffic, TrafficCount

T = TypeVar("T")

SHIPPED_SECONDS = 0.3
LARGE_SECONDS = 3.0
SLOPE = 1.3
MEASURED_SECONDS = 8.0
PROFILE = "qwen3-8b-eagle3.h200"
BUDGETS = {
    "128 graphs": Budget(max_graphs=128),
    "128 graphs, 4 GiB, 40 s": Budget(max_graphs=128, memory=4 << 30, seconds=40),
    "96 decode, 64 mixed, 2 GiB": Budget(graphs=KindGraphs(decode=96, mixed=64), memory=2 << 30),
    "400 graphs, 2 GiB": Budget(max_graphs=400, memory=2 << 30),
    "400 graphs, 4 GiB, 8 s": Budget(max_graphs=400, memory=4 << 30, seconds=8),
    "8 s": Budget(seconds=8),
    "no bound": Budget(),
}
STEPS = ("plan", "lint", "dumps", "loads")
MODULES = {
    "capture_planner": "capture_planner",
    "all that planning needs": "capture_planner.planning.planner, capture_planner.codec, "
    "capture_planner.plugins.registry, capture_planner.analysis.lint, capture_planner.dispatch.dispatcher",
}
_IMPORT = """
import time
start = time.perf_counter()
import {modules}
taken = time.perf_counter() - start
import sys
assert "torch" not in sys.modules, "torch was imported"
assert "numpy" not in sys.modules, "numpy was imported"
print(taken)
"""


def best(function: Callable[[], T], repeats: int = 5) -> tuple[float, T]:
    """Return the least time of several calls, and what the last returned."""
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def import_seconds(modules: str) -> dict[str, float]:
    """Return the median and the least time of an import in fresh processes."""
    times = []
    for _ in range(31):
        command = [sys.executable, "-c", _IMPORT.format(modules=modules)]
        process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        times.append(float(process.stdout))
    return {"median": round(statistics.median(times), 4), "best": round(min(times), 4)}


def large_spec(spec: Spec, sizes: Sizes) -> Spec:
    """Return a deployment with 65,536 tokens, 16 adapter cases and four query lengths."""
    return replace(
        spec,
        limits=Limits(max_num_reqs=8192, max_num_tokens=65_536),
        speculative=Speculative(
            method=Method.EAGLE3, num_tokens=7, schedule=((1, 64, 7), (65, 512, 3), (513, 2048, 1), (2049, 8192, 0))
        ),
        lora=Lora(max_active=8192, specialize=True),
        sizes=sizes,
        budget=Budget(),
    )


def steps(plan: Callable[[], Plan]) -> dict[str, Any]:
    """Return the time of every step with a plan, from making it to reading it back."""
    plan_seconds, result = best(plan)
    text_seconds, text = best(lambda: codec.dumps(result), 1)
    figures: dict[str, Any] = {
        "entries": result.num_graphs,
        "plan": plan_seconds,
        "dumps": text_seconds,
        "bytes": len(text),
    }
    try:
        figures["loads"], again = best(lambda: codec.loads(text, Plan), 1)
        assert again == result
    except CapturePlannerError as error:
        figures["loads"], figures["refused"] = None, str(error)[:120]
    figures["lint"], _ = best(lambda: lint(result))
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in figures.items()}


def measured_cases(profile: Profile) -> Iterator[tuple[str, Spec]]:
    """Yield deployments whose sizes are chosen by a profile: several budgets, objectives, adapters, and a wide one."""
    spec = Spec(
        model=profile.model,
        limits=Limits(max_num_reqs=256, max_num_tokens=8192),
        backend="flash_attention",
        speculative=Speculative(method=Method.EAGLE3, num_tokens=3),
        sizes=Sizes(policy=Policy.MEASURED),
    )
    for words, budget in BUDGETS.items():
        yield words, replace(spec, budget=budget)
        yield f"{words}, LoRA", replace(spec, budget=budget, lora=Lora(max_active=64, specialize=True))
    for objective in ("p99", "regret"):
        sizes = Sizes(policy=Policy.MEASURED, objective=objective)
        yield f"{objective}, 128 graphs", replace(spec, sizes=sizes, budget=BUDGETS["128 graphs"])
    limits = Limits(max_num_reqs=1024, max_num_tokens=16384)
    yield "1,024 requests, 16,384 tokens", replace(spec, limits=limits, budget=BUDGETS["400 graphs, 2 GiB"])


def random_traffic(steps: int) -> Traffic:
    """Return random steps, mixed and decodes."""
    rng, counts = random.Random(15), Counter[tuple[int, int, int | None]]()
    for _ in range(steps):
        num_reqs = min(256, 1 + int(rng.expovariate(1 / 60)))
        if rng.random() < 0.8:
            counts[num_reqs, num_reqs * 4, 4] += 1
        else:
            counts[num_reqs, min(8192, num_reqs * 4 + int(rng.expovariate(1 / 1500))), None] += 1
    lines = (
        TrafficCount(
            role=Role.TARGET, num_reqs=n, num_tokens=tokens, query_len=q, past_prompt=q is not None, count=count
        )
        for (n, tokens, q), count in sorted(counts.items(), key=str)
    )
    return Traffic(sources=("random",), batches=tuple(lines))


def measured_sizes(environment: Environment, backends: registry.Registry) -> list[dict[str, Any]]:
    """Return how long each measured table takes to choose, in seconds."""
    measurements = Measurements(traffic=random_traffic(20_000), profile=codec.load_profile(shipped_profiles()[PROFILE]))
    assert measurements.profile is not None
    rows = []
    for name, spec in measured_cases(measurements.profile):
        seconds, plan = best(lambda spec=spec: planner.plan(spec, environment, backends, measurements), 1)  # type: ignore[misc]
        rows.append({"case": name, "seconds": round(seconds, 3), "graphs": plan.num_graphs})
    return rows


def slope(points: list[tuple[int, float]]) -> float:
    """Return the least-squares slope of log time over log entries."""
    entries, times = zip(*points, strict=True)
    return statistics.linear_regression([*map(math.log, entries)], [*map(math.log, times)]).slope


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    arguments = parser(__doc__).parse_args()
    specs, environments, backends = shipped_specs(), shipped_environments(), registry.load_backends()
    imports = {name: import_seconds(modules) for name, modules in MODULES.items()}
    rows = ((name, *(f"{times[key] * 1e3:.1f}" for key in ("median", "best"))) for name, times in imports.items())
    print_table("import, in a fresh process (no torch, no numpy)", ("modules", "median ms", "best ms"), rows)

    shipped = _shipped(specs, environments, backends)
    slowest = max(shipped, key=lambda row: float(row["plan"]))
    CONSOLE.print(
        f"{len(shipped)} shipped plans, slowest {slowest['spec']} on {slowest['environment']}: "
        f"{slowest['plan'] * 1e3:.1f} ms"
    )

    base, h100 = specs["gpt-oss-20b-eagle3"], environments["h100"]
    base = replace(base, roles=replace(base.roles, target=type(base.roles.target)()))
    large: dict[str, dict[str, Any]] = {}
    for name, sizes in {
        "default": Sizes(),
        "default, to 65,536 tokens": Sizes(max_tokens=65_536),
        "64 sizes a ladder, to 65,536": Sizes(policy=Policy.MINIMAX, graphs=64, max_tokens=65_536),
    }.items():
        spec = large_spec(base, sizes)
        large[name] = steps(lambda spec=spec: planner.plan(spec, h100, backends))  # type: ignore[misc]
    scaling = []
    for graphs in (8, 16, 32, 64, 128, 256, 384):
        spec = large_spec(base, Sizes(policy=Policy.MINIMAX, graphs=graphs, max_tokens=65_536))
        spec = replace(spec, lora=None)
        scaling.append(steps(lambda spec=spec: planner.plan(spec, h100, backends)))  # type: ignore[misc]
    by_step = []
    for name, row in [*large.items(), *((f"scaling {index + 1}", row) for index, row in enumerate(scaling))]:
        cells = ("refused" if row[key] is None else f"{row[key] * 1e3:.1f}" for key in STEPS)
        by_step.append((name, row["entries"], *cells, f"{row['bytes'] / 1024:.0f}"))
    print_table("ms by step", ("spec", "entries", *STEPS, "KiB"), by_step)
    upper = scaling[len(scaling) // 2 :]
    slopes = {step: round(slope([(row["entries"], row[step]) for row in upper if row[step]]), 2) for step in STEPS}
    slopes["plan and lint"] = round(slope([(row["entries"], row["plan"] + row["lint"]) for row in upper]), 2)
    CONSOLE.print("log-log slope over entries: " + ", ".join(f"{step} {value}" for step, value in slopes.items()))
    measured = measured_sizes(environments["h200"], backends)
    print_table("s to choose measured sizes", measured[0], (row.values() for row in measured))
    longest = slowest["plan"]
    worst_measured = max(row["seconds"] for row in measured)
    worst_large = max(row["plan"] + row["lint"] for row in large.values())
    targets = {
        f"shipped specs within {SHIPPED_SECONDS} s after import ({longest:.3f})": longest <= SHIPPED_SECONDS,
        f"large spec within {LARGE_SECONDS} s, lint included ({worst_large:.3f})": worst_large <= LARGE_SECONDS,
        f"measured sizes within {MEASURED_SECONDS} s ({worst_measured:.3f})": worst_measured <= MEASURED_SECONDS,
        f"plan and lint near linear (slope {slopes['plan and lint']})": slopes["plan and lint"] <= SLOPE,
    }
    times = {"shipped": shipped, "large": large, "scaling": scaling, "slopes": slopes, "measured": measured}
    return conclude(arguments, {"results": {"imports": imports, **times}}, targets)


def _shipped(
    specs: dict[str, Spec], environments: dict[str, Environment], backends: registry.Registry
) -> list[dict[str, Any]]:
    rows = []
    for name, spec in specs.items():
        for other, environment in environments.items():
            try:
                seconds, result = best(lambda s=spec, e=environment: planner.plan(s, e, backends))  # type: ignore[misc]
            except CapturePlannerError:
                continue
            rows.append({"spec": name, "environment": other, "entries": result.num_graphs, "plan": round(seconds, 5)})
    return rows


if __name__ == "__main__":
    sys.exit(main())
