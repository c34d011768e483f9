"""Time and memory of ``capture-planner traffic`` over a log of 1 GB in each of the large formats.

Each log has a random walk of requests, a prompt in one step of eight, and a line of another kind in one of five. It
is written to a temporary folder, read by the command in a process of its own, and deleted. ``cpu_seconds`` judges:
``seconds`` include what else the machine did, see ``load_average``.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _bench import CONSOLE, finish, parser, table, verdict

MAX_SECONDS = 60
MAX_MIB = 200
NOISE = 'INFO:     127.0.0.1:5432 - "POST /v1/completions HTTP/1.1" 200 OK\n'


def vllm(index: int, reqs: int, prompt: int, clock: str) -> str:
    """Return an iteration line of vLLM (0.33.0)."""
    return (
        f"(APIServer pid=4242) INFO 11-22 {clock} [loggers.py:200] Engine {index % 2:03d}: Iteration({index}): "
        f"{1 if prompt else 0} context requests, {prompt} context tokens, {reqs} generation requests, {4 * reqs} "
        f"generation tokens, iteration elapsed time: {8 + index % 977 / 100:.2f} ms, GPU KV cache usage: 3.1%\n"
    )


def sglang(index: int, reqs: int, prompt: int, clock: str) -> str:
    """Return a decode or prefill line of SGLang (0.5.23)."""
    if prompt:
        return (
            f"[2026-11-22 {clock} TP0] Prefill batch, #new-seq: 1, #new-token: {prompt}, #cached-token: 7, "
            f"token usage: 0.05, #running-req: {reqs}, #queue-req: 0, #pending-token: 3, cuda graph: False, "
            f"input throughput (token/s): {prompt * 20}.00\n"
        )
    return (
        f"[2026-11-22 {clock} TP0] Decode batch, #running-req: {reqs}, #token: {reqs * 900}, token usage: 0.05, "
        f"cuda graph: True, gen throughput (token/s): {reqs * 70}.00, #queue-req: 0\n"
    )


def tensorrt_llm(index: int, reqs: int, prompt: int, clock: str) -> str:
    """Return an iteration line of TensorRT-LLM (1.3)."""
    return (
        f"[11/22/2026-{clock}] [TRT-LLM] [I] [_torch][RANK 0] iter = {index}, global_rank = 0, rank = 0, "
        f"num_scheduled_requests = {reqs + bool(prompt)}, kv_cache_util = 0.100, currank_total_requests = 0/{reqs}, "
        f"host_step_time = {7 + index % 977 / 100:.6f}ms, prev_device_step_time = 7.123456ms, timestamp = 2026-11-22 "
        f"{clock}, states = {{'num_ctx_requests': {bool(prompt):d}, 'num_ctx_tokens': {prompt}, "
        f"'num_generation_tokens': {reqs}}}\n"
    )


def forward_passes(index: int, reqs: int, prompt: int, clock: str) -> str:
    """Return forward-pass metrics as a JSON line (SGLang 0.5.23)."""
    return (
        f'{{"version":1,"worker_id":"0","dp_rank":0,"counter_id":{index},"wall_time":{0.007 + index % 977 / 1e5:.6f},'
        f'"scheduled_requests":{{"num_prefill_requests":{bool(prompt):d},"sum_prefill_tokens":{prompt},'
        f'"var_prefill_length":0.0,"sum_prefill_kv_tokens":0,"num_decode_requests":{reqs},"sum_decode_kv_tokens":'
        f'{reqs * 900},"var_decode_kv_tokens":0.0}},"queued_requests":{{"num_prefill_requests":0,'
        '"sum_prefill_tokens":0,"var_prefill_length":0.0,"num_decode_requests":0,"sum_decode_kv_tokens":0,"var_decode_kv_tokens":0.0}}\n'
    )


FORMATS = {"vllm": vllm, "sglang": sglang, "tensorrt_llm": tensorrt_llm, "forward_passes": forward_passes}


def write(path: Path, line: Callable[[int, int, int, str], str], size: int) -> int:
    """Write a log of ``size`` bytes, and return how many steps it has."""
    rng, reqs, index, written = random.Random(0), 64, 0, 0
    with path.open("w", encoding="ascii") as file:
        while written < size:
            lines = []
            for _ in range(10_000):
                reqs = min(256, max(1, reqs + rng.choice((-1, 0, 0, 1))))
                prompt = rng.randint(1, 2048) if rng.random() < 0.125 else 0
                second = index // 100
                lines.append(
                    line(index, reqs, prompt, f"{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}")
                )
                index += 1
                if index % 5 == 0:
                    lines.append(NOISE)
            written += file.write("".join(lines))
    return index


def read(path: Path, output: Path) -> tuple[float, float, float, dict[str, Any]]:
    """Run the command, and return its seconds, those of the CPU, its peak memory in MiB, and its JSON."""
    command = [sys.executable, "-m", "capture_planner.cli", "traffic", str(path), "-o", str(output), "--format", "json"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    cpu = usage.ru_utime + usage.ru_stime
    return time.perf_counter() - started, cpu, usage.ru_maxrss / 1024, json.loads(text)


def main() -> int:
    """Measure each format; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--gigabytes", type=float, default=1.0, help="size of each log; default: 1")
    options.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    arguments = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.formats:
            path = Path(folder) / "engine.log"
            steps = write(path, FORMATS[name], int(arguments.gigabytes * 1e9))
            size = path.stat().st_size
            seconds, cpu, mib, traffic = read(path, Path(folder) / "traffic.yaml")
            path.unlink()
            # A decode line of SGLang stands for 40 steps unless it is told otherwise.
            exact = traffic["steps"] >= steps if name == "sglang" else traffic["steps"] == steps
            row = {"format": name, "bytes": size, "steps": steps, "shapes": len(traffic["batches"]), "exact": exact}
            row |= {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2), "peak_mib": round(mib, 1)}
            rows.append(row | {"skipped": traffic["skipped"]})
    named = tuple(rows[0])
    shown = table("traffic", *named)
    for row in rows:
        shown.add_row(*(str(row[key]) for key in named))
    CONSOLE.print(shown)
    targets = {
        f"at most {MAX_SECONDS} s of one core for 1 GB": all(
            row["cpu_seconds"] * 1e9 / row["bytes"] <= MAX_SECONDS for row in rows
        ),
        f"at most {MAX_MIB} MiB": all(row["peak_mib"] <= MAX_MIB for row in rows),
        "every step is counted": all(row["exact"] and not row["skipped"] for row in rows),
    }
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    finish(arguments, {"results": rows, "targets": targets})
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
