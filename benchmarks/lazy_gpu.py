"""What lazy capture costs and saves on one GPU: start-up and throughput next to all graphs at start, and to eager.

The shape of Qwen3-0.6B, random weights, as ``run`` executes it with its defaults. Each part is a process of its own:

- all graphs at start, once to fill the Triton cache that the parts share, and once more;
- lazy, with ample time, so that each graph is captured when it is first asked for;
- lazy, within ``--seconds-per-minute``, as a server would have it;
- lazy, without memory: graphs that take some are refused;
- eager.

Each part serves the same requests: two rounds of waves, each wave of half as many requests as the one before, so that
batches of many sizes run. Reported are the seconds until the first step, tokens per second, what was captured on first
use, when, and what it took, and the device's memory at the end, which must be within ``--memory-utilization``. Parts
are written as they are done; those for which ``--seconds`` are over are left out. ``--tiny`` tries the script on a CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch
from _bench import CONSOLE, finish, parser, verdict
from _parts import in_process
from _qwen3 import shape, tiny, write_config

from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records.capture import CapturePolicy, CaptureTiming
from capture_planner.records.model import Model
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Spec
from capture_planner.report.plain import plain
from capture_planner.report.run import summary
from capture_planner.report.verdict import verdict as verdict_of
from capture_planner.runtime import host
from capture_planner.runtime.choices import Choices
from capture_planner.runtime.launch import launch
from capture_planner.runtime.serving.workload import Request, generated
from capture_planner.runtime.session import RunReport

AMPLE = 1e6
"""Seconds a minute that never run out."""

FIRST = "all at start, first run"
PARTS = (FIRST, "all at start", "lazy, ample time", "lazy", "lazy, no memory", "eager")


def timing_of(part: str, arguments: Any) -> CaptureTiming:
    """Return when a part captures its graphs."""
    if not part.startswith("lazy"):
        return CaptureTiming()
    return CaptureTiming(
        policy=CapturePolicy.LAZY,
        memory=0 if part == "lazy, no memory" else arguments.memory << 20,
        seconds_per_minute=arguments.seconds_per_minute if part == "lazy" else AMPLE,
    )


def plan_of(model: Model, part: str, arguments: Any) -> Plan:
    """Return the plan of a server, at this machine's defaults."""
    is_gpu = torch.cuda.is_available() and not arguments.tiny
    return make_plan(
        Spec(
            model=model,
            limits=Limits(max_num_reqs=arguments.max_num_reqs, max_num_tokens=8192 if is_gpu else 64),
            backend=arguments.backend,
            capture=timing_of(part, arguments),
        ),
        host.this_environment("here", gpu=is_gpu),
        registry.load_backends(),
    )


def waves(vocab_size: int, arguments: Any) -> tuple[Request, ...]:
    """Return requests twice: waves of all places, of half of them, and so on, each when the one before is served."""
    found: list[Request] = []
    count, start, longest = arguments.max_num_reqs, 0.0, arguments.output_tokens
    sizes = [size for _ in range(2) for size in halves(count)]
    for number, size in enumerate(sizes):
        wave = generated(
            size,
            seed=number,
            rate=None,
            prompt_tokens=(1, arguments.prompt_tokens),
            output_tokens=(longest // 2, longest),
            vocab_size=vocab_size,
        )
        found += [attrs.evolve(each, name=f"{number}.{each.name}", arrival=start) for each in wave]
        start += STEP * 4 * (longest + arguments.prompt_tokens)
    return tuple(found)


STEP = 0.01
"""Seconds of the clock of arrivals in a step: a wave comes when the steps of the one before are over."""


def halves(count: int) -> Iterator[int]:
    """Yield a number, and its halves down to 1."""
    while count:
        yield count
        count //= 2


@contextmanager
def quiet(task: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a task's name alone."""
    CONSOLE.print(f"  {task} ({total}) ...")
    yield lambda name: None


def executed(plan: Plan, folder: Path, part: str, arguments: Any) -> dict[str, Any]:
    """Run a plan as ``run`` does, and return what its report shows."""
    memory = {} if arguments.tiny else {"memory_utilization": arguments.memory_utilization}
    started = perf_counter()
    report = launch(
        plan,
        registry.load_backends(),
        lambda vocab_size: waves(vocab_size, arguments),
        Choices(model=folder, any_environment=True, eager=part == "eager", step_seconds=STEP, **memory),
        quiet,
    ).report
    result = shown(report) | {"seconds": perf_counter() - started}
    result["start_seconds"] = result["seconds"] - report.serve_seconds
    for line in result["verdict"]:
        CONSOLE.print(f"    {line}")
    return result


def shown(report: RunReport) -> dict[str, Any]:
    """Return the numbers of a report that this script is about."""
    numbers = summary(report)
    late = [graph for graph in report.captured if graph.step is not None]
    eager = sum(fallback.forwards for fallback in numbers.fallbacks)
    total = sum(role.forwards for role in numbers.served_from)
    return {
        "verdict": list(verdict_of(report, numbers)),
        "tokens": {served.name: served.output_tokens for served in report.served},
        "planned": report.plan.num_graphs,
        "at_start": len(report.captured) - len(late),
        "capture_seconds": report.capture_seconds,
        "late": [{"step": graph.step, "seconds": graph.seconds, "taken": graph.taken} for graph in late],
        "refused": [graph.waiver.message for graph in late if graph.waiver is not None],
        "lazy": plain(report.lazy),
        "eager_share": eager / total if total else 0.0,
        "rows": {role.role.value: sum(mode.padded_tokens for mode in role.modes) for role in numbers.served_from},
        "tokens_per_second": numbers.tokens_per_second,
        "step": plain(numbers.latency.step),
        "per_token": plain(numbers.latency.per_token),
        "serve_seconds": report.serve_seconds,
        "kv_cache": report.kv_cache,
        "cache_memory": plain(report.cache_memory),
        "used_at_the_end": None if report.served_reading is None else report.served_reading.used,
    }


def targets_of(results: dict[str, dict[str, Any]], arguments: Any) -> dict[str, bool]:
    """Return what must hold of the parts that were run."""
    targets = {f"{name}: {part['error']}": False for name, part in results.items() if "error" in part}
    done = {name: part for name, part in results.items() if "error" not in part}
    for name, part in done.items():
        if part["used_at_the_end"] is not None:
            used = part["used_at_the_end"] / torch.cuda.get_device_properties(0).total_memory
            holds = used <= arguments.memory_utilization
            targets[f"{name}: {used:.3f} of the device in use, at most {arguments.memory_utilization}"] = holds
        if part["lazy"] and name != "lazy, no memory":
            lazy = part["lazy"]
            says = f"{name}: first uses took {lazy['taken'] >> 20} of {lazy['memory'] >> 20} MiB"
            targets[says] = lazy["taken"] <= lazy["memory"]
        if name == "lazy":
            longest = max((each["seconds"] for each in part["late"]), default=0.0)
            allowed = arguments.seconds_per_minute * (1 + part["serve_seconds"] / 60) + longest
            spent = part["lazy"]["seconds"]
            targets[f"{name}: {spent:.2f} s of captures while serving, at most {allowed:.2f}"] = spent <= allowed
    whole, ample = done.get("all at start"), done.get("lazy, ample time")
    if whole and ample:
        ratio = ample["start_seconds"] / whole["start_seconds"]
        targets[f"a lazy start takes {ratio:.2f} of one that captures all"] = ratio < 1
        targets["lazy runs give as many tokens"] = ample["tokens"] == whole["tokens"]
    return targets


def main() -> int:
    """Run the parts, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=180.0, help="for all parts (default 180)")
    options.add_argument("--backend", default="triton", help="attention backend (default triton)")
    options.add_argument("--max-num-reqs", type=int, default=64, help="places of the server (default 64)")
    options.add_argument("--prompt-tokens", type=int, default=64, help="longest prompt (default 64)")
    options.add_argument("--output-tokens", type=int, default=64, help="longest output (default 64)")
    options.add_argument("--memory", type=int, default=512, help="MiB for graphs on first use (default 512)")
    options.add_argument("--seconds-per-minute", type=float, default=1.0, help="for first uses (default 1)")
    options.add_argument("--memory-utilization", type=float, default=0.9, help="as of run (default 0.9)")
    options.add_argument("--max-model-len", type=int, default=4096, help="of the plan (default 4096)")
    options.add_argument("--part", help="run this part alone, in this process")
    options.add_argument("--part-output", type=Path, help="file of its numbers")
    options.add_argument("--tiny", action="store_true", help="a small model on this CPU")
    arguments = options.parse_args()
    model = shape(max_model_len=arguments.max_model_len)
    if arguments.tiny:
        model = tiny(model)
        arguments.backend, arguments.max_num_reqs, arguments.memory = "reference", 4, 1
        arguments.prompt_tokens = arguments.output_tokens = 16
    if arguments.part:
        plan = plan_of(model, arguments.part, arguments)
        with tempfile.TemporaryDirectory() as folder:
            write_config(model, Path(folder))
            numbers = executed(plan, Path(folder), arguments.part, arguments)
        arguments.part_output.write_text(json.dumps(numbers), "utf-8")
        return 0
    started = perf_counter()
    results: dict[str, dict[str, Any]] = {}
    targets: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as triton:
        for name in PARTS:
            left = arguments.seconds - (perf_counter() - started)
            if left <= 0:
                CONSOLE.print(f"{name}: left out, {arguments.seconds:g} s are over")
                continue
            CONSOLE.print(f"{name}, {perf_counter() - started:.0f} s")
            results[name] = in_process(name, left, Path(triton))
            targets = targets_of(results, arguments)
            finish(arguments, {"results": results, "targets": targets})
    for name, part in results.items():
        if "error" not in part:
            captured = f"{part['at_start']} graphs in {part['capture_seconds']:.2f} s, {len(part['late'])} on first use"
            rate = f"{part['tokens_per_second']:,.0f} tokens/s"
            CONSOLE.print(f"{name}: start {part['start_seconds']:.1f} s; {captured}; {rate}")
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    return 0 if targets and all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
