r"""``run --verify`` and graph fingerprints on a GPU, for 12 layers of Qwen3-0.6B's shape with random weights.

For each backend, in a process of its own: healthy runs in bfloat16 and float16, with and without an EAGLE-3 drafter,
pass; 1 % in one layer, NaN and a stale row are found. A second process captures the same graphs again, whose
fingerprints must be equal; the fingerprints of a run with an error differ. All processes share the GPU:

    python benchmarks/verify_gpu.py --seconds 120 --output verify.json
    python benchmarks/verify_gpu.py --device cpu --seconds 120        # the reference backend, a tiny model

Results are written after each run. The exit code is 0 if all that ran is right.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from _bench import CONSOLE, finish, parser, table, verdict
from _verify_cases import RUNS, execute

BACKENDS = ("reference", "triton", "flash_attention", "flashinfer")
POLL = 1.0
"""Seconds between two looks at the processes."""


def work(name: str, device: torch.device, file: Path, end: float, *, again: bool) -> None:
    """Execute the runs of one backend, and append a line to ``file`` for each; ``again``: the first run alone."""
    longest = 0.0
    for run in RUNS[:1] if again else RUNS:
        began = time.time()
        if began + longest > end:
            found: dict[str, Any] = {"run": run.name, "backend": name, "not run": "the time is over"}
        else:
            try:
                found = execute(name, run, device)
            except Exception:
                found = {"run": run.name, "backend": name, "error": traceback.format_exc(limit=12).splitlines()}
            longest = max(longest, time.time() - began) if "error" not in found else longest
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(found | {"again": again}) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return what all processes wrote so far."""
    texts = [text for file in sorted(folder.glob("*.jsonl")) for text in file.read_text("utf-8").splitlines()]
    found = []
    for text in texts:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue  # a line that is being written
    return found


def fingerprints(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the fingerprints of two processes, and of a healthy run with one that has another kernel."""
    healthy, other = RUNS[0].name, RUNS[1].name
    results = []
    for name in sorted({each["backend"] for each in found}):
        kept = {
            (e["run"], e["again"]): e["fingerprints"] for e in found if e["backend"] == name and "fingerprints" in e
        }
        first, second, spoiled = kept.get((healthy, False)), kept.get((healthy, True)), kept.get((other, False))
        result: dict[str, Any] = {"backend": name, "read": first is not None and None not in first.values()}
        if first and second:
            result["equal in two processes"] = first == second
            result["unequal"] = [
                {"graph": graph, "first": before, "second": second.get(graph)}
                for graph, before in first.items()
                if second.get(graph) != before
            ][:2]
        if first and spoiled:
            # The kernel runs between the pieces of the others.
            result["differ with another kernel"] = all(
                (spoiled.get(graph) != print_) is graph.startswith("target FULL") for graph, print_ in first.items()
            )
        if first:
            graph, print_ = next(iter(first.items()))
            result["example"] = {graph: print_}
        results.append(result)
    return results


def summary(found: list[dict[str, Any]], logs: dict[str, str], seconds: float) -> dict[str, Any]:
    """Return the results as they are written: without the fingerprints themselves."""
    runs = [{k: v for k, v in each.items() if k != "fingerprints"} for each in found]
    return {"seconds": round(seconds, 1), "runs": runs, "fingerprints": fingerprints(found), "processes": logs}


def main() -> int:
    """Start a process for each backend, and one more for its fingerprints; return 1 if something is wrong."""
    arguments = _arguments()
    if arguments.worker:
        work(arguments.worker, torch.device(arguments.device), arguments.lines, arguments.end, again=arguments.again)
        return 0
    began = time.time()
    names = ["reference"] if arguments.device == "cpu" else arguments.backends
    with tempfile.TemporaryDirectory() as folder:
        processes = {
            f"{name}{' again' if again else ''}": _start(name, again, Path(folder), arguments, began)
            for name in names
            for again in (False, True)
        }
        seen: set[tuple[str, str, bool]] = set()
        while True:
            running = any(process.poll() is None for process, _ in processes.values())
            is_late = time.time() > began + arguments.seconds + 10
            found = lines_of(Path(folder))
            new = [each for each in found if (each["backend"], each["run"], each["again"]) not in seen]
            for each in new:
                _show(each)
                seen.add((each["backend"], each["run"], each["again"]))
            if new or not running or is_late:
                logs = {label: _state(process, log) for label, (process, log) in processes.items()}
                results = summary(found, logs, time.time() - began)
                finish(arguments, results)
            if not running or is_late:
                break
            time.sleep(POLL)
        for process, _ in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
    return _verdict(results)


def _arguments() -> Any:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=120.0, help="begin no run after this time")
    options.add_argument("--device", default="cuda:0", choices=("cuda:0", "cpu"))
    options.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    options.add_argument("--worker", help=argparse_hidden)
    options.add_argument("--lines", type=Path, help=argparse_hidden)
    options.add_argument("--end", type=float, help=argparse_hidden)
    options.add_argument("--again", action="store_true", help=argparse_hidden)
    return options.parse_args()


argparse_hidden = "used by the script itself"


def _start(name: str, again: bool, folder: Path, arguments: Any, began: float) -> tuple[subprocess.Popen[bytes], Path]:
    log = folder / f"{name}-{again}.log"
    command = [sys.executable, __file__, "--worker", name, "--device", arguments.device]
    command += ["--lines", str(folder / f"{name}-{again}.jsonl"), "--end", str(began + arguments.seconds)]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *(["--again"] if again else [])], stdout=output, stderr=subprocess.STDOUT)
    return process, log


def _state(process: subprocess.Popen[bytes], log: Path) -> str:
    code = process.poll()
    if not code:
        return "running" if code is None else "done"
    return f"ended with {code}: " + "\n".join(log.read_text("utf-8", "replace").splitlines()[-12:])


def _show(each: dict[str, Any]) -> None:
    said = each.get("says") or each.get("error") or [each.get("not run", "")]
    state = "right" if each.get("right") else "not run" if "not run" in each else "WRONG"
    again = ", second process" if each["again"] else ""
    text = f"{each['backend']}: {each['run']}{again}: {state}: {said[0] if 'says' in each else said[-1]}"
    CONSOLE.print(text, markup=False, highlight=False, soft_wrap=True)


def _verdict(results: dict[str, Any]) -> int:
    shown = table("Verification", "backend", "right", "wrong", "errors", "not run")
    runs = results["runs"]
    for name in sorted({each["backend"] for each in runs}):
        mine = [each for each in runs if each["backend"] == name]
        right = sum(each.get("right", False) for each in mine)
        errors, skipped = (sum(key in each for each in mine) for key in ("error", "not run"))
        shown.add_row(name, str(right), str(len(mine) - right - errors - skipped), str(errors), str(skipped))
    CONSOLE.print(shown)
    for each in results["fingerprints"]:
        CONSOLE.print({key: value for key, value in each.items() if key not in ("example", "unequal")})
    flags = ("equal in two processes", "differ with another kernel")
    is_right = (
        bool(runs)
        and all(each.get("right", "not run" in each) for each in runs)
        and all(each.get(flag, False) for each in results["fingerprints"] for flag in flags)
        and all(state == "done" for state in results["processes"].values())
    )
    CONSOLE.print("all right:", verdict(is_right))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
