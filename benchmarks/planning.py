"""Time to import, to plan every shipped spec, to plan a large one, and how planning scales.

Import time is taken inside fresh processes. All other times are the best of the repeats, in this
process. The slope is of log time over log number of entries, in the upper half of a family
of growing specs, where constant costs no longer hide it: 1 is linear.
"""

from __future__ import annotations

import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from _bench import CONSOLE, ROOT, conclude, parser, shipped_environments, shipped_specs, table

from capture_planner import codec
from capture_planner.analysis.lint import lint
from capture_planner.errors import CapturePlannerError
from capture_planner.planning import planner
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.environment import Environment
from capture_planner.records.model import Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Budget, Limits, Lora, Policy, Sizes, Spec

T = TypeVar("T")

SHIPPED_SECONDS = 0.3
LARGE_SECONDS = 3.0
SLOPE = 1.3
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


def best(function: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Return the least time of several calls, and what the last returned."""
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def import_seconds(modules: str, repeats: int) -> dict[str, float]:
    """Return the median and the least time of an import in fresh processes."""
    times = []
    for _ in range(repeats):
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


def steps(plan: Callable[[], Plan], repeats: int) -> dict[str, Any]:
    """Return the time of every step with a plan, from making it to reading it back."""
    plan_seconds, result = best(plan, repeats)
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
    figures["lint"], _ = best(lambda: lint(result), repeats)
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in figures.items()}


def slope(points: list[tuple[int, float]]) -> float:
    """Return the least-squares slope of log time over log entries."""
    entries, times = zip(*points, strict=True)
    return statistics.linear_regression([*map(math.log, entries)], [*map(math.log, times)]).slope


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=5, help="times each step is timed (default 5)")
    options.add_argument("--imports", type=int, default=31, help="fresh processes for the import time (default 31)")
    arguments = options.parse_args()
    specs, environments, backends = shipped_specs(), shipped_environments(), registry.load_backends()
    imports = {name: import_seconds(modules, arguments.imports) for name, modules in MODULES.items()}
    summary = table("import, in a fresh process (no torch, no numpy)", "modules", "median ms", "best ms")
    for name, times in imports.items():
        summary.add_row(name, f"{times['median'] * 1e3:.1f}", f"{times['best'] * 1e3:.1f}")
    CONSOLE.print(summary)

    shipped = _shipped(specs, environments, backends, arguments.repeats)
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
        large[name] = steps(lambda spec=spec: planner.plan(spec, h100, backends), arguments.repeats)  # type: ignore[misc]
    scaling = []
    for graphs in (8, 16, 32, 64, 128, 256, 384):
        spec = large_spec(base, Sizes(policy=Policy.MINIMAX, graphs=graphs, max_tokens=65_536))
        spec = replace(spec, lora=None)
        scaling.append(steps(lambda spec=spec: planner.plan(spec, h100, backends), arguments.repeats))  # type: ignore[misc]
    by_step = table("ms by step", "spec", "entries", "plan", "lint", "dumps", "loads", "KiB")
    for name, row in [*large.items(), *((f"scaling {index + 1}", row) for index, row in enumerate(scaling))]:
        times_of = (row[key] for key in ("plan", "lint", "dumps", "loads"))
        cells = ("refused" if value is None else f"{value * 1e3:.1f}" for value in times_of)
        by_step.add_row(name, str(row["entries"]), *cells, f"{row['bytes'] / 1024:.0f}")
    CONSOLE.print(by_step)
    upper = scaling[len(scaling) // 2 :]
    slopes = {
        step: round(slope([(row["entries"], row[step]) for row in upper if row[step]]), 2)
        for step in ("plan", "lint", "dumps", "loads")
    }
    slopes["plan and lint"] = round(slope([(row["entries"], row["plan"] + row["lint"]) for row in upper]), 2)
    CONSOLE.print("log-log slope over entries: " + ", ".join(f"{step} {value}" for step, value in slopes.items()))
    worst_large = max(row["plan"] + row["lint"] for row in large.values())
    targets = {
        f"shipped specs within {SHIPPED_SECONDS} s after import ({slowest['plan']:.3f})": slowest["plan"]
        <= SHIPPED_SECONDS,
        f"large spec within {LARGE_SECONDS} s, lint included ({worst_large:.3f})": worst_large <= LARGE_SECONDS,
        f"plan and lint near linear (slope {slopes['plan and lint']})": slopes["plan and lint"] <= SLOPE,
    }
    results = {"imports": imports, "shipped": shipped, "large": large, "scaling": scaling, "slopes": slopes}
    return conclude(arguments, {"results": results}, targets)


def _shipped(
    specs: dict[str, Spec], environments: dict[str, Environment], backends: registry.Registry, repeats: int
) -> list[dict[str, Any]]:
    rows = []
    for name, spec in specs.items():
        for other, environment in environments.items():
            try:
                seconds, result = best(lambda s=spec, e=environment: planner.plan(s, e, backends), repeats)  # type: ignore[misc]
            except CapturePlannerError:
                continue
            rows.append({"spec": name, "environment": other, "entries": result.num_graphs, "plan": round(seconds, 5)})
    return rows


if __name__ == "__main__":
    sys.exit(main())
