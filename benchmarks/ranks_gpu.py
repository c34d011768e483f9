r"""Plans of several ranks on two GPUs: tokens, steps, all-reduces, agreement, and ranks that fail.

Each part runs in processes of its own, one for each rank, with a time limit of its own:

- decode: steps of the shape of Qwen3-8B, compiled, for 1 to 256 requests, on one GPU and on two, with NCCL and with
  one-shot all-reduces over symmetric memory, each next to bare replays of its graph.
- faults: a rank that is killed, one that runs out of memory in a capture or in a step, one that is slow, and one that
  cannot compile the model. The others end with a named error within 10 s, or all go on alike.
- agreement: what two replicas take to agree on a step over shared memory, on the host and in a step.
- sums: all-reduces of 1 to 512 rows of 4,096 bfloat16 in graphs, by both.
- tokens: 16 requests of a small model, with and without an EAGLE-3 drafter, on every backend, by one rank, by two that
  share the model, and by two replicas. In float32 all must be equal, where a backend takes float32; in bfloat16, where
  sums are rounded otherwise on two ranks, the share of equal tokens is shown, and ranks of a model must agree.

    python benchmarks/ranks_gpu.py --output ranks.json                  # within 9 minutes
    python benchmarks/ranks_gpu.py --device cpu                         # tiny models, gloo, the reference backend

Results are written after each part. The exit code is 0 if all that ran is as it must be.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import torch
from _bench import CONSOLE, finish, parser, table, verdict

WORKER = Path(__file__).with_name("_ranks_worker.py")
SIZES = (1, 8, 32, 64, 128, 256)
ROWS = (1, 8, 32, 64, 128, 256, 512)
SPEEDUP, OF_BARE, AGREEMENT = 1.15, 1.05, 100.0
"""Least of two GPUs over one, most of a step over its bare graph, most microseconds of an agreement."""
NAMED_WITHIN = 10.0
"""Most seconds from a fault to the end of every rank."""

# Neither NVLink SHARP nor multicast: a shared host may have neither for everyone.
VARIABLES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@attrs.define(eq=False)
class Job:
    """The processes of one part."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]
    file: Path
    limit: float
    began: float = attrs.Factory(time.monotonic)
    is_late: bool = False
    """Whether it was killed at its limit."""
    ended: list[float | None] = attrs.Factory(list)
    """Wall clock at which each process was seen to have ended."""

    def poll(self) -> bool:
        """Look at the processes; return whether all have ended. Those past the limit are killed."""
        if time.monotonic() > self.began + self.limit and not self.is_late:
            self.is_late = any(process.poll() is None for process in self.processes)
            self.kill()
        self.ended = self.ended or [None] * len(self.processes)
        for index, process in enumerate(self.processes):
            if self.ended[index] is None and process.poll() is not None:
                self.ended[index] = time.time()
        return None not in self.ended

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def result(self) -> dict[str, Any]:
        """Return what rank 0 wrote, and how the processes ended."""
        found: dict[str, Any] = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {}
        codes = [process.poll() for process in self.processes]
        return found | {
            "exit codes": codes,
            "ended": self.ended,
            "seconds": round(time.monotonic() - self.began, 1),
            **({"over its limit of seconds": self.limit} if self.is_late else {}),
            **({"says": [_last(log) for log in self.logs]} if any(codes) else {}),
        }


def start(folder: Path, part: str, label: str, size: int, arguments: dict[str, Any], limit: float) -> Job:
    """Start a part on so many ranks."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stem = label.replace(" ", "-").replace(",", "")
    file, logs, processes = folder / f"{stem}.json", [], []
    for rank in range(size):
        variables = os.environ | VARIABLES
        if size > 1:
            variables |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        log = folder / f"{stem}.{rank}.log"
        command = [sys.executable, str(WORKER), part, str(file), json.dumps(arguments)]
        with log.open("wb") as output:
            processes.append(subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT))
        logs.append(log)
    CONSOLE.print(f"{label}: started, at most {limit:.0f} s", highlight=False)
    return Job(label, processes, logs, file, limit)


def wait(jobs: list[Job]) -> dict[str, dict[str, Any]]:
    """Wait for the parts, which run at once."""
    try:
        while [job for job in jobs if not job.poll()]:
            time.sleep(0.05)
    finally:
        for job in jobs:
            job.kill()
    results = {job.name: job.result() for job in jobs}
    for name, result in results.items():
        CONSOLE.print(f"{name}: {result['seconds']} s, exit codes {result['exit codes']}", highlight=False)
        for rank, line in enumerate(result.get("says", ())):
            CONSOLE.print(f"    rank {rank}: {line}", markup=False, highlight=False)
    return results


def _last(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(line[:300] for line in lines[-3:])


class Run:
    """The parts, one after another, within the time."""

    def __init__(self, arguments: Any, folder: Path) -> None:
        self.arguments, self.folder, self.began = arguments, folder, time.monotonic()
        self.is_gpu = arguments.device == "cuda"
        self.results: dict[str, Any] = {"device": arguments.device, "parts": {}}
        self.checks: dict[str, bool] = {}

    def left(self) -> float:
        return float(self.arguments.seconds) - (time.monotonic() - self.began)

    def job(self, part: str, label: str, limit: float, *, tensor: int = 1, data: int = 1, **more: Any) -> Job:
        arguments = {"device": self.arguments.device, "tensor": tensor, "data": data, **more}
        limit = max(min(limit, self.left()), 1.0)
        return start(self.folder, part, label, tensor * data, arguments, limit)

    def done(self, results: dict[str, dict[str, Any]]) -> None:
        self.results["parts"] |= results
        self.results |= {"checks": self.checks, "seconds": round(time.monotonic() - self.began, 1)}
        finish(self.arguments, self.results)

    def tokens(self) -> None:
        # The reference is not compiled: the others must say the same, compiled.
        backends = [["reference", "float32", False], ["reference", "float32", True]]
        if self.is_gpu:
            others = [("triton", "float32"), ("flash_attention", "bfloat16"), ("flashinfer", "bfloat16")]
            backends = [backends[0], *([name, dtype, True] for name, dtype in others)]
        limit = 170.0
        jobs = [
            self.job("tokens", "tokens, one rank", limit, backends=backends),
            self.job("tokens", "tokens, tensor 2", limit, tensor=2, backends=backends, all_reduce="nccl"),
            self.job("tokens", "tokens, data 2", limit, data=2, backends=backends),
        ]
        if self.is_gpu:
            label = "tokens, tensor 2, symmetric"
            jobs.append(self.job("tokens", label, limit, tensor=2, backends=backends[:2], all_reduce="symmetric"))
        found = wait(jobs)
        whole = found["tokens, one rank"]
        for label, result in list(found.items())[1:]:
            for case, one in result.items():
                if not isinstance(one, dict) or "tokens" not in one or "tokens" not in whole.get(case, {}):
                    continue
                equal, count = _equal(whole[case]["tokens"], one["tokens"])
                one["equal tokens"], one["all tokens"] = equal, count
                exact = "float32" in case or "data" in label
                self.checks[f"{label}: {case}"] = one["ranks of a model agree"] and (not exact or equal == count)
        missing = ("not installed", "No flash-attention library")
        absent = {case for case, one in whole.items() if any(word in str(one) for word in missing)}
        self.results["backends that are not installed"] = sorted(absent)
        expected = {case for case in whole if "k=" in case} - absent
        for label, result in found.items():
            ran = {case for case, one in result.items() if isinstance(one, dict) and "tokens" in one}
            wanted = {case for case in expected if "symmetric" not in label or "float32" in case}
            self.checks[f"{label}: all backends"] = ran == wanted and bool(ran)
            for one in result.values():
                if isinstance(one, dict):
                    one.pop("tokens", None)
        self.done(found)

    def decode(self) -> None:
        layers, sizes = self.arguments.layers, SIZES if self.is_gpu else (1, 4)
        more = {"layers": layers, "sizes": sizes, "backend": self.arguments.backend if self.is_gpu else "reference"}
        more["profiled"] = (1, 64) if self.is_gpu else ()
        found = wait([self.job("decode", "decode, one rank", 100.0, **more)])
        self.done(found)
        found |= wait([self.job("decode", "decode, tensor 2", 120.0, tensor=2, **more)])
        one = {row["requests"]: row for row in found["decode, one rank"].get("rows", ())}
        shown = table("Steps of the large shape", "all-reduce", "requests", "1 GPU us", "2 GPUs us", "faster", "/ bare")
        rows = found["decode, tensor 2"].get("rows", ())
        by_kind: dict[str, dict[int, float]] = {}
        for row in rows:
            alone = one.get(row["requests"])
            row["faster"] = None if alone is None else round(alone["step us"] / row["step us"], 3)
            by_kind.setdefault(row["all-reduce"], {})[row["requests"]] = row["step us"]
            cells = (row["requests"], alone and alone["step us"], row["step us"], row["faster"], row["step / bare"])
            shown.add_row(row["all-reduce"], *map(str, cells))
        CONSOLE.print(shown)
        nccl = [row for row in rows if row["all-reduce"] in ("nccl", "gloo")]
        if self.is_gpu:
            for kind in ("nccl", "symmetric"):
                faster = [row["faster"] for row in rows if row["all-reduce"] == kind]
                holds = bool(faster) and all(each is not None and each >= SPEEDUP for each in faster)
                self.checks[f"two GPUs at least {SPEEDUP} x one with {kind}"] = holds
            self.checks[f"steps at most {OF_BARE} x their graphs"] = bool(rows) and all(
                row["step / bare"] <= OF_BARE for row in rows
            )
            few = [size for size in by_kind.get("symmetric", {}) if size <= 32]
            self.checks["symmetric memory is faster where sizes are small"] = bool(few) and all(
                by_kind["symmetric"][size] < by_kind["nccl"][size] for size in few
            )
        self.checks["decode on two ranks"] = len(nccl) == len(sizes)
        for label, result in found.items():
            made = result.get("compilation", {})
            self.checks[f"{label}: compiled"] = bool(made.get("kinds")) and not made["not compiled"]
        self.done(found)

    def sums(self) -> None:
        if self.is_gpu:
            self.done(wait([self.job("sums", "sums", 45.0, tensor=2, rows=ROWS)]))

    def agreement(self) -> None:
        sizes = (1, 64) if self.is_gpu else (1, 4)
        backend = self.arguments.backend if self.is_gpu else "reference"
        found = wait([self.job("agreement", "agreement", 80.0, data=2, backend=backend, layers=8, sizes=sizes)])
        rows = found["agreement"].get("rows", ())
        self.checks["replicas agree"] = len(rows) == len(sizes)
        if self.is_gpu:
            self.checks["agreements go over shared memory"] = found["agreement"].get("over") == "shared memory"
            self.checks[f"an agreement takes at most {AGREEMENT:.0f} us"] = bool(rows) and all(
                row["agreement us"]["median"] <= AGREEMENT for row in rows
            )
        self.done(found)

    def faults(self) -> None:
        kinds: tuple[str, ...] = ("killed", "out of memory", "out of memory in a step", "memory limit", "slow")
        kinds = (*kinds, "not compiled")
        kinds = kinds if self.is_gpu else tuple(kind for kind in kinds if kind != "out of memory")
        # A machine without GPUs may have few cores, and a slow start is no fault.
        groups = [kinds] if self.is_gpu else [(kind,) for kind in kinds]
        found: dict[str, Any] = {}
        for group in groups:
            found |= wait([self.job("fault", f"fault, {kind}", 60.0, tensor=2, kind=kind) for kind in group])
        for kind in kinds:
            result = found.get(f"fault, {kind}")
            if result is None:
                continue
            codes, begun = result["exit codes"], result.get("fault", result.get("started"))
            # What lacks memory in a capture is left out by all; in a warm-up, which communicates, it ends the run.
            if kind in ("slow", "memory limit", "not compiled") or (kind == "out of memory" and codes == [0, 0]):
                holds = codes == [0, 0] and result.get("equal on all ranks", False)
                if kind == "not compiled":
                    reasons = result.get("compilation", {}).get("not compiled", ())
                    holds = holds and any("rank 1: " in reason for reason in reasons)
                elif kind != "slow":
                    holds = holds and result["graphs waived"] > 0
            else:
                last = [each for each in result["ended"] if each is not None]
                result["seconds to the end of all"] = round(max(last) - begun, 2) if begun and last else None
                text = " ".join(result.get("says", ()))
                named = "rank 1" in text or "OutOfMemory" in text or "does not fit" in text or "out of memory" in text
                holds = 0 not in codes and named and "over its limit of seconds" not in result
                if kind in ("killed", "out of memory in a step"):
                    holds = holds and result["seconds to the end of all"] <= NAMED_WITHIN
            self.checks[f"fault, {kind}"] = bool(holds)
        self.done(found)


def _equal(one: dict[str, list[int]], other: dict[str, list[int]]) -> tuple[int, int]:
    """Return how many tokens are equal, and how many there are."""
    pairs = [(a, b) for name, tokens in one.items() for a, b in zip(tokens, other.get(name, ()), strict=False)]
    return sum(a == b for a, b in pairs), sum(map(len, one.values()))


def main() -> int:
    """Run the parts that were chosen."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=525.0, help="end each part by this time")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options.add_argument("--layers", type=int, default=36, help="of the large shape")
    options.add_argument("--backend", default="triton", help="attention backend of decode and agreement")
    names = ("decode", "faults", "agreement", "sums", "tokens")
    options.add_argument("--parts", nargs="+", default=list(names), choices=names)
    arguments = options.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() < 2:
        CONSOLE.print("two GPUs are needed; --device cpu tries the script without")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        run = Run(arguments, Path(folder))
        for name in arguments.parts:
            if run.left() > 5:
                getattr(run, name)()
            else:
                run.checks[f"{name}: there was time for it"] = False
        run.done({})
    for name, holds in run.checks.items():
        CONSOLE.print(f"{name}: {verdict(holds)}", highlight=False)
    return 0 if all(run.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
