r"""Thousands of random steps on a GPU: graphs against the same kernels, eager steps and float32 logits.

For each backend that runs here, random tiny deployments and two of Qwen3-0.6B's shape are served until
so many steps came. Every token from graphs must be that of the same kernels without a graph; in
float32 also that of plain greedy decoding; and no row's logits are more than 2 % off those of a dense
forward in float32. ``--short`` serves one small deployment of each backend, for compute-sanitizer:

    python benchmarks/gpu_equality.py --compile     # what libraries compile on first use, all at once
    compute-sanitizer --tool memcheck --error-exitcode 9 \
        python benchmarks/gpu_equality.py --short --backends triton
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python benchmarks/gpu_equality.py --short --without-capture --backends triton

The last one gives each tensor an allocation of its own, so that a step past its end is seen; no graph
can be captured then. ``--device cpu`` serves the reference backend from recorded graphs.
"""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from typing import Any

import torch
from _bench import CONSOLE, finish, parser, table, verdict
from _deployments import CASES, CYCLE, DRAFTS, Case, deployment, missing, qwen, small, tiny
from _equality import check, differing, faults

from capture_planner.records.spec import Spec
from capture_planner.records.text import counted
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.graphs.graph import Grapher

COUNTED = ("steps", "forwards", "graphs", "requests", "tokens", "accepted", "differ from the same kernels")


def campaign(case: Case, device: torch.device, grapher: Grapher, arguments: Any) -> dict[str, Any]:
    """Serve deployments of one backend until there were enough steps; return what was seen in all."""
    began = time.perf_counter()
    short(case, small(case, 3), device, grapher, capture=True)
    compiled = time.perf_counter()
    all_seen = []
    if not arguments.tiny_only:
        for k in (0, 3):
            made = deployment(
                case, qwen(case, k), device, grapher, seed=k, requests=16, prompts=(16, 200), outputs=(8, 40)
            )
            all_seen.append(noted(check(made, eager=k == 0, poison=k == 3, other_pool=k == 3)))
            del made
            gc.collect()
    index = 0
    while index < CYCLE or sum(seen["steps"] for seen in all_seen) < arguments.steps:
        if time.perf_counter() - compiled > arguments.seconds:
            break
        spec = tiny(case, index, random.Random(f"{case.name} {index}"))
        made = deployment(case, spec, device, grapher, seed=index, requests=arguments.requests)
        # Every second of each K. With debug on nothing runs ahead, which is K 0's alone to do.
        poison = (index + index // len(DRAFTS)) % 2 == 1
        debug = poison and (made.plan.speculative is not None or index > CYCLE // 2)
        all_seen.append(noted(check(made, eager=index % 3 == 0, other_pool=index % 6 == 3, poison=poison, debug=debug)))
        index += 1
        del made
        gc.collect()
    found = totals(all_seen) | {
        "backend": case.name,
        "seconds to compile": round(compiled - began, 1),
        "seconds": round(time.perf_counter() - compiled, 1),
    }
    if found["steps"] < arguments.steps:
        found["short of steps"] = f"{arguments.seconds} seconds were over after {found['steps']} steps"
    return found


def noted(seen: dict[str, Any]) -> dict[str, Any]:
    """Add what is wrong, and say so at once."""
    seen["faults"] = faults(seen)
    for fault in seen["faults"]:
        CONSOLE.print(f"[red]{fault}[/]: {seen}", highlight=False)
    return seen


def totals(all_seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Put what was seen in each deployment together."""
    graphs: Counter[str] = Counter()
    for seen in all_seen:
        graphs.update(seen["from graphs"])
    drafted = [seen for seen in all_seen if seen["k"]]
    others = {
        name: {
            dtype: {
                "requests": sum(seen["requests"] for seen in some),
                "differ": sum(seen[f"differ from {name}"] for seen in some),
                "not by a tie": sum(seen[f"differ from {name}, not by a tie"] for seen in some),
                "widest gap": max(seen[f"widest gap to {name}"] for seen in some),
            }
            for dtype in sorted({seen["dtype"] for seen in all_seen})
            if (some := [s for s in all_seen if s["dtype"] == dtype and f"differ from {name}" in s])
        }
        for name in ("plain", "eager")
    }
    return {
        "deployments": len(all_seen),
        **{name: sum(seen[name] for seen in all_seen) for name in COUNTED},
        "from graphs": dict(sorted(graphs.items())),
        "K and mode": sorted({f"{seen['k']} {seen['mode']} as {seen['resolved']}" for seen in all_seen}),
        "models": dict(Counter(f"{seen['model']}, {seen['dtype']}" for seen in all_seen)),
        "pools": dict(Counter(seen["pool"] for seen in all_seen)),
        "chains": dict(Counter(seen["chain"] for seen in drafted)),
        "fused chains": sum(seen["fused graphs"] for seen in drafted),
        "schedules of k": sum(seen["schedule"] for seen in drafted),
        "drafters": dict(Counter(seen["drafter"] for seen in drafted)),
        "page sizes": dict(Counter(str(seen["page size"]) for seen in all_seen)),
        "poisoned": sum(seen["poisoned"] for seen in all_seen),
        "ran ahead": sum(seen["ran ahead"] for seen in all_seen),
        "other kernels": others,
        "logits": {
            model: {
                "rows": sum(seen["logits"]["rows"] for seen in some),
                "worst": max(seen["logits"]["worst"] for seen in some),
                "median": sorted(seen["logits"]["median"] for seen in some)[len(some) // 2],
                "worst of the dtype alone": max(seen["logits of the dtype alone"]["worst"] for seen in some),
            }
            for model in sorted({f"{seen['model']}, {seen['dtype']}" for seen in all_seen})
            if (some := [s for s in all_seen if f"{s['model']}, {s['dtype']}" == model])
        },
        "shared against dedicated pools": [
            {"model": seen["model"], "k": seen["k"], "graphs": seen["graphs"], **seen["other pool"]}
            for seen in all_seen
            if "other pool" in seen
        ],
        "faults": [fault for seen in all_seen for fault in seen["faults"]],
    }


def short(case: Case, spec: Spec, device: torch.device, grapher: Grapher, *, capture: bool) -> list[str]:
    """Serve one small deployment without replays, and from graphs with everything poisoned; return faults."""
    made = deployment(case, spec, device, grapher, seed=0, requests=4, prompts=(1, 12), outputs=(2, 5))
    same = made.serve(made.plan, replay=False, debug=True)
    if not capture:
        return []
    graphs = made.serve(made.plan, poison=True, debug=True)
    differ = differing(graphs.tokens, same.tokens)
    return [f"{counted(len(differ), 'request')} with other tokens than the same kernels"] if differ else []


def compile_all(arguments: Any) -> int:
    """Compile what is compiled on first use, in a process for each K and model; return how many broke."""
    served = [name for name in arguments.backends if missing(CASES[name], torch.device(arguments.device)) is None]
    each = [["--k", str(k)] for k in DRAFTS]
    if not arguments.tiny_only:
        each += [["--k", str(k), "--large"] for k in (0, 3)]
    begun = []
    for name, options in itertools.product(served, each):
        command = [sys.executable, __file__, "--short", "--device", arguments.device, "--backends", name]
        begun.append(subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL))
    return sum(process.wait() != 0 for process in begun)


def attempt(case: Case, device: torch.device, grapher: Grapher, arguments: Any) -> dict[str, Any]:
    """Return a backend's results, or why there are none: the others are served all the same."""
    why = missing(case, device)
    if why is not None:
        return {"backend": case.name, "skipped": why, "faults": []}
    try:
        if arguments.short:
            spec = (qwen if arguments.large else small)(case, arguments.k)
            wrong = short(case, spec, device, grapher, capture=not arguments.without_capture)
            return {"backend": case.name, "faults": wrong}
        return campaign(case, device, grapher, arguments)
    except Exception as error:
        traceback.print_exc()
        return {"backend": case.name, "faults": [f"{type(error).__name__}: {error}"]}


def main() -> int:
    """Serve, print and write; exit code 1 where something differs that must not."""
    options = parser(__doc__)
    options.add_argument("--backends", nargs="*", default=list(CASES), choices=list(CASES))
    options.add_argument("--steps", type=int, default=5000, help="steps from each backend")
    options.add_argument("--seconds", type=float, default=240, help="most time of each backend")
    options.add_argument("--requests", type=int, default=40, help="requests of each tiny deployment")
    options.add_argument("--tiny-only", action="store_true", help="leave out Qwen3-0.6B's shape")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--short", action="store_true", help="one small deployment of each backend")
    options.add_argument("--k", type=int, choices=DRAFTS, default=3, help="with --short: draft tokens")
    options.add_argument("--large", action="store_true", help="with --short: Qwen3-0.6B's shape")
    options.add_argument("--compile", action="store_true", help="only compile, in many processes at once")
    options.add_argument("--without-capture", action="store_true", help="with --short: no graphs")
    arguments = options.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        options.error("there is no CUDA device; --device cpu serves the reference backend")
    if arguments.compile:
        return min(compile_all(arguments), 1)
    torch.set_num_threads(1)
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    grapher = grapher_for(device)
    results = []
    for name in arguments.backends:
        results.append(attempt(CASES[name], device, grapher, arguments))
        CONSOLE.print_json(data=results[-1])
        gc.collect()
    if not arguments.short:
        show(results)
    wrong = {each["backend"]: each["faults"] for each in results if each["faults"]}
    for backend, each in wrong.items():
        CONSOLE.print(f"{backend}: {'; '.join(each)}", highlight=False, markup=False)
    served = [each for each in results if "skipped" not in each]
    targets = {
        "nothing differs that must not, and logits are within 2 %": bool(served) and not wrong,
        f"{arguments.steps} steps of each backend": arguments.short
        or all(each.get("steps", 0) >= arguments.steps for each in served),
    }
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    finish(arguments, {"results": results, "targets": targets})
    return 0 if all(targets.values()) else 1


def show(results: list[dict[str, Any]]) -> None:
    """Print a line for each backend."""
    columns = ("backend", "deployments", "steps", "from graphs", "requests", "differ", "worst logits", "seconds")
    shown = table("graphs against the same kernels", *columns)
    for each in results:
        if "steps" not in each:
            shown.add_row(each["backend"], "-", "-", "-", "-", "-", "-", "-")
            continue
        worst = max(found["worst"] for found in each["logits"].values())
        shown.add_row(
            each["backend"],
            str(each["deployments"]),
            str(each["steps"]),
            str(sum(each["from graphs"].values())),
            str(each["requests"]),
            str(each["differ from the same kernels"]),
            f"{worst:.2%}",
            f"{each['seconds']:.0f}",
        )
    CONSOLE.print(shown)


if __name__ == "__main__":
    sys.exit(main())
