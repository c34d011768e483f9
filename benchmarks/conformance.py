r"""The conformance suite on a GPU: backends at a thorough profile.

    python benchmarks/conformance.py --output
    python benchmarks/conformance.py --after FILE   # go on where another run ended, and add to what it has

The scenes of a backend are done in portions, each with a seed of its own: what they tried is added up, and
what they found is kept with the command that shows it again. The audits of declared fields come first. All
backends run at once in ``--jobs`` processes on one GPU; a process has one backend at a time, so that an illegal
access ends no other. Processes share a GPU well through CUDA's multi-process service
(``nvidia-cuda-mps-control -d``): eight that did made 17 scenes a second on an H100, one alone 2 to 5, and six
that took turns without it fewer than one. Results are written every few seconds, and again at the end.
``--device cpu`` has the reference backend with recorded graphs. Exit code 1 where something was found, or broke.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from _bench import CONSOLE, finish, parser, print_table
from _deployments import CASES, Case, environment, missing

from capture_planner.report.plain import plain
from capture_planner_conformance import (
    Log,
    SearchProfile,
    Shape,
    Subject,
    SuiteOptions,
    SuiteResult,
    conform,
    under_test,
    usable_shapes,
)
from capture_planner_conformance.audits import audit
from capture_planner_conformance.report import Conformance
from capture_planner_conformance.shapes import KERNELS
from capture_planner_conformance.suite import DRAFTS, THOROUGH
from capture_planner_runner.host import facts

Data = dict[str, Any]
PORTION = 20
"""Scenes of one seed: the clock is looked at between two portions."""
EVERY = 15
"""Seconds between two writings of the results."""

NAMES = ("flash_attention", "flashinfer", "flashinfer_wrappers", "triton")


def shapes_of(case: Case) -> tuple[Shape, ...]:
    """Return the shapes that are asked for; empty: those that the backend runs."""
    # FlashInfer compiles kernels for each head size, page size and query length.
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


def search(name: str, device: str, share: float, seed: int, profile: SearchProfile) -> Data:
    """Run one portion of the scenes of one backend with a share of the GPU's memory."""
    if device == "cuda":
        # Without a limit, the caches of some processes leave none for the others.
        torch.cuda.set_per_process_memory_fraction(share)
        torch.cuda.empty_cache()
    case, under = CASES[name], on(CASES[name], device)
    choices = SuiteOptions(profile=profile, seed=seed, shapes=shapes_of(case), audits=False)
    return report(case, under, profile, seed, conform(under, choices))


def attack(name: str, device: str, seed: int) -> Data:
    """Run the audits of one backend."""
    case = CASES[name]
    under, began = on(case, device), time.perf_counter()
    shapes, refused = usable_shapes(under, shapes_of(case))
    audited = audit(under, shapes, seed=seed)
    took = time.perf_counter() - began
    outcome = SuiteResult(shapes=shapes, refused=refused, log=Log(), failures=(), audited=audited, seconds=took)
    return report(case, under, SearchProfile(name="audits", examples=0, steps=0), seed, outcome)


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


class Slot:
    """One process at a time, for portions of one backend.

    It is spawned, since a process that has used CUDA cannot be forked, and has one backend in its life: after an
    illegal access nothing more can be run in one.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._name = ""

    def submit(self, act: Callable[..., Any], name: str, *rest: object) -> Future[Any]:
        """Run ``act(name, ...)`` in the process, or in a new one if that had another backend."""
        if self._pool is None or name != self._name:
            self.end()
            self._pool, self._name = ProcessPoolExecutor(1, mp_context=get_context("spawn")), name
        return self._pool.submit(act, name, *rest)

    def end(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None


class Campaign:
    """What is to be done for one backend, and what was."""

    def __init__(self, case: Case, arguments: argparse.Namespace, before: Data | None) -> None:
        self.case, self._arguments = case, arguments
        self.why = missing(case, torch.device(arguments.device))
        self._parts = [] if before is None else [before]
        self._share = 0.9 / arguments.jobs
        self._broke: list[str] = []
        self._began = time.perf_counter()
        seed = arguments.seed if before is None else 1 + max(before["seeds"], default=arguments.seed - 1)
        examples = arguments.examples - (0 if before is None else before["scenes"])
        self._audits = before is None or not before["audited"]
        self._portions = [] if self.why else list(enumerate(portions(max(examples, 0)), seed))

    @property
    def left(self) -> bool:
        """Whether something is to be done yet; after a finding, nothing more is."""
        return not self.why and (self._audits or bool(self._portions)) and self._passed

    @property
    def _passed(self) -> bool:
        return not self._broke and all(part["passed"] for part in self._parts)

    def next(self, slot: Slot) -> Future[Any]:
        """Begin the audits, or else the next portion."""
        name, device = self.case.name, self._arguments.device
        if self._audits:
            self._audits = False
            return slot.submit(attack, name, device, self._arguments.seed)
        seed, examples = self._portions.pop(0)
        profile = SearchProfile(name="thorough", examples=examples, steps=self._arguments.steps)
        return slot.submit(search, name, device, self._share, seed, profile)

    def add(self, done: Future[Any]) -> None:
        """Take the result of a portion, or how it broke."""
        try:
            self._parts.append(done.result())
        except Exception as error:
            traceback.print_exception(error)
            self._broke.append(f"{type(error).__name__}: {error}")

    def result(self) -> Data:
        """Return what came of all parts so far."""
        if self.why:
            return {"case": self.case.name, "skipped": self.why, "passed": True}
        merged = added(self._parts) if self._parts else {}
        took = {"wall_seconds": round(time.perf_counter() - self._began, 1)}
        broke = {"broke": self._broke} if self._broke else {}
        return {"case": self.case.name, **merged, **took, **broke, "passed": self._passed}


def portions(examples: int) -> list[int]:
    """Return the scenes of each portion."""
    whole, rest = divmod(examples, PORTION)
    return [PORTION] * whole + ([rest] if rest else [])


def run_all(campaigns: Sequence[Campaign], arguments: argparse.Namespace, write: Callable[[], None]) -> None:
    """Run portions of all backends, one for each job at a time, until the time is over or all is done."""
    slots = [Slot() for _ in range(arguments.jobs)]
    until, written = time.perf_counter() + arguments.seconds, time.perf_counter()
    running: dict[Future[Any], tuple[Campaign, Slot]] = {}

    def begin(slot: Slot, preferred: Sequence[Campaign]) -> None:
        campaign = next((each for each in preferred if each.left), None)
        if campaign is not None and time.perf_counter() < until:
            running[campaign.next(slot)] = campaign, slot

    try:
        for number, slot in enumerate(slots):
            first = number % len(campaigns)
            begin(slot, (*campaigns[first:], *campaigns[:first]))
        while running:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                campaign, slot = running.pop(done)
                campaign.add(done)
                # A process keeps its backend as long as there is work for it.
                begin(slot, (campaign, *campaigns))
            if time.perf_counter() - written > EVERY:
                write()
                written = time.perf_counter()
    finally:
        write()
        for slot in slots:
            slot.end()


def main() -> int:
    """Run, print and write; exit code 1 where something was found, or broke."""
    options = parser(__doc__)
    options.add_argument("--backends", nargs="*", choices=list(CASES))
    options.add_argument("--examples", type=int, default=THOROUGH.examples, help="scenes of each backend")
    options.add_argument("--steps", type=int, default=THOROUGH.steps, help="most steps of a scene")
    options.add_argument("--seed", type=int, default=0, help="of the first portion; the next has one more")
    options.add_argument("--jobs", type=int, default=1, help="processes at once, over all backends")
    options.add_argument("--after", type=Path, help="results to go on from")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--seconds", type=float, default=1e9, help="begin no portion of scenes after so many")
    arguments = options.parse_args()
    names = arguments.backends or (NAMES if arguments.device == "cuda" else ("reference",))
    before = _before(arguments.after)
    campaigns = [Campaign(CASES[name], arguments, before.pop(name, None)) for name in names]
    results: list[Data] = []

    def write() -> None:
        # Again and again: a run that is cut off keeps what it has.
        results[:] = [campaign.result() for campaign in campaigns]
        CONSOLE.print(", ".join(f"{result['case']}: {result.get('scenes', 0):,} scenes" for result in results))
        finish(arguments, {"results": [*results, *before.values()]})

    run_all(campaigns, arguments, write)
    for result in results:
        CONSOLE.print(_result_line(result), highlight=False, markup=False)
    show("Conformance", results)
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


def show(title: str, results: Sequence[Data]) -> None:
    """Print what each backend was put through, of those whose scenes were run."""
    rows = (
        (
            result["case"],
            f"{result['scenes']:,}",
            f"{sum(result['steps'].values()):,}",
            f"{sum(each['count'] for each in result['forwards']):,}",
            len(result["audited"]),
            len(result["findings"]),
            f"{result['wall_seconds']:.0f}",
        )
        for result in results
        if "scenes" in result
    )
    print_table(title, ("backend", "scenes", "steps", "forwards", "attacks", "findings", "s"), rows)


if __name__ == "__main__":
    sys.exit(main())
