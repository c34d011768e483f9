"""Our runner next to real vLLM on one GPU: tokens per second of the same requests, by turns.

The shape of Qwen3-0.6B with random weights, in bfloat16. Two groups:

- ``plain``: 64 requests of 128 + 128 tokens; vLLM with its defaults (compiled, its own graphs).
- ``drafts``: 64 and 200 requests of 128 + 192 tokens with EAGLE-3, K = 3, and synthetic acceptance of 2.5 tokens a
  step; vLLM under our plan, with 45 graphs.

Our runner executes the plan of each group with every backend that is named, as ``run`` does by default on a GPU:
compiled, and steps launched ahead. vLLM's engine is a process of its own (benchmarks/_vllm_worker.py). All are alive at
once and only one works at a time: the order turns with each round, and ratios are within a round. One round warms up.

Needs a CUDA GPU, vLLM 0.33, and this repository's distributions installed where vLLM finds its plugins.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch
from _bench import CONSOLE, finish, parser, table, verdict
from _deployments import CASES, REGISTRY, missing
from _model_configs import write_configs
from _qwen3 import RATES, write_config
from _vllm_cases import EAGLE, REQUESTS, Case, Group, groups, planned
from vllm_in_process import Engine

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode
from capture_planner.records.model import Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Policy, Sizes
from capture_planner.runtime import chosen, host
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.options import Options
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.workload import generated

VLLM = "vLLM"
PAGE = 64
LEAST_ROUNDS = 3


@attrs.frozen(kw_only=True)
class Comparison:
    """vLLM's case, our plan, the loads, and how many times vLLM's tokens per second ours must have."""

    group: str
    case: str
    mode: GraphMode
    sizes: Sizes
    loads: tuple[int, ...]
    output: int
    least: float
    drafts: Speculative | None = None
    acceptance: tuple[float, ...] = ()

    def plan(self, backend: str) -> Plan:
        """Return the plan of a server of 256 requests, for a backend of ours."""
        return planned("small", self.sizes, self.mode, self.drafts, backend)


COMPARISONS = {
    "plain": Comparison(
        group="compile",
        case="vLLM by itself",
        mode=GraphMode.FULL_AND_PIECEWISE,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=REQUESTS, num_tokens=(*REQUESTS, 512)),
        loads=(64,),
        output=128,
        least=1.0,
    ),
    "drafts": Comparison(
        group="main",
        case="plan",
        mode=GraphMode.FULL_DECODE_ONLY,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=REQUESTS),
        loads=(64, 200),
        output=192,
        least=0.9,
        drafts=EAGLE,
        acceptance=RATES,
    ),
}
PROMPT = 128

Serve = Callable[[int, int], float]
"""Serve so many requests, by a random seed; return tokens per second."""


def vllm(stack: ExitStack, case: Case, comparison: Comparison, folder: Path) -> tuple[dict[str, Any], Serve]:
    """Start vLLM; return what it is, and what serves a load."""
    engine = stack.enter_context(Engine(case, folder))
    facts = engine.answer({})["facts"]

    def serve(requests: int, seed: int) -> float:
        load = {"requests": requests, "prompt": PROMPT, "output": comparison.output, "seed": seed}
        return float(engine.answer(load)["tokens_per_second"])

    return facts, serve


def ours(stack: ExitStack, plan: Plan, target: Any, comparison: Comparison) -> tuple[dict[str, Any], Serve]:
    """Start our runner; return what it is, and what serves a load."""
    device = host.device_of(plan.environment)
    longest = PROMPT + comparison.output + len(RATES)
    pages = PageFormat(page_size=PAGE, num_pages=1 + max(comparison.loads) * -(-longest // PAGE))
    started = perf_counter()
    runner = stack.enter_context(
        Runner(
            plan,
            target,
            chosen.drafter_of(plan, target, "random"),
            REGISTRY,
            grapher_for(device),
            pages=pages,
            device=device,
            options=Options(acceptance=comparison.acceptance),
        )
    )
    runner.capture()
    facts = {
        "graphs": {role.role.value: len(role.entries) for role in plan.roles},
        "start_seconds": round(perf_counter() - started, 2),
        "not ahead": runner.policy.behind,
        "not compiled": list(runner.compilation.not_compiled),
    }

    def serve(requests: int, seed: int) -> float:
        output = (comparison.output, comparison.output)
        load = generated(
            requests, seed=seed, rate=None, prompt_tokens=(PROMPT, PROMPT), output_tokens=output,
            vocab_size=target.vocab_size,
        )  # fmt: skip
        gc.collect()
        began = perf_counter()
        answers = runner.serve(load)
        seconds = perf_counter() - began
        if short := [answer.name for answer in answers if answer.output_tokens != comparison.output]:
            raise RunError(
                f"{len(short)} of {len(answers)} requests have fewer tokens than they asked for: {short[:4]}"
            )
        return sum(answer.output_tokens for answer in answers) / seconds

    return facts, serve


def measure(
    comparison: Comparison, group: Group, folder: Path, arguments: Any, end: float
) -> Iterator[tuple[dict[str, Any], dict[int, dict[str, list[float]]]]]:
    """Start all engines, and let them serve by turns; yield what they are and all rates after each round."""
    (case,) = (case for case in group.cases if case.name == comparison.case)
    facts: dict[str, Any] = {}
    served: dict[str, Serve] = {}
    with ExitStack() as stack:
        # vLLM first: its memory profile needs the GPU for itself.
        facts[VLLM], served[VLLM] = vllm(stack, case, comparison, folder)
        CONSOLE.print(f"{VLLM}: {facts[VLLM]}", markup=False, highlight=False)
        mine = comparison.plan(CASES[arguments.backends[0]].backend)
        write_config(mine.model, folder)
        target = chosen.model_of(mine, folder, device=host.device_of(mine.environment), seed=0)
        for name in arguments.backends:
            if (why := missing(CASES[name], torch.device("cuda:0"))) is not None:
                facts[name] = {"skipped": why}
                continue
            try:
                facts[name], served[name] = ours(stack, comparison.plan(CASES[name].backend), target, comparison)
            except Exception as error:  # one backend that breaks costs none of the others
                facts[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
            CONSOLE.print(f"{name}: {facts[name]}", markup=False, highlight=False)
        rates: dict[int, dict[str, list[float]]] = {load: {name: [] for name in served} for load in comparison.loads}
        for number in range(-1, arguments.rounds):  # the first one warms up
            if number >= LEAST_ROUNDS and perf_counter() > end:
                break
            for load in comparison.loads:
                names = list(served)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    rate = served[name](load, number + 1)
                    if number >= 0:
                        rates[load][name].append(round(rate, 1))
            if number >= 0:
                yield facts, rates


def summary(rates: Mapping[int, Mapping[str, list[float]]]) -> dict[str, Any]:
    """Return the medians, and each backend's ratio to vLLM: the median over the rounds, the least and the most."""
    found: dict[str, Any] = {}
    for load, by_name in rates.items():
        row: dict[str, Any] = {}
        for name, each in by_name.items():
            ratios = [one / other for one, other in zip(each, by_name[VLLM], strict=True)]
            row[name] = {
                "tokens_per_second": statistics.median(each),
                "rounds": each,
                "of_vllm": [round(value, 4) for value in (statistics.median(ratios), min(ratios), max(ratios))],
            }
        found[str(load)] = row
    return found


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--groups", nargs="*", default=list(COMPARISONS), choices=list(COMPARISONS))
    options.add_argument("--backends", nargs="*", default=["triton", "flash_attention"], choices=list(CASES))
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=240.0, help="the last begin of a fourth round (default 240)")
    options.add_argument("--utilization", type=float, default=0.14, help="of the GPU's memory, for vLLM (default 0.14)")
    options.add_argument("--vllm-path", help="PYTHONPATH of vLLM's process, where it is not this one's")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    if arguments.vllm_path:
        os.environ["PYTHONPATH"] = arguments.vllm_path
    results: dict[str, Any] = {}
    targets: dict[str, bool] = {}
    began = perf_counter()
    for number, name in enumerate(arguments.groups, 1):
        comparison = COMPARISONS[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_configs(folder)
            group = next(group for group in groups(folder, arguments.utilization) if group.name == comparison.group)
            end = began + arguments.seconds * number / len(arguments.groups)
            for facts, rates in measure(comparison, group, folder, arguments, end):
                results[name] = {"engines": facts, "loads": summary(rates)}
                finish(arguments, {"acceptance": RATES, "results": results, "targets": targets})
        shown = table(name, "requests", *results[name]["loads"][str(comparison.loads[0])])
        for load, row in results[name]["loads"].items():
            shown.add_row(
                load, *(f"{each['tokens_per_second']:,.0f} ({each['of_vllm'][0]:.2f}x)" for each in row.values())
            )
            best = max((each["of_vllm"][0], own) for own, each in row.items() if own != VLLM)
            text = f"{name}: {load} requests, {best[0]:.2f} times vLLM's tokens per second with {best[1]}"
            targets[f"{text}, at least {comparison.least}"] = best[0] >= comparison.least
        CONSOLE.print(shown)
        finish(arguments, {"acceptance": RATES, "results": results, "targets": targets})
    for text, holds in targets.items():
        CONSOLE.print(f"{verdict(holds)} {text}")
    return 0 if targets and all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
