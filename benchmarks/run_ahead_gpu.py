"""What run-ahead with a drafter is worth: tokens per second of steps that are launched before the last one is read.

The shape of Qwen3-0.6B with random weights and an EAGLE-3 drafter (K=3) with synthetic acceptance. Two runners of one
model and one plan serve the same requests by turns, one with ``run_ahead`` and one without, a load and a round at a
time: ratios are within one process. The first round warms up; there are further ones until ``--seconds`` are over,
three at least. ``--tiny`` tries the script on a CPU, where forwards wait for the host.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import numpy as np
import torch
from _bench import CONSOLE, finish, parser, table, verdict
from _qwen3 import DRAFT_VOCABULARY, RATES, shape, write_config

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.model import DraftModel, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.runtime import chosen, host
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.options import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.workload import Request

ROUNDS = 3
AHEAD, WAITING = "ahead", "waiting"
LEAST = 0.97
"""A ratio below it is a loss, and not noise."""


def plan_of(model: Model, backend: str, loads: Sequence[int]) -> Plan:
    """Return the plan of a server of the largest load, with full graphs of all roles at each load."""
    sizes = sorted({*loads, *(size for size in (2, 4, 16, 32, 128) if size < max(loads))})
    spec = Spec(
        model=model,
        limits=Limits(max_num_reqs=max(loads), max_num_tokens=8192),
        mode=GraphMode.FULL_DECODE_ONLY,
        backend=backend,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=tuple(sizes)),
        speculative=Speculative(
            method=Method.EAGLE3,
            num_tokens=len(RATES),
            model=DraftModel(vocab_size=min(DRAFT_VOCABULARY, model.vocab_size or 0)),
        ),
    )
    return make_plan(spec, host.this_environment("here"), registry.load_backends())


@attrs.frozen(kw_only=True)
class LoadResult:
    """One load, served once."""

    seconds: float
    tokens: int
    steps: int
    step_ms: float
    """Median of the steps without prompts, from one that is read to the next."""
    tokens_a_step: float
    """Of a request, in steps without prompts."""


def serve(runner: Runner, requests: Sequence[Request]) -> LoadResult:
    """Serve a load to its end. Raises ``RunError`` where a request has fewer tokens than it asked for."""
    first = len(runner.session.steps)
    gc.collect()
    started = perf_counter()
    results = runner.serve(requests)
    seconds = perf_counter() - started
    asked = {request.name: request.max_new_tokens for request in requests}
    if short := [result.name for result in results if result.output_tokens != asked[result.name]]:
        raise RunError(f"{len(short)} of {len(results)} requests have fewer tokens than they asked for: {short[:4]}")
    steps = [step for step in runner.session.steps[first:] if not step.prompts]
    drafted = sum(step.drafted for step in steps)
    return LoadResult(
        seconds=seconds,
        tokens=sum(result.output_tokens for result in results),
        steps=len(steps),
        step_ms=1e3 * float(np.median([step.seconds for step in steps])),
        tokens_a_step=1 + len(RATES) * sum(step.accepted for step in steps) / max(drafted, 1),
    )


def summary(rounds: dict[str, list[LoadResult]]) -> dict[str, Any]:
    """Return medians over the rounds of both runners, and the ratio of their tokens per second, round by round."""
    ratios = [
        (ahead.tokens / ahead.seconds) / (waiting.tokens / waiting.seconds)
        for ahead, waiting in zip(rounds[AHEAD], rounds[WAITING], strict=True)
    ]
    figures: dict[str, Any] = {
        name: {
            "tokens_per_second": float(np.median([each.tokens / each.seconds for each in served])),
            "step_ms": float(np.median([each.step_ms for each in served])),
            "steps": float(np.median([each.steps for each in served])),
            "tokens_a_step": float(np.median([each.tokens_a_step for each in served])),
        }
        for name, served in rounds.items()
    }
    return figures | {"rounds": len(ratios), "ratio": [float(np.median(ratios)), min(ratios), max(ratios)]}


def targets_of(results: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return what must hold of each load: nothing is lost, and the same share of drafts is accepted."""
    targets = {}
    for load, row in results.items():
        ratio, (ahead, waiting) = row["ratio"][0], (row[name]["tokens_a_step"] for name in (AHEAD, WAITING))
        targets[f"{load} requests: {ratio:.2f} times the tokens per second, at least {LEAST}"] = ratio >= LEAST
        same = f"{load} requests: {ahead:.2f} and {waiting:.2f} tokens a step"
        targets[same] = abs(ahead - waiting) < 0.1 * waiting
    return targets


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print the medians of the rounds."""
    shown = table("run-ahead with a drafter", "requests", "ahead, tokens/s", "waiting", "ratio", "step ms", "waiting")
    for load, row in results.items():
        ahead, waiting, (ratio, least, most) = row[AHEAD], row[WAITING], row["ratio"]
        rates = [f"{each['tokens_per_second']:,.0f}" for each in (ahead, waiting)]
        times = [f"{each['step_ms']:.2f}" for each in (ahead, waiting)]
        shown.add_row(load, *rates, f"{ratio:.2f} ({least:.2f} to {most:.2f})", *times)
    CONSOLE.print(shown)


def measure(model: Model, arguments: Any) -> dict[str, dict[str, Any]]:
    """Serve all loads by turns until the time is over; results are written after each round."""
    started, loads = perf_counter(), arguments.loads
    plan = plan_of(model, arguments.backend, loads)
    device = host.device_of(plan.environment)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_config(model, Path(folder))
        target = chosen.model_of(plan, Path(folder), device=device, seed=0)
        drafter = chosen.drafter_of(plan, target, "random")
        longest = arguments.prompt_tokens + arguments.output_tokens + len(RATES)
        pages = PageFormat(page_size=arguments.page_size, num_pages=1 + max(loads) * -(-longest // arguments.page_size))
        runners: dict[str, Runner] = {}
        for name in (AHEAD, WAITING):
            runner = Runner(
                plan,
                target,
                drafter,
                registry.load_backends(),
                grapher_for(device),
                pages=pages,
                device=device,
                options=Options(run_ahead=name == AHEAD, drafts_on_device=True, acceptance=RATES),
                compilation=runners[AHEAD].compilation if runners else None,
            )
            runners[name] = stack.enter_context(runner)
            runner.capture()
            CONSOLE.print(f"{name}: {plan.num_graphs} graphs after {perf_counter() - started:.0f} s")
        if behind := runners[AHEAD].policy.behind:
            raise RunError(f"nothing runs ahead with {arguments.backend}: {behind}; choose another --backend")
        rounds: dict[int, dict[str, list[LoadResult]]] = {load: {AHEAD: [], WAITING: []} for load in loads}
        number = -1  # the first round warms up
        while number < ROUNDS or perf_counter() - started < arguments.seconds:
            for load in loads:
                draw = np.random.default_rng(max(number, 0))
                tokens = draw.integers(target.vocab_size, size=(load, arguments.prompt_tokens)).tolist()
                requests = [
                    Request(name=f"r{index}", arrival=0.0, prompt=tuple(row), max_new_tokens=arguments.output_tokens)
                    for index, row in enumerate(tokens)
                ]
                for name in sorted(runners, reverse=number % 2 == 1):
                    served = serve(runners[name], requests)
                    if number >= 0:
                        rounds[load][name].append(served)
            number += 1
            CONSOLE.print(f"round {number}, {perf_counter() - started:.0f} s")
            if number:
                results = {str(load): summary(each) for load, each in rounds.items()}
                finish(arguments, {"backend": arguments.backend, "rates": RATES, "results": results})
    return results


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=120, help="no round begins after these (default 120)")
    options.add_argument("--backend", default="triton")
    options.add_argument("--loads", type=int, nargs="*", default=[1, 8, 64, 200], help="requests (default 1 8 64 200)")
    options.add_argument("--prompt-tokens", type=int, default=64)
    options.add_argument("--output-tokens", type=int, default=192)
    options.add_argument("--page-size", type=int, default=64)
    options.add_argument("--tiny", action="store_true", help="a small model on the reference backend")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    model = shape(max_model_len=1024)
    if arguments.tiny:
        arguments.backend = "reference"
        model = replace(model, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, hidden_size=256, vocab_size=512)
    results = measure(model, arguments)
    show(results)
    targets = targets_of(results)
    for text, holds in targets.items():
        CONSOLE.print(f"{verdict(holds)} {text}")
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
