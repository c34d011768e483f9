r"""The conformance suite on a GPU: backends at a thorough profile, one after the other.

    python benchmarks/conformance.py --output
    python benchmarks/conformance.py --compile      # only what libraries compile on first use
    python benchmarks/conformance.py --after FILE   # go on where another run ended, and add to what it has

The scenes of a backend are done in portions, each with a seed of its own: what they tried is added up, and
what they found is kept with the command that shows it again. The audits of declared fields run before them.
Audits and scenes are processes of their own, so that an illegal access ends no other. Several may
search at once (``--jobs``): on a CPU, and on a GPU that they share through CUDA's multi-process service
(``nvidia-cuda-mps-control -d``): eight that did made 17 scenes a second on an H100, one alone 2 to 5, and six
that took turns without it fewer than one. ``--device cpu`` has the reference backend with recorded graphs.
Exit code 1 where something was found, or broke.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import attrs
import torch
from _bench import CONSOLE, finish, parser, table
from _deployments import CASES, Case, environment, missing

from capture_planner.conformance import (
    Log,
    Scene,
    SearchProfile,
    Shape,
    Stage,
    Subject,
    SuiteOptions,
    SuiteResult,
    conform,
    under_test,
    usable_shapes,
)
from capture_planner.conformance.audit import audit
from capture_planner.conformance.scene import Arrive, RunBatch
from capture_planner.conformance.shapes import KERNELS
from capture_planner.conformance.steps import run_step
from capture_planner.conformance.suite import DRAFTS, THOROUGH
from capture_planner.report.conformance_record import Conformance
from capture_planner.report.plain import plain
from capture_planner.runtime.host import facts

Data = dict[str, Any]
PORTION = 60
"""Scenes of one seed: the clock is looked at between two portions."""
SEEDS = 1000
"""From the first seed of one process to the first of the next."""

NAMES = ("flash_attention", "flashinfer", "flashinfer_wrappers", "triton")


def shapes_of(case: Case) -> tuple[Shape, ...]:
    """Return the shapes that are asked for; empty: those that the backend runs.

    FlashInfer compiles kernels for each head size, page size and query length: it has one shape.
    """
    return KERNELS[:1] if case.backend == "flashinfer" else ()


def on(case: Case, device: str) -> Subject:
    """Return the backend as it is planned."""
    torch.set_num_threads(1)
    return under_test(case.backend, environment=environment(case, torch.device(device)))


def report(case: Case, under: Subject, profile: SearchProfile, seed: int, outcome: SuiteResult) -> Data:
    """Return one process's part as data."""
    implementation = under.registry[under.backend]
    # Another capability is planned for by a file of one's own: the command names the backend alone.
    data: Data = plain(
        Conformance(
            backend=implementation.name,
            distribution=implementation.distribution,
            version=implementation.version,
            environment=under.environment,
            host=facts(),
            seed=seed,
            profile=profile,
            drafts=DRAFTS,
            base=("capture-planner", "conformance", case.backend),
            outcome=outcome,
        )
    )
    return data


def search(name: str, device: str, seed: int, profile: SearchProfile, until: float) -> Data:
    """Run a part of the scenes of one backend, in portions, until the clock of the machine says ``until``."""
    case = CASES[name]
    parts: list[Data] = []
    under, remaining = on(case, device), profile.examples
    while remaining > 0 and (not parts or (time.time() < until and parts[-1]["passed"])):
        portion = attrs.evolve(profile, examples=min(PORTION, remaining))
        portion_seed = seed + len(parts)
        choices = SuiteOptions(profile=portion, seed=portion_seed, shapes=shapes_of(case), audits=False)
        parts.append(report(case, under, portion, portion_seed, conform(under, choices)))
        remaining -= portion.examples
    return added(parts)


def attack(name: str, device: str, seed: int) -> Data:
    """Run the audits of one backend."""
    case = CASES[name]
    under, began = on(case, device), time.perf_counter()
    shapes, refused = usable_shapes(under, shapes_of(case))
    audited = audit(under, shapes, seed=seed)
    took = time.perf_counter() - began
    outcome = SuiteResult(shapes=shapes, refused=refused, log=Log(), failures=(), audited=audited, seconds=took)
    return report(case, under, SearchProfile(name="audits", examples=0, steps=0), seed, outcome)


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
                RunBatch(rows=((0, 1 + k, 0),)),
                RunBatch(rows=((0, 1, 0), (1, 9, 0))),
            ):
                run_step(stage, step)
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
        "seeds": [seed for part in parts if part["scenes"] for seed in part.get("seeds", [part.get("seed")])],
        "drafts": parts[0]["drafts"],
        "passed": all(part["passed"] for part in parts),
        "findings": [finding for part in parts for finding in part["findings"]],
        "scenes": sum(part["scenes"] for part in parts),
        "steps": dict(sorted(steps.items())),
        "forwards": [{"role": role, "mode": mode, "count": count} for (role, mode), count in sorted(forwards.items())],
        "largest": {key: max(part["largest"][key] for part in parts) for key in parts[0]["largest"]},
        "shapes": parts[0]["shapes"],
        "refused": parts[0]["refused"],
        "audited": audited,
        "fields": [field for part in parts for field in part["fields"]],
        "seconds": round(sum(part["seconds"] for part in parts), 1),
    }


def split(examples: int, jobs: int) -> list[int]:
    """Return how many scenes each process has: as even as can be, none of them without one."""
    each, more = divmod(examples, jobs)
    return [each + (number < more) for number in range(jobs) if each + (number < more)]


@contextmanager
def alone() -> Iterator[ProcessPoolExecutor]:
    """Give a process to do one thing in: after an illegal access nothing more can be run in one.

    It is spawned, since a process that has used CUDA cannot be forked.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


class Campaign:
    """One backend's parts, each in a process of its own, which ends when its result is there.

    A process that stays keeps what its libraries took of the GPU's memory.
    """

    def __init__(self, case: Case, arguments: argparse.Namespace) -> None:
        self.case, self._arguments, self._processes = case, arguments, ExitStack()
        self.why = missing(case, torch.device(arguments.device))
        self._parts: list[Future[Any]] = []
        self._began = time.perf_counter()

    def _submit(self, act: Callable[..., Any], *rest: object) -> None:
        pool = self._processes.enter_context(alone())
        self._parts.append(pool.submit(act, self.case.name, self._arguments.device, *rest))

    def compile(self) -> None:
        """Begin to compile, for each K."""
        for k in DRAFTS if self.why is None else ():
            self._submit(compile_for, k)

    def run(self, seconds: float, before: Data | None) -> Data:
        """Do the audits, where they were not done before, and then the scenes that are left."""
        seed, examples = self._arguments.seed, self._arguments.examples
        if before is None:
            self._submit(attack, seed)
        else:
            examples = max(examples - before["scenes"], 0)
            seed = 1 + max(before["seeds"], default=seed - 1)
        audited = self.result(before)
        until = time.time() + seconds
        for number, part in enumerate(split(examples, self._arguments.jobs)):
            profile = SearchProfile(name="thorough", examples=part, steps=self._arguments.steps)
            self._submit(search, seed + number * SEEDS, profile, until)
        return self.result(audited) if self._parts else audited

    def result(self, before: Data | None = None) -> Data:
        """Wait, and return what came of all parts and of those before; of one that broke, how."""
        parts = [before] if before is not None and "scenes" in before else []
        broke = list(before.get("broke", ())) if before is not None else []
        for part in self._parts:
            try:
                parts.append(part.result())
            except Exception as error:
                traceback.print_exc()
                broke.append(f"{type(error).__name__}: {error}")
        self._parts.clear()
        self._processes.close()
        took = {"wall_seconds": round(time.perf_counter() - self._began, 1)}
        merged = added(parts) if parts and isinstance(parts[0], dict) else {"passed": True}
        merged.pop("wall_seconds", None)
        data = {"case": self.case.name, **merged, **took}
        if broke:
            data |= {"broke": broke, "passed": False}
        return data


def main() -> int:
    """Run, print and write; exit code 1 where something was found, or broke."""
    options = parser(__doc__)
    options.add_argument("--backends", nargs="*", choices=list(CASES))
    options.add_argument("--examples", type=int, default=THOROUGH.examples, help="scenes of each backend")
    options.add_argument("--steps", type=int, default=THOROUGH.steps, help="most steps of a scene")
    options.add_argument("--seed", type=int, default=0, help="of the first process; the next has one more")
    options.add_argument("--jobs", type=int, default=1, help="processes that search at once")
    options.add_argument("--after", type=Path, help="results to go on from")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--compile", action="store_true", help="only compile, in a process for each K")
    options.add_argument(
        "--seconds", type=float, default=1e9, help="of each backend: begin no portion of scenes after so many"
    )
    arguments = options.parse_args()
    names = arguments.backends or (NAMES if arguments.device == "cuda" else ("reference",))
    before, results = _before(arguments.after), []
    campaigns = [Campaign(CASES[name], arguments) for name in names]
    if arguments.compile:
        for campaign in campaigns:
            campaign.compile()
        compiled = [campaign.result() for campaign in campaigns]
        CONSOLE.print(compiled)
        return int(not all(result["passed"] for result in compiled))
    for campaign in campaigns:
        name = campaign.case.name
        if campaign.why is not None:
            results.append({"case": name, "skipped": campaign.why, "passed": True})
        else:
            results.append(campaign.run(arguments.seconds, before.pop(name, None)))
        CONSOLE.print(_result_line(results[-1]), highlight=False, markup=False)
        # Written anew after each: a run that is cut off keeps what it has.
        finish(arguments, {"results": [*results, *before.values()]})
    _print(results)
    return int(not all(result["passed"] for result in results))


def _before(file: Path | None) -> dict[str, Data]:
    """Return what an earlier run has of each backend; nothing of one that did nothing."""
    if file is None:
        return {}
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    return {result["case"]: result for result in results if "scenes" in result}


def _result_line(result: Data) -> str:
    if "skipped" in result or "broke" in result:
        return f"{result['case']}: {result.get('skipped') or '; '.join(result['broke'])}"
    findings = "\n".join(f"{each['message']}\n{each['command']}" for each in result.get("findings", ()))
    return f"{result['case']}: {'passed' if result['passed'] else findings}"


def _print(results: Sequence[Data]) -> None:
    summary = table("Conformance", "backend", "scenes", "steps", "forwards", "attacks", "findings", "s")
    for result in results:
        if "scenes" in result:
            summary.add_row(
                result["case"],
                f"{result['scenes']:,}",
                f"{sum(result['steps'].values()):,}",
                f"{sum(each['count'] for each in result['forwards']):,}",
                str(len(result["audited"])),
                str(len(result["findings"])),
                f"{result['wall_seconds']:.0f}",
            )
    CONSOLE.print(summary)


if __name__ == "__main__":
    sys.exit(main())
