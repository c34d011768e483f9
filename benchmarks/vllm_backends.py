r"""vLLM's own attention backends in the conformance suite, on all GPUs that are visible. Needs vLLM 0.33.

    python benchmarks/vllm_backends.py --jobs 16 --seconds 500 --output
    python benchmarks/vllm_backends.py --case '{...}' --backends vllm_flash_attn      # a finding again

``vllm_flash_attn`` and ``vllm_triton_attn`` call the metadata builders and kernels of FLASH_ATTN and TRITON_ATTN. For
each, the audits of declared fields, then ``--examples`` scenes, in portions that are processes of their own, so that an
illegal access ends no other; the processes are spread over the GPUs. A finding ends its portion alone; one of the first
portion is minimized. At last a few scenes as vLLM's runner has them, ``NAME as is``, which is expected to have a
finding: rows that no request owns are not filled with zeros (vllm#57136), and replays built with the batch's maxima.

Several processes on one GPU need CUDA's multi-process service: ``nvidia-cuda-mps-control -d``. What is done is written
after each portion. Exit code 1 where something was found in a backend, or broke.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context

# Read when vLLM is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_PLUGINS", "")
# Read when a kernel is compiled: Triton multiplies float32 in TF32 otherwise, off by 1e-3, and the suite allows 1e-4.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

import torch
from _bench import CONSOLE, finish, parser
from _deployments import Case, missing

from capture_planner.conformance import Log, SearchProfile, Subject, SuiteOptions, SuiteResult, conform, under_test
from capture_planner.conformance.audit import audit
from capture_planner.conformance.shapes import usable_shapes
from capture_planner.conformance.suite import DRAFTS, THOROUGH, replay
from capture_planner.errors import CapturePlannerError
from capture_planner.records.model import DataType
from capture_planner.report.conformance_record import Conformance
from capture_planner.report.plain import plain
from capture_planner.runtime.host import facts, this_environment
from capture_planner_vllm.attention_backend import VllmAttention
from conformance import Data, added, show

ENGINES = {"vllm_flash_attn": "FLASH_ATTN", "vllm_triton_attn": "TRITON_ATTN"}
AS_IS = " as is"
PORTION = 30
"""Scenes of one process: it takes some 20 s to start."""
AS_IS_SCENES = 10


def subject(name: str) -> Subject:
    """Return the backend of a case, planned for this machine."""
    torch.set_num_threads(1)
    ours = not name.endswith(AS_IS)
    return under_test(
        VllmAttention(ENGINES[name.removesuffix(AS_IS)], zeroes=ours, frozen=ours), environment=this_environment("here")
    )


def report(name: str, under: Subject, profile: SearchProfile, seed: int, outcome: SuiteResult) -> Data:
    """Return one process's part as data; its commands are this script's."""
    implementation = under.registry[under.backend]
    data: Data = plain(
        Conformance(
            backend=under.backend,
            distribution="capture-planner-vllm",
            version=implementation.version,
            environment=under.environment,
            host=facts(),
            seed=seed,
            profile=profile,
            drafts=DRAFTS,
            base=("python", "benchmarks/vllm_backends.py", "--backends", name),
            outcome=outcome,
        )
    )
    return data


def search(name: str, seed: int, profile: SearchProfile, minimize: bool) -> Data:
    """Run a portion of scenes, up to its first finding."""
    under = subject(name)
    options = SuiteOptions(profile=profile, seed=seed, audits=False, shrink=minimize, blame=minimize)
    return report(name, under, profile, seed, conform(under, options))


def attack(name: str, seed: int, profile: SearchProfile, minimize: bool) -> Data:
    """Run the audits of the declared fields."""
    under, began = subject(name), time.perf_counter()
    shapes, refused = usable_shapes(under)
    outcome = SuiteResult(
        shapes=shapes,
        refused=refused,
        log=Log(),
        audited=audit(under, shapes, seed=seed),
        seconds=time.perf_counter() - began,
    )
    return report(name, under, profile, seed, outcome)


def see_one(device: str) -> None:
    """Let this process see one GPU; called before it uses any."""
    os.environ["CUDA_VISIBLE_DEVICES"] = device


def alone(device: str, act: Callable[..., Data], *rest: object) -> Data:
    """Do one thing in a process of its own, on one GPU."""
    with ProcessPoolExecutor(1, get_context("spawn"), see_one, (device,)) as pool:
        return pool.submit(act, *rest).result()


def devices() -> list[str]:
    """Return the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


class BackendCampaign:
    """One case: its portions, and what came of them so far."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self._arguments, self._began = name, arguments, time.perf_counter()
        self._parts: list[Data] = []
        self._broke: list[str] = []

    def tasks(self) -> Iterator[tuple[Callable[..., Data], int, SearchProfile]]:
        """Yield what is to do: the audits, and the scenes in portions, each with a seed of its own."""
        given = self._arguments
        if self.name.endswith(AS_IS):
            yield search, given.seed, SearchProfile(name="as is", examples=AS_IS_SCENES, steps=given.steps)
            return
        if given.audits:
            yield attack, given.seed, SearchProfile(name="audits", examples=0, steps=0)
        for number, first in enumerate(range(0, given.examples, PORTION)):
            examples = min(PORTION, given.examples - first)
            yield search, given.seed + number, SearchProfile(name="thorough", examples=examples, steps=given.steps)

    def run(self, until: float) -> Iterator[Data]:
        """Run the tasks, and yield the result so far after each; none begins after ``until``."""
        visible = devices()

        def work(number: int, act: Callable[..., Data], seed: int, profile: SearchProfile) -> None:
            if time.time() > until:
                return
            # Minimizing takes minutes: the first portion's finding is, others are kept as they were found.
            minimize = number <= 1 and not any(part["findings"] for part in self._parts)
            self._parts.append(alone(visible[number % len(visible)], act, self.name, seed, profile, minimize))

        with ThreadPoolExecutor(self._arguments.jobs) as threads:
            futures = [threads.submit(work, number, *task) for number, task in enumerate(self.tasks())]
            for future in as_completed(futures):
                try:
                    future.result()
                except Exception as error:
                    self._broke.append(f"{type(error).__name__}: {error}")
                yield self.result()

    def result(self) -> Data:
        """Return what all parts did together."""
        merged = added(tuple(self._parts)) if self._parts else {"passed": True, "scenes": 0, "findings": []}
        took = round(time.perf_counter() - self._began, 1)
        broke: Data = {"broke": self._broke, "passed": False} if self._broke else {}
        return {"case": self.name, **merged, **broke, "wall_seconds": took}


def main() -> int:
    """Run, print and write; exit code 1 where a backend has a finding, or a process broke."""
    options = parser(__doc__)
    options.add_argument("--backends", nargs="*", default=[*ENGINES, *(name + AS_IS for name in ENGINES)])
    options.add_argument("--examples", type=int, default=THOROUGH.examples, help="scenes of each backend")
    options.add_argument("--steps", type=int, default=THOROUGH.steps, help="most steps of a scene")
    options.add_argument("--seed", type=int, default=0, help="of the first portion; the next has one more")
    options.add_argument("--jobs", type=int, default=1, help="processes at once, over all GPUs")
    options.add_argument("--seconds", type=float, default=1e9, help="of all: begin no portion after so many")
    options.add_argument("--no-audits", dest="audits", action="store_false", help="leave out the audits")
    options.add_argument("--case", help="a finding's case, which is done again")
    arguments = options.parse_args()
    arguments.backends = _named(arguments.backends)
    if arguments.case is not None:
        return _again(arguments)
    results: list[Data] = []
    until = time.time() + arguments.seconds
    for number, name in enumerate(arguments.backends):
        why = _missing(name)
        campaign, results = BackendCampaign(name, arguments), [*results, {"case": name, "skipped": why, "passed": True}]
        if why is None:
            # Each has its share of the time that is left; a few scenes as they are take little.
            left = sum(not other.endswith(AS_IS) for other in arguments.backends[number:])
            for result in campaign.run(time.time() + (until - time.time()) / left if left else until + 60):
                results[-1] = result
                finish(arguments, {"results": results})
        CONSOLE.print(_line(results[-1]), highlight=False, markup=False)
        finish(arguments, {"results": results})
    show("vLLM's attention backends", [each for each in results if each.get("forwards")])
    return int(not all(each["passed"] for each in results if not each["case"].endswith(AS_IS)))


def _named(words: Sequence[str]) -> list[str]:
    """Return the cases; in a shell, ``NAME as is`` need not be quoted."""
    text = " ".join(words).replace(AS_IS, AS_IS.replace(" ", "\0"))
    names = [word.replace("\0", " ") for word in text.split()]
    wrong = [name for name in names if name.removesuffix(AS_IS) not in ENGINES]
    if wrong:
        raise SystemExit(f"--backends {' '.join(wrong)}: expected {', '.join(ENGINES)}, each also with{AS_IS}")
    return names


def _missing(name: str) -> str | None:
    case = Case(name=name, backend=name.removesuffix(AS_IS), dtypes=(DataType.BFLOAT16,), page_sizes=(16,))
    return missing(case, torch.device("cuda"))


def _again(arguments: argparse.Namespace) -> int:
    try:
        outcome = replay(subject(arguments.backends[0]), arguments.case)
    except CapturePlannerError as error:
        raise SystemExit(str(error)) from None
    CONSOLE.print(str(outcome.failure or "passed"), highlight=False, markup=False)
    return int(outcome.failure is not None)


def _line(result: Data) -> str:
    if "skipped" in result:
        return f"{result['case']}: {result['skipped']}"
    found = [f"{each['check']}: {each['message']}\n  {each['command']}" for each in result["findings"]]
    return "\n".join([f"{result['case']}: {result['scenes']} scenes", *found, *result.get("broke", ())])


if __name__ == "__main__":
    sys.exit(main())
