"""Real starts of vLLM under random plans: none fails that vLLM alone survives, and tokens are those of eager steps.

Each seed stands for a plan, flags and about 20 greedy requests of a tiny model (``_vllm_starts.py``): all modes, with
torch.compile or breakable graphs, K from 0 to 5, dynamic K, LoRA, other sizes for the drafter than for the target, and
sizes above and below the limits. Several engines start at once, each in a fork of one process that has imported vLLM.
A start that fails is tried once more, and then without its plan: it is a crash where vLLM alone survives, and does not
count where it does not. At the end one eager engine for each kind of start serves the same requests. A start whose
tokens differ runs by vLLM alone, too, and counts where vLLM alone agrees with eager steps.

Needs a CUDA GPU, vLLM 0.33, and this repository's distributions installed. ``--case SEED`` repeats one start here.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from _bench import CONSOLE, conclude, parser, print_table
from _vllm_starts import compare_kind, run_start, start_of, write_models

LIMIT = 240.0
"""Seconds after which a process is ended."""
ATTEMPTS = ("planned", "again", "alone")
EAGER, CONTROL = "eager", "control"
"""The eager engine of starts under their plans, and of the same starts by vLLM alone."""


@attrs.frozen(kw_only=True)
class Task:
    """One process: a start, or the eager engine of some."""

    name: str
    seeds: tuple[int, ...]
    attempt: str
    """One of ``ATTEMPTS``, ``EAGER`` or ``CONTROL``."""
    number: int = 0
    """Of the processes, for a port of its own."""


@attrs.define
class Running:
    """A process that runs a task."""

    task: Task
    pid: int
    began: float
    ended: bool = False


class Processes:
    """Runs tasks in processes, several at once; each writes its answer to a file."""

    def __init__(self, folder: Path, jobs: int, run: Callable[[Task, Path], None]) -> None:
        """Run nothing yet; ``run`` runs a task in a fork of this process."""
        self._folder, self._jobs, self._run = folder, jobs, run
        self._running: list[Running] = []
        self._started = 0

    @property
    def is_full(self) -> bool:
        return len(self._running) >= self._jobs

    @property
    def is_idle(self) -> bool:
        return not self._running

    def begin(self, task: Task) -> None:
        """Start a process for a task."""
        self._started += 1
        task = attrs.evolve(task, number=self._started)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _child(task, self._folder, self._run)
        self._running.append(Running(task=task, pid=pid, began=time.perf_counter()))

    def ended(self) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Yield the tasks that have ended, with their answers; ``error`` is the end of the log of one that failed."""
        for each in list(self._running):
            pid, _ = os.waitpid(each.pid, os.WNOHANG)
            if pid == 0 and time.perf_counter() - each.began > LIMIT:
                os.kill(each.pid, signal.SIGKILL)
                os.waitpid(each.pid, 0)
                pid = each.pid
            if pid:
                self._running.remove(each)
                yield each.task, self._answer(each.task)

    def stop(self) -> None:
        """End what runs."""
        for each in self._running:
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
        self._running.clear()

    def _answer(self, task: Task) -> dict[str, Any]:
        path = answer_of(self._folder, task)
        if path.exists():
            answer: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return answer
        lines = log_of(self._folder, task).read_text("utf-8", errors="replace").splitlines()
        return {"error": _reason(lines), "log": lines[-25:]}


def log_of(folder: Path, task: Task) -> Path:
    """Return where a task's process writes its log."""
    return folder / f"{task.name}-{task.attempt}.log"


def answer_of(folder: Path, task: Task) -> Path:
    """Return where a task's process writes its answer, once it has ended well."""
    return folder / f"{task.name}-{task.attempt}.json"


def _reason(lines: Sequence[str]) -> str:
    """Return the last line of a log that names an exception, or the last line."""
    named = [line.strip() for line in lines if "Error" in line.partition(":")[0] and not line.startswith(" ")]
    return (named or [line for line in lines if line.strip()] or ["no log"])[-1][:300]


def _child(task: Task, folder: Path, run: Callable[[Task, Path], None]) -> None:
    """Run a task in a fork, and end the fork."""
    code = 1
    try:
        sys.stdout = sys.stderr = log_of(folder, task).open("w", buffering=1, encoding="utf-8")
        for stream in (1, 2):
            os.dup2(sys.stdout.fileno(), stream)
        run(task, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # without the ends of libraries, which wait for each other


IMPORTED = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils",
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama_eagle3",
    "vllm.lora.worker_manager",
    "vllm.lora.request",
)
"""What every start needs; forks have it already."""
COMPARING = 160.0
"""Seconds that are kept for the eager engines."""


def run_task(task: Task, folder: Path) -> None:
    """Run a task in this process, and write its answer."""
    os.environ["VLLM_PORT"] = str(20000 + task.number * 16 % 20000)
    if task.attempt in (EAGER, CONTROL):
        outputs = {
            seed: json.loads(_tokens_file(folder, seed, alone=task.attempt == CONTROL).read_text("utf-8"))
            for seed in task.seeds
        }
        found = compare_kind([start_of(seed) for seed in task.seeds], outputs, folder)
    else:
        (seed,) = task.seeds
        alone = task.attempt == "alone"
        found = run_start(start_of(seed), folder, planned=not alone)
        _tokens_file(folder, seed, alone=alone).write_text(json.dumps(found.pop("tokens")), "utf-8")
    path = answer_of(folder, task)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found), "utf-8")
    part.rename(path)


def _tokens_file(folder: Path, seed: int, *, alone: bool) -> Path:
    return folder / f"tokens-{seed}{'-alone' if alone else ''}.json"


def prepare(folder: Path) -> None:
    """Set what every start needs, and import vLLM for the forks."""
    write_models(folder)
    defaults = {
        "VLLM_CACHE_ROOT": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    began = time.perf_counter()
    for name in IMPORTED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            CONSOLE.print(f"{name} is not imported before the forks: {error}", markup=False)
    if importlib.import_module("torch").cuda.is_initialized():
        raise SystemExit("importing vLLM has initialised CUDA, which no fork can use then")
    CONSOLE.print(f"imported in {time.perf_counter() - began:.0f} s")


@attrs.define
class Campaign:
    """What came out so far."""

    rows: dict[int, dict[str, Any]] = attrs.field(factory=dict)
    """Starts that count, by seed."""
    crashes: list[dict[str, Any]] = attrs.field(factory=list)
    refused: list[dict[str, Any]] = attrs.field(factory=list)
    """Starts that vLLM alone does not survive either."""
    recovered: list[dict[str, Any]] = attrs.field(factory=list)
    """Starts that failed once, and did not when tried again."""
    errors: dict[int, dict[str, Any]] = attrs.field(factory=dict)

    def take(self, task: Task, answer: dict[str, Any]) -> Task | None:
        """Take an answer, and return the task that follows from it."""
        (seed,) = task.seeds
        failed = "error" in answer
        if task.attempt == "alone":
            error = self.errors[seed]
            listed = self.refused if failed else self.crashes
            listed.append({"seed": seed, "under_the_plan": error} | ({"alone": answer} if failed else {}))
            return None
        if failed:
            self.errors[seed] = answer
            return attrs.evolve(task, attempt=ATTEMPTS[ATTEMPTS.index(task.attempt) + 1])
        if task.attempt == "again":
            self.recovered.append({"seed": seed, **self.errors[seed]})
        self.rows[seed] = answer
        return None

    @property
    def count(self) -> int:
        """Starts that count: those that came up, and crashes."""
        return len(self.rows) + len(self.crashes)


def run_campaign(processes: Processes, first: int, starts: int, seconds: float) -> Campaign:
    """Start engines until so many count, or until the seconds are over."""
    campaign, began, shown = Campaign(), time.perf_counter(), 0.0
    waiting: list[Task] = []
    seed = first
    while True:
        for task, answer in processes.ended():
            following = campaign.take(task, answer)
            if "error" in answer:
                CONSOLE.print(f"seed {task.seeds[0]}, {task.attempt}: {answer['error']}", markup=False, soft_wrap=True)
            if following is not None:
                waiting.append(following)
        now = time.perf_counter() - began
        if now - shown > 15:
            shown = now
            CONSOLE.print(f"{now:4.0f} s: {campaign.count} starts, {len(campaign.crashes)} crashes, "
                          f"{len(campaign.refused)} that vLLM alone fails too")  # fmt: skip
        over = now > seconds
        pending = seed - first - campaign.count - len(campaign.refused)
        while not over and not processes.is_full and (waiting or campaign.count + pending < starts):
            if waiting:
                processes.begin(waiting.pop(0))
                continue
            processes.begin(Task(name=f"start-{seed}", seeds=(seed,), attempt="planned"))
            seed, pending = seed + 1, pending + 1
        if over:
            processes.stop()
        if processes.is_idle and (over or not waiting):
            return campaign
        time.sleep(0.05)


def compare(processes: Processes, campaign: Campaign, seconds: float) -> dict[str, dict[str, Any]]:
    """Return by kind of start where tokens differ from those of an eager engine.

    Starts that differ run by vLLM alone, too. Where that differs by more than a tie, it is rounding of these flags, or
    a fault of vLLM's own graphs: such requests are counted apart, with the seeds in which vLLM alone differs.
    """
    until = time.perf_counter() + seconds
    found = _answers(processes, _by_kind(campaign.rows, EAGER), until)
    seeds = {each["seed"] for answer in found.values() for each in answer.get("different", ())}
    alone = [Task(name=f"control-{seed}", seeds=(seed,), attempt="alone") for seed in sorted(seeds)]
    began = _answers(processes, alone, until)
    ran = [seed for seed in sorted(seeds) if "error" not in began.get(f"control-{seed}", {"error": "no time"})]
    for name, control in _answers(processes, _by_kind(ran, CONTROL), until).items():
        faulty = sorted({each["seed"] for each in control.get("different", ())})
        different = found[name]["different"]
        own = [each for each in different if each["seed"] not in faulty]
        found[name] |= {"different": own, "as_vllm_alone": len(different) - len(own), "vllm_alone": faulty}
    return found


def _by_kind(seeds: Iterable[int], attempt: str) -> list[Task]:
    """Return a task for each kind of start: its starts share one eager engine."""
    kinds: dict[str, list[int]] = {}
    for seed in seeds:
        kinds.setdefault(start_of(seed).kind.replace(" ", "-"), []).append(seed)
    return [Task(name=kind, seeds=tuple(each), attempt=attempt) for kind, each in kinds.items()]


def _answers(processes: Processes, waiting: list[Task], until: float) -> dict[str, dict[str, Any]]:
    """Run tasks, and return their answers by name; those that have not ended by ``until`` have none."""
    found: dict[str, dict[str, Any]] = {}
    while waiting or not processes.is_idle:
        while waiting and not processes.is_full:
            processes.begin(waiting.pop(0))
        for task, answer in processes.ended():
            found[task.name] = answer
            if "error" in answer:
                CONSOLE.print(f"{task.name}: {answer['error']}", markup=False)
        if time.perf_counter() > until:
            processes.stop()
            break
        time.sleep(0.05)
    return found


def targets_of(campaign: Campaign, compared: dict[str, dict[str, Any]], starts: int) -> dict[str, bool]:
    """Return which targets hold."""
    whole = sum(each.get("requests", 0) for each in compared.values())
    wanted = sum(len(start_of(seed).requests) for seed in campaign.rows)
    different = sum(len(each.get("different", ())) for each in compared.values())
    return {
        f"starts at least {starts} ({campaign.count})": campaign.count >= starts,
        f"crashes 0 ({len(campaign.crashes)})": not campaign.crashes,
        f"requests compared with eager steps: all {wanted:,} ({whole:,})": whole == wanted > 0,
        f"differing tokens 0 ({different})": different == 0,
    }


def show(campaign: Campaign, compared: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Print the tables; return how many starts have each trait."""
    traits: Counter[str] = Counter(trait for seed in campaign.rows for trait in start_of(seed).traits())
    print_table("starts under a plan", ("with", "starts"), sorted(traits.items()))
    rows = []
    for name, each in sorted(compared.items()):
        counts = [each.get(key, 0) for key in ("requests", "tokens", "ties", "ties_of_eager", "as_vllm_alone")]
        rows.append((name, *(f"{cell:,}" for cell in (*counts, len(each.get("different", ()))))))
    columns = ("kind", "requests", "tokens", "ties", "of eager", "as vLLM alone", "different")
    print_table("tokens, against eager steps", columns, rows)
    return dict(sorted(traits.items()))


def one_case(seed: int, folder: Path) -> int:
    """Repeat one seed here: under its plan, alone where that fails, and against eager steps."""
    start = start_of(seed)
    CONSOLE.print(f"seed {seed}: {', '.join(start.traits())}", markup=False)
    prepare(folder)
    processes = Processes(folder, 1, run_task)
    campaign = run_campaign(processes, seed, 1, LIMIT * 3)
    compared = compare(processes, campaign, LIMIT)
    failed = (*campaign.crashes, *campaign.refused, *campaign.recovered)
    for each in (*failed, *campaign.rows.values(), *compared.values()):
        CONSOLE.print_json(data=each)
    CONSOLE.print(f"logs and the plan lie in {folder}", markup=False)
    return 1 if campaign.crashes or any(each.get("different") for each in compared.values()) else 0


def main() -> int:
    """Run the campaign, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--starts", type=int, default=200)
    options.add_argument("--seed", type=int, default=0, help="the first seed; each start has the next")
    options.add_argument("--jobs", type=int, default=10, help="engines at once")
    options.add_argument("--seconds", type=float, default=540, help="of the whole campaign, comparing included")
    options.add_argument("--case", type=int, metavar="SEED", help="repeat this start alone, and show what came out")
    options.add_argument("--folder", type=Path, help="for logs, plans and caches; default: a temporary one")
    arguments = options.parse_args()
    began = time.perf_counter()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="vllm-starts-"))
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.case is not None:
        return one_case(arguments.case, folder)
    if arguments.seconds < 2 * COMPARING:
        options.error(f"--seconds must be at least {2 * COMPARING:.0f}: {COMPARING:.0f} are kept for comparing tokens")
    prepare(folder)
    processes = Processes(folder, arguments.jobs, run_task)
    until = arguments.seconds - COMPARING - (time.perf_counter() - began)
    campaign = run_campaign(processes, arguments.seed, arguments.starts, until)
    left = arguments.seconds - (time.perf_counter() - began)
    compared = compare(processes, campaign, left)
    traits = show(campaign, compared)
    targets = targets_of(campaign, compared, arguments.starts)
    results = {
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - began, 1),
        "starts": campaign.count,
        "traits": traits,
        "graphs": sum(sum(row["graphs"].values()) for row in campaign.rows.values()),
        "full_graph_replays": sum(sum(row["replays"].values()) for row in campaign.rows.values()),
        "crashes": campaign.crashes,
        "failed_alone_too": campaign.refused,
        "failed_once": campaign.recovered,
        "tokens": compared,
        "each": {str(seed): row for seed, row in sorted(campaign.rows.items())},
    }
    return conclude(arguments, {"results": results}, targets)


if __name__ == "__main__":
    sys.exit(main())
