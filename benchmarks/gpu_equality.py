r"""Thousands of random steps on a GPU: graphs against the same kernels, eager steps and float32 logits.

For each backend that runs here, random tiny deployments and two of Qwen3-0.6B's shape are served until
so many steps came. Every token from graphs must equal the token of the same kernels without a graph; in
float32 also the token of plain greedy decoding; no row's logits are more than 2 % off a dense
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
from _bench import CONSOLE, conclude, parser, print_table
from _deployments import CASES, CYCLE, DRAFTS, Case, deployment, missing, qwen, small, tiny
from _equality import check, differing, faults

from capture_planner.records.spec import Spec
from capture_planner.records.text import counted
from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.graphs.recorded import grapher_for

COUNTED = ("steps", "forwards", "graphs", "requests", "tokens", "accepted", "differ from the same kernels")


def campaign(case: Case, device: torch.device, grapher: Grapher, arguments: Any) -> dict[str, Any]:
    """Serve deployments of one backend until there were enough steps; return what was seen in all."""
    began = time.perf_counter()
    short(case, small(case, 3), device, grapher, capture=True)
    compiled = time.perf_counter()
    all_seen = []
    if not arguments.tiny_only:
        for k in (0, 3):
            subject = deployment(
                case, qwen(case, k), device, grapher, seed=k, requests=16, prompts=(16, 200), outputs=(8, 40)
            )
            all_seen.append(with_faults(check(subject, eager=k == 0, poison=k == 3, other_pool=k == 3)))
            del subject
            gc.collect()
    index = 0
    while index < CYCLE or sum(record["steps"] for record in all_seen) < arguments.steps:
        if time.perf_counter() - compiled > arguments.seconds:
            break
        spec = tiny(case, index, random.Random(f"{case.name} {index}"))
        subject = deployment(case, spec, device, grapher, seed=index, requests=arguments.requests)
        # Every second of each K. With debug on nothing runs ahead.
        poison = (index + index // len(DRAFTS)) % 2 == 1
        debug = poison and index > CYCLE // 2
        all_seen.append(
            with_faults(check(subject, eager=index % 3 == 0, other_pool=index % 6 == 3, poison=poison, debug=debug))
        )
        index += 1
        del subject
        gc.collect()
    summary = totals(all_seen) | {
        "backend": case.name,
        "seconds to compile": round(compiled - began, 1),
        "seconds": round(time.perf_counter() - compiled, 1),
    }
    if summary["steps"] < arguments.steps:
        summary["short of steps"] = f"{arguments.seconds} seconds were over after {summary['steps']} steps"
    return summary


def with_faults(record: dict[str, Any]) -> dict[str, Any]:
    """Add what is wrong, and say so at once."""
    record["faults"] = faults(record)
    for fault in record["faults"]:
        CONSOLE.print(f"[red]{fault}[/]: {record}", highlight=False)
    return record


def totals(all_seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Put what was seen in each deployment together."""
    graphs: Counter[str] = Counter()
    for record in all_seen:
        graphs.update(record["from graphs"])
    others = {
        name: {
            dtype: {
                "requests": sum(record["requests"] for record in some),
                "differ": sum(record[f"differ from {name}"] for record in some),
                "not by a tie": sum(record[f"differ from {name}, not by a tie"] for record in some),
                "widest gap": max(record[f"widest gap to {name}"] for record in some),
            }
            for dtype in sorted({record["dtype"] for record in all_seen})
            if (some := [s for s in all_seen if s["dtype"] == dtype and f"differ from {name}" in s])
        }
        for name in ("plain", "eager")
    }
    return {
        "deployments": len(all_seen),
        **{name: sum(record[name] for record in all_seen) for name in COUNTED},
        "from graphs": dict(sorted(graphs.items())),
        "K and mode": sorted({f"{record['k']} {record['mode']} as {record['resolved']}" for record in all_seen}),
        "ran ahead": sum(record["ran ahead"] for record in all_seen),
        "other kernels": others,
        "logits": {
            model: {
                "rows": sum(record["logits"]["rows"] for record in some),
                "worst": max(record["logits"]["worst"] for record in some),
                "median": sorted(record["logits"]["median"] for record in some)[len(some) // 2],
                "worst of the dtype alone": max(record["logits of the dtype alone"]["worst"] for record in some),
            }
            for model in sorted({f"{record['model']}, {record['dtype']}" for record in all_seen})
            if (some := [s for s in all_seen if f"{s['model']}, {s['dtype']}" == model])
        },
        "shared against dedicated pools": [
            {"model": record["model"], "k": record["k"], "graphs": record["graphs"], **record["other pool"]}
            for record in all_seen
            if "other pool" in record
        ],
        "faults": [fault for record in all_seen for fault in record["faults"]],
    }


def short(case: Case, spec: Spec, device: torch.device, grapher: Grapher, *, capture: bool) -> list[str]:
    """Serve one small deployment without replays, and from graphs with everything poisoned; return faults."""
    subject = deployment(case, spec, device, grapher, seed=0, requests=4, prompts=(1, 12), outputs=(2, 5))
    same = subject.serve(subject.plan, replay=False, debug=True)
    if not capture:
        return []
    graphs = subject.serve(subject.plan, poison=True, debug=True)
    differ = differing(graphs.tokens, same.tokens)
    return [f"{counted(len(differ), 'request')} with other tokens than the same kernels"] if differ else []


def compile_all(arguments: Any) -> int:
    """Compile what is compiled on first use, in a process for each K and model; return how many broke."""
    names = [name for name in arguments.backends if missing(CASES[name], torch.device(arguments.device)) is None]
    each = [["--k", str(k)] for k in DRAFTS]
    if not arguments.tiny_only:
        each += [["--k", str(k), "--large"] for k in (0, 3)]
    begun = []
    for name, options in itertools.product(names, each):
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
    campaigns = [each for each in results if "skipped" not in each]
    targets = {
        "nothing differs that must not, and logits are within 2 %": bool(campaigns) and not wrong,
        f"{arguments.steps} steps of each backend": arguments.short
        or all(each.get("steps", 0) >= arguments.steps for each in campaigns),
    }
    return conclude(arguments, {"results": results}, targets)


def show(results: list[dict[str, Any]]) -> None:
    """Print a line for each backend."""
    columns = ("backend", "deployments", "steps", "from graphs", "requests", "differ", "worst logits", "seconds")
    rows = (
        (
            each["backend"],
            each["deployments"],
            each["steps"],
            sum(each["from graphs"].values()),
            each["requests"],
            each["differ from the same kernels"],
            f"{max(errors['worst'] for errors in each['logits'].values()):.2%}",
            f"{each['seconds']:.0f}",
        )
        if "steps" in each
        else (each["backend"],)
        for each in results
    )
    print_table("graphs against the same kernels", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
