r"""Real vLLM on two GPUs under a plan: every worker captures and dispatches what the plan says, and how fast it is.

    python benchmarks/vllm_ranks.py --seconds 280 --output vllm_ranks.json

Two groups. ``tensor``: tensor_parallel_size 2 with an EAGLE-3 head, K = 3 (Qwen3-0.6B's shape). ``data``:
data_parallel_size 2 with the same head on a mixture of experts, whose ranks agree in each step; where vLLM's kernels
for experts are not installed, on the dense shape, which vLLM is told to treat as one: the result says so. Each group
runs under a plan, and with flags alone; both are alive at once and serve by turns. Weights are random, acceptance is
synthetic.

``refusal``: a start in which worker 1 has another plan; it must end in an error that names both workers, not in a hang.

From the observation of each worker: its graphs are the plan's entries in order, its dispatcher answers each decode as
ours, each step ran on the planned entry, and data-parallel ranks ran the same in each step, also where one is idle.

Needs two CUDA GPUs, vLLM 0.33, and this repository's distributions installed where vLLM finds its plugins. NVLink
multicast stays off. The JSON is written after each engine and each round; processes are ended with their children.
Exit code 1 where something does not hold, or an engine broke.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, ROOT, finish, parser, verdict
from _model_configs import write_configs
from _observations import newest
from _rank_checks import agreement_findings, answer_findings, capture_findings, step_findings, worker_figures
from _vllm_cases import EAGLE, REQUESTS, server_spec, under_plan
from rich.markup import escape

from capture_planner.codec import dumps, load_environment
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.observation import Observation
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Parallel, Policy, Roles, Sizes

WORKER = Path(__file__).with_name("_vllm_ranks_worker.py")
GPUS = 2
OBSERVE_SECONDS = 1.0
SINGLE_HOST = {
    **dict.fromkeys(("NCCL_NVLS_ENABLE", "VLLM_ALLREDUCE_USE_SYMM_MEM"), "0"),
    **dict.fromkeys(("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"), "1"),
    # The engine of the API server has its cores in processes of their own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
}
SHARES = {"tensor": 2, "data": 2, "refusal": 1}
"""Of the time of all groups."""
LOADS = {
    "tensor": ([8], [100], [200]),
    # One number for each rank: alike, different, and one rank idle.
    "data": ([100, 100], [3, 60], [0, 40]),
}


@attrs.frozen(kw_only=True)
class RankCase:
    """One engine: the words of ``vllm serve``, the plan that it runs under, and what its processes find set."""

    name: str
    words: tuple[str, ...]
    plan: Plan | None = None
    variables: Mapping[str, str] = attrs.field(factory=dict)


class RankEngine:
    """The processes of one case; a context manager that ends them, their children included."""

    def __init__(self, case: RankCase, folder: Path, until: float) -> None:
        self.case, self._until = case, until
        slug = case.name.replace(",", "").replace(" ", "-")
        self.observations = folder / f"observations-{slug}"
        environment = {**os.environ, **SINGLE_HOST, **case.variables}
        environment.pop("VLLM_USE_NCCL_SYMM_MEM", None)
        environment |= {
            "CAPTURE_PLANNER_OBSERVE": str(self.observations),
            "CAPTURE_PLANNER_OBSERVE_SECONDS": str(OBSERVE_SECONDS),
        }
        words, planned = under_plan(case.plan, case.words, folder / f"{slug}.yaml")
        environment |= planned
        self._log = (folder / f"{slug}.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), "--", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def __enter__(self) -> RankEngine:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=8)
        # vLLM's workers may outlive their engine; all of them are in the session that was begun for it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def answer(self, request: Mapping[str, Any], most: float) -> dict[str, Any]:
        """Send a request and return the answer; raises ``RuntimeError`` where none came in so many seconds."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=max(0.1, min(most, self._until - time.monotonic())))
        except queue.Empty:
            line = ""
        if not line:
            self._log.flush()
            text = Path(self._log.name).read_text("utf-8", errors="replace").splitlines()
            wrong = [each for each in text if "Error" in each or "error" in each]
            state = self._process.poll()
            ended = f"ended with {state}" if state is not None else "did not answer in time"
            raise RuntimeError("\n".join([f"{self.case.name} {ended}", *wrong[:12], "...", *text[-15:]]))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def workers(self) -> list[Observation]:
        """Return what each worker has seen, after their next write."""
        time.sleep(2.5 * OBSERVE_SECONDS)
        return newest(self.observations) if self.observations.exists() else []


def rank_plan(shape: str, parallel: Parallel) -> Plan:
    """Return the plan of a server of 256 requests on H200s: 45 graphs."""
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=REQUESTS)
    spec = server_spec(shape, sizes, GraphMode.FULL_DECODE_ONLY, EAGLE, "flash_attention", Roles(), parallel=parallel)
    environment = load_environment(ROOT / "plans" / "environments" / "h200.yaml")
    return make_plan(spec, environment, registry.load_backends())


def rank_cases(group: str, folder: Path, utilization: float) -> Iterator[RankCase]:
    """Yield a group's engine under a plan, and with flags alone; ``folder`` has the models' folders."""
    found = importlib.util.find_spec("vllm")
    folders = found.submodule_search_locations or () if found is not None else ()
    experts = any(list(Path(each).glob("_moe_C*")) for each in folders)
    shape = "small" if group == "tensor" or not experts else "mixture"
    drafter = {
        "method": "eagle3",
        "model": str(folder / f"{shape}-drafter"),
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.5,
    }
    words = (
        *("--model", str(folder / shape), "--load-format", "dummy", "--skip-tokenizer-init", "--seed", "0"),
        *("--max-model-len", "4096", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192"),
        *("--gpu-memory-utilization", str(utilization), "--speculative-config", json.dumps(drafter)),
        *("--compilation-config", json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"})),
        *(f"--{group}-parallel-size", str(GPUS)),
    )
    variables = {} if shape == "mixture" or group == "tensor" else {"CAPTURE_PLANNER_BENCHMARK_AS_MIXTURE": "1"}
    parallel = Parallel(tensor=GPUS) if group == "tensor" else Parallel(data=GPUS)
    yield RankCase(name=f"{group}, plan", words=words, plan=rank_plan(shape, parallel), variables=variables)
    largest = ("--max-cudagraph-capture-size", "1024")
    yield RankCase(name=f"{group}, flags", words=(*words, *largest), variables=variables)


def refusal(folder: Path, until: float) -> Iterator[tuple[dict[str, Any], dict[str, bool]]]:
    """Start one engine whose workers have different plans, and yield how it ends."""
    place = folder / "refusal"
    place.mkdir(parents=True, exist_ok=True)
    (case, _) = rank_cases("tensor", folder, 0.3)
    assert case.plan is not None
    roles = tuple(replace(role, entries=role.entries[1:]) for role in case.plan.roles)
    other = place / "other.yaml"
    other.write_text(dumps(replace(case.plan, roles=roles)), encoding="utf-8")
    case = attrs.evolve(case, name="refusal", variables={"CAPTURE_PLANNER_BENCHMARK_OTHER_PLAN": str(other)})
    began = time.monotonic()
    with RankEngine(case, place, until) as engine:
        try:
            engine.answer({}, 120)
            error = "it started"
        except RuntimeError as raised:
            error = str(raised)
    seconds = round(time.monotonic() - began, 1)
    log = (place / "refusal.log").read_text("utf-8", errors="replace")
    lines = [line for line in log.splitlines() if "would capture different graphs" in line]
    named = bool(lines) and "worker 0:" in lines[0] and "worker 1:" in lines[0]
    text = f"refusal: workers with different plans end in a named error ({seconds} s from the start)"
    yield {"error": error[-2000:], "lines": lines[:4], "seconds": seconds}, {text: named}


def measure(
    group: str, folder: Path, until: float, rounds: int, utilization: float
) -> Iterator[tuple[dict[str, Any], dict[str, bool]]]:
    """Start the engines of a group in turn, let them serve by turns, and yield results and targets after each part."""
    place = folder / group
    place.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    targets: dict[str, bool] = {}
    with ExitStack() as stack:
        cases = list(rank_cases(group, folder, utilization))
        started = [stack.enter_context(RankEngine(case, place, until)) for case in cases]  # they import at once
        engines = []
        for engine in started:
            name = engine.case.name
            try:
                facts = engine.answer({}, 150)["facts"]
                for load in LOADS[group]:  # the first steps of a size compile kernels
                    engine.answer({"requests": load, "prompt": 128, "output": 8}, 60)
            except RuntimeError as error:
                CONSOLE.print(str(error), markup=False)
                results[name] = {"error": str(error)[-4000:]}
                targets[f"{name}: starts and serves"] = False
                yield results, targets
                continue
            CONSOLE.print(f"{name}: {facts}", markup=False)
            results[name] = {"facts": facts | dict(engine.case.variables), "rounds": []}
            engines.append(engine)
            yield results, targets
        for turn in range(rounds):
            for load in LOADS[group]:
                for engine in engines[turn % 2 :] + engines[: turn % 2]:
                    if time.monotonic() > until - 12:
                        break
                    try:
                        row = engine.answer({"requests": load, "prompt": 128, "output": 128}, 40)
                    except RuntimeError as error:
                        CONSOLE.print(str(error), markup=False)
                        results[engine.case.name]["error"] = str(error)[-4000:]
                        targets[f"{engine.case.name}: serves {load}"] = False
                        yield results, targets
                        return
                    results[engine.case.name]["rounds"].append({"round": turn} | row)
            yield results, targets
        for engine in engines:
            seen = engine.workers()
            results[engine.case.name]["workers"] = [worker_figures(each) for each in seen]
            targets |= _targets(engine.case, seen)
            yield results, targets
    targets |= _speeds(group, results)
    yield results, targets


def _targets(case: RankCase, seen: Sequence[Observation]) -> dict[str, bool]:
    found = {f"{case.name}: {len(seen)} workers observed": len(seen) == GPUS}
    if len(seen) != GPUS:
        return found
    if case.name.startswith("data"):
        found |= {f"{case.name}: {text}": holds for text, holds in agreement_findings(seen)}
    if case.plan is not None:
        checks = [*capture_findings(case.plan, seen), *answer_findings(case.plan, seen)]
        if case.name.startswith("tensor"):
            checks += step_findings(case.plan, seen)
        found |= {f"{case.name}: {text}": holds for text, holds in checks}
    return found


def _speeds(group: str, results: dict[str, Any]) -> dict[str, bool]:
    """Return whether the plan is as fast as flags, load by load, by medians of the rounds, which vary by a tenth."""
    found = {}
    for load in LOADS[group]:
        speeds = []
        for name in (f"{group}, plan", f"{group}, flags"):
            rows = [
                row["tokens_per_second"] for row in results.get(name, {}).get("rounds", ()) if row["requests"] == load
            ]
            speeds.append(statistics.median(rows) if rows else 0.0)
        if all(speeds):
            ratio = speeds[0] / speeds[1]
            text = f"{group}: {load} requests, plan {speeds[0]:,.0f} tokens/s, flags {speeds[1]:,.0f} ({ratio:.3f})"
            found[text] = ratio >= 0.95
    return found


def main() -> int:
    """Measure, print and write; exit code 1 where something does not hold."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=280.0, help="all together")
    options.add_argument("--groups", nargs="*", default=[*LOADS, "refusal"], choices=[*LOADS, "refusal"])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--utilization", type=float, default=0.3, help="of each GPU's memory, for each engine")
    options.add_argument("--folder", type=Path, help="for logs, plans and observations; default: a temporary one")
    arguments = options.parse_args()
    began = time.monotonic()
    results: dict[str, Any] = {}
    targets: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        write_configs(folder)
        for number, group in enumerate(arguments.groups, 1):
            # What one group leaves, the next ones have; a start alone takes a fifth of it.
            share = sum(SHARES[each] for each in arguments.groups[:number])
            until = began + arguments.seconds * share / sum(SHARES[each] for each in arguments.groups)
            parts = (
                refusal(folder, until)
                if group == "refusal"
                else measure(group, folder, until, arguments.rounds, arguments.utilization)
            )
            for part, holds in parts:
                results[group] = part
                targets |= holds
                finish(arguments, {"results": results, "targets": targets, "seconds": round(time.monotonic() - began)})
    # What comes last is what a cut-off output keeps.
    for engine in (each for part in results.values() for each in part.values() if isinstance(each, dict)):
        if "error" in engine:
            CONSOLE.print(engine["error"][-1500:], markup=False)
    for text, met in sorted(targets.items(), key=lambda item: not item[1]):
        CONSOLE.print(f"{verdict(met)} {escape(text)}")
    return 0 if targets and all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
