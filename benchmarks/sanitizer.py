r"""compute-sanitizer over a short run of each attention backend on a GPU: errors by backend and tool.

    python benchmarks/conformance.py --compile      # what libraries compile on first use
    python benchmarks/sanitizer.py --seconds 60 --output

Each backend runs scenes of the conformance suite in a process of its own for each tool, all at once, on the GPUs
that are visible. The scenes capture, replay, run eager and serve; the suite checks them too. Tools:

- ``memcheck``: reads and writes out of bounds, and misaligned ones, in graphs and eager. torch's allocator hands out
  parts of large segments, so a step past the end of a tensor often stays within one.
- ``memcheck-apart``: the same without that allocator, so that each tensor is an allocation. No graph can be
  captured then: everything runs eager.
- ``racecheck``: hazards in shared memory, in graphs and eager. It may report hazards between warps that a kernel orders
  by other means than barriers (mbarriers in PTX, named barriers of warp-specialised kernels).
- ``synccheck``: barriers that are used wrongly.
- ``initcheck``: reads of global memory that nothing wrote; not run unless asked for. It reports vectorised loads that
  read past a row into padding and mask it, and what was written through a mapping that it does not follow.

Reports are counted by kernel. Those that ``_sanitizer_reports.EXEMPTIONS`` has are shown with the reason why they are
no findings, or why that is an open question. Exit code 1 if a tool reports another error, or a run broke or found a
violation.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
from _bench import CONSOLE, finish, parser, table
from _deployments import CASES, environment, missing
from _gpus import only, visible
from _sanitizer_reports import read

from capture_planner.conformance import Case, Scene, Shape, play, under_test, usable_shapes
from capture_planner.conformance.scene import Arrive, RunBatch, Serve
from capture_planner.conformance.shapes import KERNELS
from capture_planner.modes import GraphMode

NAMES = ("flash_attention", "flashinfer", "flashinfer_wrappers", "triton")
TOOLS = ("memcheck", "memcheck-apart", "racecheck", "synccheck")
ALL_TOOLS = (*TOOLS, "initcheck")
MARK = "scenes that ran: "
PRINTED = 1000
"""Most errors that a tool prints; all are counted, and those that are not printed are not explained."""

Data = dict[str, Any]


def cases(shape: Shape, *, eager: bool) -> Iterator[Case]:
    """Yield small scenes: drafter or none, graphs of any kind, decodes, prompts and a scheduler's steps."""
    modes = (GraphMode.NONE,) if eager else (GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL, GraphMode.PIECEWISE)
    for mode, drafts in itertools.product(modes, (2, 0)):
        scene = Scene(
            shape=shape, mode=mode, num_reqs=3, num_tokens=16, size_tokens=(8, 16), size_reqs=(2, 3), drafts=drafts
        )
        one = 1 + drafts
        yield Case(
            scene=scene,
            steps=(
                Arrive(prompt=4, computed=4),
                Arrive(prompt=shape.page_size + 1, computed=shape.page_size + 1),
                Arrive(prompt=9),
                RunBatch(rows=((0, one, 0), (1, one, drafts))),
                RunBatch(rows=((0, one, 0),)),
                RunBatch(rows=((0, 1, 0), (1, one, 0), (2, 7, 0))),
                Serve(requests=((5, 3, 0), (shape.page_size, 2, 1))),
            ),
        )


def child(name: str, seconds: float, *, eager: bool) -> int:
    """Run scenes of a backend until the time is up, one at least; print what ran."""
    until, device = time.monotonic() + seconds, torch.device("cuda")
    torch.set_num_threads(1)
    under = under_test(CASES[name].backend, environment=environment(CASES[name], device))
    shapes, _ = usable_shapes(under, KERNELS[:1])
    forwards: Counter[str] = Counter()
    scenes, failures = 0, []
    # The first scenes do not wait for the others' turn: each kind of forward is in them.
    for case in itertools.cycle(cases(shapes[0], eager=eager)):
        result = play(under, case)
        scenes += 1
        forwards.update(result.log.forwards)
        if result.failure is not None:
            failures.append(str(result.failure))
        if failures or time.monotonic() > until:
            break
    ran = {"scenes": scenes, "forwards": dict(sorted(forwards.items())), "failures": failures}
    sys.stdout.write(f"{MARK}{json.dumps(ran)}\n")
    return int(bool(failures))


def run(name: str, tool: str, device: str | None, seconds: float, limit: float) -> Data:
    """Run one backend under one tool; return what the tool and the suite report."""
    began, apart = time.monotonic(), tool.endswith("-apart")
    command = ["compute-sanitizer", "--tool", tool.removesuffix("-apart"), "--print-limit", str(PRINTED)]
    command += [sys.executable, __file__, "--child", name, "--seconds", str(seconds)]
    with only(device):
        there = dict(os.environ)
    if apart:
        there["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        command.append("--eager")
    process = subprocess.Popen(
        command, env=there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
        broke = ""
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        broke = f"it did not end within {limit:.0f} s"
    data = read(output, tool.removesuffix("-apart"))
    if ran := [line for line in output.splitlines() if line.startswith(MARK)]:
        data |= json.loads(ran[-1].removeprefix(MARK))
    if not broke and "scenes" not in data:
        broke = f"exit code {process.returncode}: {' '.join(output.splitlines()[-3:])[-400:]}"
    took = {"seconds": round(time.monotonic() - began, 1)}
    return {"case": name, "tool": tool, **data, **took, **({"broke": broke} if broke else {})}


def passed(result: Data) -> bool:
    """Say whether a run ended with a report of no error that is not known, and its scenes passed."""
    return "broke" not in result and result.get("unexplained") == 0 and not result.get("failures")


def main() -> int:
    """Run all backends under all tools at once, print and write."""
    options = parser(__doc__)
    options.add_argument("--backends", nargs="*", choices=list(CASES), default=NAMES)
    options.add_argument("--tools", nargs="*", choices=ALL_TOOLS, default=TOOLS)
    options.add_argument("--seconds", type=float, default=60, help="begin no scene after so many")
    options.add_argument("--limit", type=float, default=None, help="end a run after so many (default: 60 more)")
    options.add_argument("--jobs", type=int, default=16, help="runs at once")
    options.add_argument("--child", choices=list(CASES), help=argparse.SUPPRESS)
    options.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.child:
        return child(arguments.child, arguments.seconds, eager=arguments.eager)
    if shutil.which("compute-sanitizer") is None:
        options.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    limit = arguments.seconds + 60 if arguments.limit is None else arguments.limit
    results: list[Data] = []
    todo = []
    for name in arguments.backends:
        why = missing(CASES[name], torch.device("cuda"))
        if why is not None:
            results.append({"case": name, "skipped": why})
            continue
        todo += [(name, tool) for tool in arguments.tools]
    devices = visible()
    with ThreadPoolExecutor(arguments.jobs) as threads:
        runs = [
            threads.submit(run, name, tool, devices[number % len(devices)], arguments.seconds, limit)
            for number, (name, tool) in enumerate(todo)
        ]
        for done in as_completed(runs):
            results.append(done.result())
            CONSOLE.print(_line(results[-1]), highlight=False, markup=False)
            finish(arguments, {"results": results})
    _print(results)
    return int(not all("skipped" in result or passed(result) for result in results))


def _line(result: Data) -> str:
    text = f"{result['case']}, {result['tool']}: {result.get('errors', 'no report of')} errors"
    for key in ("broke", "failures", "places", "first", "known"):
        if result.get(key):
            text += f"\n  {key}: {result[key]}"
    return text


def _print(results: list[Data]) -> None:
    summary = table("compute-sanitizer", "backend", "tool", "errors", "known", "warnings", "scenes", "forwards", "s")
    for result in sorted((each for each in results if "tool" in each), key=lambda each: (each["case"], each["tool"])):
        summary.add_row(
            result["case"],
            result["tool"],
            str(result.get("errors", "broke")),
            str(result["errors"] - result["unexplained"]) if "errors" in result else "",
            str(result.get("warnings", "")),
            str(result.get("scenes", "")),
            str(sum(result.get("forwards", {}).values())),
            f"{result['seconds']:.0f}",
        )
    CONSOLE.print(summary)


if __name__ == "__main__":
    sys.exit(main())
