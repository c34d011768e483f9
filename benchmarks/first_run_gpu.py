"""What a first run shows on a GPU: memory that is predicted, shapes that are warmed up, and drafts that are accepted.

The shape of Qwen3-0.6B with an EAGLE-3 drafter (K=3), random weights, as ``run`` executes it with its defaults. Each
part is a process of its own, with a Triton cache of its own:

- synthetic acceptance, warmed up and not: what compiles while requests are served, and how far the shares are from
  those that were asked for; and with drafts verified on the host, where the same ones must be accepted;
- ``--drafter chance``: how many requests were answered otherwise than in the rehearsal, in bfloat16 and in float32;
- graphs: what was predicted, and what they took; the device's memory at the end must be within
  ``--memory-utilization``.

Parts are written as they are done; those for which ``--seconds`` are over are left out. ``--tiny`` tries the script on
a CPU.
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
from _qwen3 import DRAFT_VOCABULARY, shape, tiny, write_config

from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, DraftModel, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.report.plain import plain
from capture_planner.report.run import summary
from capture_planner.report.verdict import verdict as verdict_of
from capture_planner.runtime import host
from capture_planner.runtime.choices import Choices
from capture_planner.runtime.launch import launch
from capture_planner.runtime.options import Options
from capture_planner.runtime.serving.workload import generated
from capture_planner.runtime.session import RunReport

ACCEPTANCE = (0.7, 0.5, 0.3)
DEVIATIONS = 5
"""Standard deviations by which the share of a place may be off what was asked for."""


def plan_of(model: Model, backend: str, requests: int) -> Plan:
    """Return the plan of a server of ``requests`` requests, at this machine's defaults."""
    return make_plan(
        Spec(
            model=model,
            limits=Limits(max_num_reqs=requests, max_num_tokens=8192 if torch.cuda.is_available() else 64),
            backend=backend,
            sizes=Sizes(policy=Policy.POWERS_OF_TWO),
            speculative=Speculative(
                method=Method.EAGLE3,
                num_tokens=len(ACCEPTANCE),
                model=DraftModel(vocab_size=min(DRAFT_VOCABULARY, model.vocab_size or 0)),
            ),
        ),
        host.this_environment("here", gpu=torch.cuda.is_available()),
        registry.load_backends(),
    )


@contextmanager
def quiet(task: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a task's name alone."""
    CONSOLE.print(f"  {task} ({total}) ...")
    yield lambda name: None


def executed(plan: Plan, folder: Path, arguments: Any, **choices: Any) -> dict[str, Any]:
    """Run a plan as ``run`` does, and return what its report shows."""
    started = perf_counter()
    output = arguments.output_tokens
    outcome = launch(
        plan,
        registry.load_backends(),
        lambda vocab_size: generated(
            arguments.requests,
            seed=1,
            rate=None,
            prompt_tokens=(1, arguments.prompt_tokens),
            output_tokens=(output, output),
            vocab_size=vocab_size,
        ),
        Choices(model=folder, any_environment=True, **choices),
        quiet,
    )
    result = shown(outcome.report)
    result["launch_seconds"] = perf_counter() - started
    for line in result["verdict"]:
        CONSOLE.print(f"    {line}")
    return result


def shown(report: RunReport) -> dict[str, Any]:
    """Return the numbers of a report that this script is about."""
    numbers = summary(report)
    return {
        "verdict": list(verdict_of(report, numbers)),
        "otherwise": report.otherwise,
        "requests": report.counts.requests,
        "acceptance": plain(numbers.acceptance),
        "tokens_per_second": numbers.tokens_per_second,
        "first_token": plain(numbers.latency.first_token),
        "step": plain(numbers.latency.step),
        "kv_cache": report.kv_cache,
        "cache_memory": plain(report.cache_memory),
        "graphs": None if numbers.accounts is None else numbers.accounts.graphs + numbers.accounts.driver,
        "used_at_the_end": None if report.served_reading is None else report.served_reading.used,
        "warm_up": plain(report.warm_up),
        "compiled": plain(report.compiled),
    }


def parts_of(model: Model) -> dict[str, tuple[Model, dict[str, Any]]]:
    """Return model and choices of each part."""
    drawn = Options(acceptance=ACCEPTANCE)
    return {
        "acceptance": (model, {"options": drawn}),
        "acceptance, not warmed up": (model, {"options": drawn, "warm_up": False}),
        "acceptance, on the host": (model, {"options": attrs.evolve(drawn, drafts_on_device=False)}),
        "chance": (model, {"drafter": "chance", "chance": 0.5}),
        "chance in float32": (replace(model, dtype=DataType.FLOAT32), {"drafter": "chance", "chance": 0.5}),
    }


def targets_of(results: dict[str, dict[str, Any]], share: float) -> dict[str, bool]:
    """Return what must hold of the parts that were run."""
    targets = {}
    for name, part in results.items():
        if "error" in part:
            targets[f"{name}: {part['error']}"] = False
            continue
        if "acceptance" in name:
            places = part["acceptance"]["positions"]
            off = max(abs(place["rate"] - asked) for place, asked in zip(places, ACCEPTANCE, strict=True))
            most = DEVIATIONS * (0.25 / places[0]["drafted"]) ** 0.5
            targets[f"{name}: shares are {off:.3f} off those asked for, at most {most:.3f}"] = off <= most
        if part["used_at_the_end"] is not None:
            used = part["used_at_the_end"] / torch.cuda.get_device_properties(0).total_memory
            targets[f"{name}: {used:.3f} of the device in use, at most {share}"] = used <= share
        chosen, took = part["cache_memory"], part["graphs"]
        if took and chosen["predicted"]:
            ratio = chosen["predicted"] / took
            targets[f"{name}: graphs predicted at {ratio:.2f} of what they took"] = 0.8 <= ratio <= 2.0
    both = [results.get(name, {}).get("acceptance") for name in ("acceptance", "acceptance, on the host")]
    if all(both):
        targets["drafts that are verified on the host and on the device: the same are accepted"] = both[0] == both[1]
    warm = results.get("acceptance", {})
    if warm.get("warm_up"):
        late = len(warm["compiled"])
        targets[f"after the warm-up {late} kernels compiled while requests were served"] = not late
    return targets


def main() -> int:
    """Run the parts, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=600.0, help="for all parts (default 600)")
    options.add_argument("--backend", default="triton", help="attention backend (default triton)")
    options.add_argument("--requests", type=int, default=128, help="requests (default 128)")
    options.add_argument("--max-num-reqs", type=int, default=64, help="places of the server (default 64)")
    options.add_argument("--prompt-tokens", type=int, default=256, help="longest prompt (default 256)")
    options.add_argument("--output-tokens", type=int, default=128, help="output of each request (default 128)")
    options.add_argument("--memory-utilization", type=float, default=0.9, help="as of run (default 0.9)")
    options.add_argument("--max-model-len", type=int, default=40960, help="of the plan (default 40960)")
    names = list(parts_of(shape(max_model_len=1)))
    options.add_argument("--only", nargs="*", default=names, choices=names, help="parts (default all)")
    options.add_argument("--part", help="run this part alone, in this process")
    options.add_argument("--part-output", type=Path, help="file of its numbers")
    options.add_argument("--tiny", action="store_true", help="a small model on this CPU")
    arguments = options.parse_args()
    model = shape(max_model_len=arguments.max_model_len)
    if arguments.tiny:
        model = tiny(model)
        arguments.backend, arguments.requests, arguments.max_num_reqs = "reference", 12, 4
        arguments.prompt_tokens = arguments.output_tokens = 16
    memory = {} if arguments.tiny else {"memory_utilization": arguments.memory_utilization}
    parts = parts_of(model)
    if arguments.part:
        shape_of_part, choices = parts[arguments.part]
        plan = plan_of(shape_of_part, arguments.backend, arguments.max_num_reqs)
        with tempfile.TemporaryDirectory() as folder:
            write_config(shape_of_part, Path(folder))
            numbers = executed(plan, Path(folder), arguments, **memory, **choices)
        arguments.part_output.write_text(json.dumps(numbers), "utf-8")
        return 0
    started = perf_counter()
    results: dict[str, dict[str, Any]] = {}
    targets: dict[str, bool] = {}
    for name in arguments.only:
        left = arguments.seconds - (perf_counter() - started)
        if left <= 0:
            CONSOLE.print(f"{name}: left out, {arguments.seconds:g} s are over")
            continue
        CONSOLE.print(f"{name}, {perf_counter() - started:.0f} s")
        with tempfile.TemporaryDirectory() as triton:  # nothing is compiled yet
            results[name] = in_process(name, left, Path(triton))
        targets = targets_of(results, arguments.memory_utilization)
        finish(arguments, {"results": results, "targets": targets})
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    return 0 if targets and all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
