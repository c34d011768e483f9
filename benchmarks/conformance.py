r"""The conformance suite on a GPU: backends at a thorough profile, in several processes at once.

    python benchmarks/conformance.py --output
    python benchmarks/conformance.py --compile      # only what libraries compile on first use

The scenes of a backend are split over processes, each with a seed of its own: what they tried is added
up, and what they found is kept with the command that shows it again. Kernels are compiled before that, in
a process for each K. The audits of declared fields run once, beside the scenes. ``--device cpu`` has the
reference backend with recorded graphs. Exit code 1 where something was found, or broke.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from _bench import CONSOLE, finish, parser, table
from _deployments import CASES, Case, environment, missing

from capture_planner.report.conformance import Conformance, conformance_data
from capture_planner.runtime.host import facts
from capture_planner.testing.conformance import (
    Choices,
    Log,
    Outcome,
    Profile,
    Scene,
    Shape,
    Stage,
    Tested,
    conform,
    under_test,
    usable_shapes,
)
from capture_planner.testing.conformance.audit import audit
from capture_planner.testing.conformance.scene import Arrive, Forward
from capture_planner.testing.conformance.shapes import KERNELS
from capture_planner.testing.conformance.suite import DRAFTS, THOROUGH

Data = dict[str, Any]

NAMES = ("flash_attention", "flashinfer", "flashinfer_wrappers", "triton")


def shapes_of(case: Case) -> tuple[Shape, ...]:
    """Return the shapes that are asked for; empty: those that the backend runs.

    FlashInfer compiles kernels for each head size, page size and query length: it has one shape.
    """
    return KERNELS[:1] if case.backend == "flashinfer" else ()


def on(case: Case, device: str) -> Tested:
    """Return the backend as it is planned."""
    torch.set_num_threads(1)
    return under_test(case.backend, environment=None if device == "cpu" else environment(case))


def report(case: Case, under: Tested, profile: Profile, seed: int, outcome: Outcome) -> Data:
    """Return one process's part as data."""
    found = under.registry[under.backend]
    # Another capability is planned for by a file of one's own: the command names the backend alone.
    return conformance_data(
        Conformance(
            backend=found.name,
            distribution=found.distribution,
            version=found.version,
            environment=under.environment,
            host=facts(),
            seed=seed,
            profile=profile,
            drafts=DRAFTS,
            base=("capture-planner", "conformance", case.backend),
            outcome=outcome,
        )
    )


def search(name: str, device: str, seed: int, profile: Profile) -> Data:
    """Run a part of the scenes of one backend."""
    case = CASES[name]
    under = on(case, device)
    choices = Choices(profile=profile, seed=seed, shapes=shapes_of(case), audits=False)
    return report(case, under, profile, seed, conform(under, choices))


def attack(name: str, device: str, seed: int) -> Data:
    """Run the audits of one backend."""
    case = CASES[name]
    under, began = on(case, device), time.perf_counter()
    shapes, refused = usable_shapes(under, shapes_of(case))
    audited = audit(under, shapes, seed=seed)
    took = time.perf_counter() - began
    outcome = Outcome(shapes=shapes, refused=refused, log=Log(), findings=(), audited=audited, seconds=took)
    return report(case, under, Profile(name="audits", examples=0, steps=0), seed, outcome)


def compile_for(name: str, device: str, k: int) -> int:
    """Capture and run one small scene of each shape with K drafts; return how many shapes there are."""
    case = CASES[name]
    under = on(case, device)
    shapes, _ = usable_shapes(under, shapes_of(case))
    for shape in shapes:
        scene = Scene(shape=shape, drafts=k, num_tokens=24, size_tokens=(24,), eagle3=bool(k % 2))
        with Stage(under, scene) as stage:
            for step in (
                Arrive(prompt=4, computed=4),
                Arrive(prompt=9),
                Forward(rows=((0, 1 + k, 0),)),
                Forward(rows=((0, 1, 0), (1, 9, 0))),
            ):
                stage.do(step)
    return len(shapes)


def added(parts: Sequence[Data]) -> Data:
    """Return what all processes of a backend did together; scenes and steps are sums, findings a list."""
    forwards: Counter[tuple[str, str]] = Counter()
    steps: Counter[str] = Counter()
    for part in parts:
        steps.update(part["steps"])
        forwards.update({(each["role"], each["mode"]): each["count"] for each in part["forwards"]})
    audited = [each for part in parts for each in part["audited"]]
    return {
        **{key: parts[0][key] for key in ("backend", "distribution", "version", "environment", "host")},
        "seeds": [part["seed"] for part in parts if part["scenes"]],
        "drafts": parts[0]["drafts"],
        "passed": all(part["passed"] for part in parts),
        "findings": [finding for part in parts for finding in part["findings"]],
        "scenes": sum(part["scenes"] for part in parts),
        "steps": dict(sorted(steps.items())),
        "forwards": [
            {"role": role, "mode": mode, "count": count} for (role, mode), count in sorted(forwards.items())
        ],
        "largest": {key: max(part["largest"][key] for part in parts) for key in parts[0]["largest"]},
        "shapes": parts[0]["shapes"],
        "refused": parts[0]["refused"],
        "audited": audited,
        "fields": [field for part in parts for field in part["fields"]],
        "process_seconds": round(sum(part["seconds"] for part in parts), 1),
    }


def split(examples: int, jobs: int) -> list[int]:
    """Return how many scenes each process has: as even as can be, none of them without one."""
    each, more = divmod(examples, jobs)
    return [each + (number < more) for number in range(jobs) if each + (number < more)]


def campaign(case: Case, arguments: argparse.Namespace) -> Data:
    """Put one backend through its scenes and audits; return what came of it all, or why nothing did."""
    why = missing(case, torch.device(arguments.device))
    if why is not None:
        return {"case": case.name, "skipped": why, "passed": True}
    try:
        # Processes of its own: after an illegal access nothing more can be run in one. And a process that
        # has used CUDA cannot be forked.
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            return _campaign(case, arguments, pool)
    except Exception as error:
        traceback.print_exc()
        return {"case": case.name, "broke": f"{type(error).__name__}: {error}", "passed": False}


def _campaign(case: Case, arguments: argparse.Namespace, pool: ProcessPoolExecutor) -> Data:
    name, device, seed = case.name, arguments.device, arguments.seed
    began = time.perf_counter()
    for done in [pool.submit(compile_for, name, device, k) for k in DRAFTS]:
        done.result()
    compiled = time.perf_counter()
    took = {"seconds to compile": round(compiled - began, 1)}
    if arguments.compile:
        return {"case": name, **took, "passed": True}
    parts: list[Future[Data]] = [pool.submit(attack, name, device, seed)]
    for number, examples in enumerate(split(arguments.examples, arguments.jobs)):
        profile = Profile(name="thorough", examples=examples, steps=arguments.steps)
        parts.append(pool.submit(search, name, device, seed + number, profile))
    results = [part.result() for part in parts]
    return {"case": name, **added(results), **took, "seconds": round(time.perf_counter() - compiled, 1)}


def main() -> int:
    """Run, print and write; exit code 1 where something was found, or broke."""
    options = parser(__doc__)
    options.add_argument("--backends", nargs="*", choices=list(CASES))
    options.add_argument("--examples", type=int, default=THOROUGH.examples, help="scenes of each backend")
    options.add_argument("--steps", type=int, default=THOROUGH.steps, help="most steps of a scene")
    options.add_argument("--seed", type=int, default=0, help="of the first process; the next has one more")
    options.add_argument("--jobs", type=int, default=8, help="processes at once")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--compile", action="store_true", help="only compile, in a process for each K")
    arguments = options.parse_args()
    names = arguments.backends or (NAMES if arguments.device == "cuda" else ("reference",))
    results = []
    for name in names:
        results.append(campaign(CASES[name], arguments))
        CONSOLE.print(_said(results[-1]), highlight=False, markup=False)
    if not arguments.compile:
        _print(results)
        finish(arguments, {"results": results})
    return int(not all(result["passed"] for result in results))


def _said(result: Data) -> str:
    if "skipped" in result or "broke" in result:
        return f"{result['case']}: {result.get('skipped') or result['broke']}"
    found = "\n".join(f"{each['says']}\n{each['command']}" for each in result.get("findings", ()))
    return f"{result['case']}: {'passed' if result['passed'] else found}"


def _print(results: Sequence[Data]) -> None:
    shown = table("Conformance", "backend", "scenes", "steps", "forwards", "attacks", "findings", "s")
    for result in results:
        if "scenes" in result:
            shown.add_row(
                result["case"],
                f"{result['scenes']:,}",
                f"{sum(result['steps'].values()):,}",
                f"{sum(each['count'] for each in result['forwards']):,}",
                str(len(result["audited"])),
                str(len(result["findings"])),
                f"{result['seconds']:.0f}",
            )
    CONSOLE.print(shown)


if __name__ == "__main__":
    sys.exit(main())
