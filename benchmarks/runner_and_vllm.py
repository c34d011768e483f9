"""Our runner next to real vLLM on one GPU: tokens per second of the same requests, by turns.

The shape of Qwen3-0.6B with random weights, in bfloat16. Two groups:

- ``plain``: 64 requests of 128 + 128 tokens; vLLM with its defaults (compiled, its own graphs).
- ``drafts``: 64 and 200 requests of 128 + 192 tokens with EAGLE-3, K = 3, and synthetic acceptance of 2.5 tokens a
  step; vLLM under our plan, with 45 graphs.

Our runner executes the plan of each group with every backend that is named, as ``run`` does by default on a GPU:
compiled, and steps launched ahead. vLLM's engine is a process of its own (benchmarks/_arriving_worker.py). All are
alive at once and only one works at a time: the order turns with each round, and ratios are within a round. One round
warms up.

Needs a CUDA GPU, vLLM 0.33, and this repository's distributions installed where vLLM finds its plugins.
"""

from __future__ import annotations

import gc
import json
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
from _arriving_rounds import Child, Group
from _bench import CONSOLE, conclude, finish, parser, print_table, shipped_environments
from _deployments import CASES, REGISTRY, missing
from _model_configs import DRAFT_VOCABULARY, RATES, small_model, write_small_config

from capture_planner.codec import dumps
from capture_planner.errors import RunError
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records.model import DraftModel, Method, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner_runner import host
from capture_planner_runner.graphs.recorded import grapher_for
from capture_planner_runner.launch.request import drafter_of, model_of
from capture_planner_runner.options import Options
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat
from capture_planner_runner.serving.workload import generated

VLLM = "vLLM"
PAGE = 64
LEAST_ROUNDS = 3


REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 100, 128, 160, 200, 256)
"""The plan's sizes of every role."""


@attrs.frozen(kw_only=True)
class Comparison:
    """Our plan, the loads, and how many times vLLM's tokens per second ours must have."""

    mode: GraphMode
    sizes: Sizes
    loads: tuple[int, ...]
    output: int
    least: float
    drafts: Speculative | None = None
    acceptance: tuple[float, ...] = ()
    under_plan: bool = False
    """Whether vLLM runs under our plan; it runs with its defaults otherwise."""

    def plan(self, backend: str) -> Plan:
        """Return the plan of a server of 256 requests, for a backend of ours."""
        spec = Spec(
            model=small_model(max_model_len=4096),
            limits=Limits(max_num_reqs=256, max_num_tokens=8192),
            mode=self.mode,
            backend=backend,
            sizes=self.sizes,
            speculative=self.drafts,
        )
        return make_plan(spec, shipped_environments()["h200"], REGISTRY)


COMPARISONS = {
    "plain": Comparison(
        mode=GraphMode.FULL_AND_PIECEWISE,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=REQUESTS, num_tokens=(*REQUESTS, 512)),
        loads=(64,),
        output=128,
        least=1.0,
    ),
    "drafts": Comparison(
        mode=GraphMode.FULL_DECODE_ONLY,
        sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=REQUESTS),
        loads=(64, 200),
        output=192,
        least=0.9,
        drafts=Speculative(method=Method.EAGLE3, num_tokens=3, model=DraftModel(vocab_size=DRAFT_VOCABULARY)),
        acceptance=RATES,
        under_plan=True,
    ),
}
PROMPT = 128
WORKER = Path(__file__).with_name("_arriving_worker.py")

Serve = Callable[[int, int], float]
"""Serve so many requests, by a random seed; return tokens per second."""


def vllm(stack: ExitStack, comparison: Comparison, folder: Path) -> tuple[dict[str, Any], Serve]:
    """Start vLLM; return what it is, and what serves a load."""
    variables = {"CAPTURE_PLANNER_OBSERVE": str(folder / "observed")}
    options: dict[str, Any] = {}
    if comparison.under_plan:
        file = folder / "plan.yaml"
        file.write_text(dumps(comparison.plan("flash_attention")), encoding="utf-8")
        variables["CAPTURE_PLANNER_PLAN"] = str(file)
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": comparison.mode.value}
    k = comparison.drafts.num_tokens if comparison.drafts else 0
    group = Group(name=VLLM, k=k, options=options, loads=(), columns=())
    command = [sys.executable, str(WORKER), json.dumps(group.arguments(folder))]
    engine = stack.enter_context(Child(VLLM, command, variables, folder / "vllm.log"))

    def serve(requests: int, seed: int) -> float:
        load = {"in_flight": requests, "requests": requests, "prompt": PROMPT, "output": comparison.output}
        return float(engine.answer({"load": load, "tag": f"s{seed}", "seed": seed})["tokens_per_second"])

    return engine.answer({})["facts"], serve


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
            drafter_of(plan, target, "random"),
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
    comparison: Comparison, folder: Path, arguments: Any, end: float
) -> Iterator[tuple[dict[str, Any], dict[int, dict[str, list[float]]]]]:
    """Start all engines, and let them serve by turns; yield what they are and all rates after each round."""
    facts: dict[str, Any] = {}
    served: dict[str, Serve] = {}
    with ExitStack() as stack:
        facts[VLLM], served[VLLM] = vllm(stack, comparison, folder)
        CONSOLE.print(f"{VLLM}: {facts[VLLM]}", markup=False, highlight=False)
        mine = comparison.plan(CASES[arguments.backends[0]].backend)
        write_small_config(folder)
        target = model_of(mine, folder, device=host.device_of(mine.environment), seed=0)
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
            end = began + arguments.seconds * number / len(arguments.groups)
            for facts, rates in measure(comparison, folder, arguments, end):
                results[name] = {"engines": facts, "loads": summary(rates)}
                finish(arguments, {"acceptance": RATES, "results": results, "targets": targets})
        loads = results[name]["loads"]
        cells = (
            (load, *(f"{each['tokens_per_second']:,.0f} ({each['of_vllm'][0]:.2f}x)" for each in row.values()))
            for load, row in loads.items()
        )
        print_table(name, ("requests", *loads[str(comparison.loads[0])]), cells)
        for load, row in loads.items():
            best = max((each["of_vllm"][0], own) for own, each in row.items() if own != VLLM)
            text = f"{name}: {load} requests, {best[0]:.2f} times vLLM's tokens per second with {best[1]}"
            targets[f"{text}, at least {comparison.least}"] = best[0] >= comparison.least
    return conclude(arguments, {"acceptance": RATES, "results": results}, targets)


if __name__ == "__main__":
    sys.exit(main())
