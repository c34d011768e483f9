"""What graphs of the drafter are worth in our runner: time per output token and inter-token latency.

Three plans of the shape of Qwen3-0.6B with an EAGLE-3 drafter (K=3): all roles with full graphs, draft decodes eager,
and all roles eager. Their runners share one model, and serve the same requests by turns, a load and a round at a time.
Until ``--seconds`` are over there are further rounds, at least three.

Weights are random, but each token's likeliest successor is the next one of the vocabulary, by a wide margin. So all
plans serve the same tokens in the same steps, and drafts are right by a chance that is chosen: 0.69 for each draft if
those before it are right, which gives 2.5 tokens a step, as in benchmarks/vllm_in_process.py. A drafter's work is done
in full, and only its proposals are replaced.

Time per output token is a request's, from its first token to its last. Inter-token latency is a step's, of steps
without prompts: what a client waits between two deliveries. ``--tiny`` tries the script on a CPU.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import numpy as np
import torch
from _bench import CONSOLE, finish, parser, table, verdict
from _qwen3 import DRAFT_VOCABULARY, shape, write_config

from capture_planner.errors import RunError
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records._base import replace
from capture_planner.records.environment import Environment
from capture_planner.records.model import DraftModel, Method, Model, Speculative
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Roles, RoleSpec, Sizes, Spec
from capture_planner.runtime import chosen, host
from capture_planner.runtime.graphs.choice import grapher_for
from capture_planner.runtime.models.protocols import Drafter, TargetModel
from capture_planner.runtime.runner import Runner
from capture_planner.runtime.serving.kv import PageFormat
from capture_planner.runtime.serving.workload import Request

K, CHANCE = 3, 0.69
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
ROUNDS = 3
FULL, DECODES_EAGER, EAGER = "draft roles full", "draft decodes eager", "all eager"


def plans(model: Model, backend: str, environment: Environment, most: int) -> dict[str, Plan]:
    """Return the three plans of a server of ``most`` requests, by name."""
    eager = RoleSpec(mode=GraphMode.NONE)
    modes = {
        FULL: (GraphMode.FULL_DECODE_ONLY, Roles()),
        DECODES_EAGER: (GraphMode.FULL_DECODE_ONLY, Roles(draft_decode=eager)),
        EAGER: (GraphMode.NONE, Roles()),
    }
    return {
        name: make_plan(
            Spec(
                model=model,
                limits=Limits(max_num_reqs=most, max_num_tokens=8192),
                mode=mode,
                backend=backend,
                sizes=Sizes(policy=Policy.EXPLICIT, num_reqs=tuple(sorted({most, *(n for n in SIZES if n < most)}))),
                speculative=Speculative(
                    method=Method.EAGLE3,
                    num_tokens=K,
                    model=DraftModel(vocab_size=min(DRAFT_VOCABULARY, model.vocab_size or 0)),
                ),
                roles=roles,
            ),
            environment,
            registry.load_backends(),
        )
        for name, (mode, roles) in modes.items()
    }


@torch.no_grad()
def count_upwards(model: TargetModel) -> None:
    """Make each token's successor the next one of the vocabulary: the head has the embeddings, rolled by one row."""
    weights = {name: getattr(module, attribute) for name, module, attribute in model.weights()}
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    torch.manual_seed(0)
    # Far above what random layers add to them, so that no rounding changes a token.
    embeddings.normal_()
    head.copy_(embeddings.roll(1, 0))


def requests_of(count: int, prompt: int, output: int, vocabulary: int, seed: int) -> tuple[Request, ...]:
    """Return requests of random tokens that all arrive at once."""
    tokens = np.random.default_rng(seed).integers(vocabulary, size=(count, prompt))
    return tuple(
        Request(name=f"r{index}", arrival=0.0, prompt=tuple(row), max_new_tokens=output)
        for index, row in enumerate(tokens.tolist())
    )


def answer(request: Request, vocabulary: int) -> tuple[int, ...]:
    """Return a prompt and what the model says to it, with the drafts past its end."""
    last, most = request.prompt[-1], request.max_new_tokens + K
    return request.prompt + tuple((last + 1 + index) % vocabulary for index in range(most))


@attrs.frozen(kw_only=True)
class LoadResult:
    """One load, served once; times in seconds."""

    seconds: float
    per_token: tuple[float, ...]
    """Of each request."""
    between: tuple[float, ...]
    """Of each step without prompts."""
    tokens: int
    drafted: int
    accepted: int


def serve(runner: Runner, requests: Sequence[Request]) -> LoadResult:
    """Serve a load; raises ``RunError`` for tokens that the model cannot have said."""
    answers = {request.name: answer(request, runner.model.vocab_size) for request in requests}
    first = len(runner.session.steps)
    gc.collect()
    started = perf_counter()
    results = runner.serve(requests, answers=answers)
    seconds = perf_counter() - started
    prompts = {request.name: len(request.prompt) for request in requests}
    if wrong := [r.name for r in results if r.tokens != answers[r.name][prompts[r.name] :][: r.output_tokens]]:
        raise RunError(f"{len(wrong)} of {len(results)} requests have other tokens than the model says: {wrong[:4]}")
    steps = runner.session.steps[first:]
    return LoadResult(
        seconds=seconds,
        per_token=tuple(
            (result.finished - result.first_token) / (result.output_tokens - 1)
            for result in results
            if result.finished is not None and result.first_token is not None
        ),
        between=tuple(step.seconds for step in steps if not step.prompts),
        tokens=sum(result.output_tokens for result in results),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(step.accepted for step in steps),
    )


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Return the median of the rounds, the least and the most."""
    found = list(values)
    return float(np.median(found)), min(found), max(found)


def summary(rounds: Sequence[LoadResult]) -> dict[str, Any]:
    """Return the medians over the rounds, each with its spread."""
    percentiles = {"p50": 50, "p99": 99}
    return {
        "rounds": len(rounds),
        "tokens_per_second": spread(served.tokens / served.seconds for served in rounds),
        **{
            f"{name}_{label}": spread(1e3 * float(np.percentile(getattr(served, field), share)) for served in rounds)
            for name, field in (("tpot_ms", "per_token"), ("itl_ms", "between"))
            for label, share in percentiles.items()
        },
        "steps": len(rounds[-1].between),
        "drafted": rounds[-1].drafted,
        "accepted": rounds[-1].accepted,
    }


def targets_of(results: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return what must hold of each load: graphs change the time alone, and make it shorter."""
    targets = {}
    for load, rows in results.items():
        counts = {(row["drafted"], row["accepted"], row["steps"]) for row in rows.values()}
        targets[f"{load} requests: the same steps, drafts and accepted drafts"] = len(counts) == 1
        for name in ("tpot_ms_p50", "itl_ms_p50"):
            full, decodes, eager = (rows[case][name][0] for case in (FULL, DECODES_EAGER, EAGER))
            targets[f"{load} requests: {name} {full:.2f} < {decodes:.2f} < {eager:.2f}"] = full < decodes < eager
    return targets


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print the medians of the rounds."""
    for load, rows in results.items():
        shown = table(f"{load} requests, ms", "plan", "TPOT p50", "p99", "ITL p50", "p99", "tokens/s", "rounds")
        for name, row in rows.items():
            cells = [f"{row[figure][0]:.2f}" for figure in ("tpot_ms_p50", "tpot_ms_p99", "itl_ms_p50", "itl_ms_p99")]
            shown.add_row(name, *cells, f"{row['tokens_per_second'][0]:,.0f}", str(row["rounds"]))
        CONSOLE.print(shown)


def measure(model: Model, arguments: Any) -> dict[str, dict[str, Any]]:
    """Serve all loads by turns until the time is over; results are written after each round."""
    environment, started = host.this_environment("here"), perf_counter()
    by_name = plans(model, arguments.backend, environment, max(arguments.loads))
    device = host.device_of(environment)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_config(model, Path(folder))
        target = chosen.model_of(by_name[FULL], Path(folder), device=device, seed=0)
        count_upwards(target)
        drafter: Drafter | None = chosen.drafter_of(by_name[FULL], target, "chance", chance=CHANCE)
        longest = arguments.prompt_tokens + arguments.output_tokens + K
        pages = PageFormat(
            page_size=arguments.page_size, num_pages=1 + max(arguments.loads) * -(-longest // arguments.page_size)
        )
        runners = {}
        for name, plan in by_name.items():
            CONSOLE.print(f"{name}: {plan.num_graphs} graphs ...")
            runner = Runner(
                plan, target, drafter, registry.load_backends(), grapher_for(device), pages=pages, device=device
            )
            runners[name] = stack.enter_context(runner)
            runner.capture()
        rounds: dict[int, dict[str, list[LoadResult]]] = {
            load: {name: [] for name in runners} for load in arguments.loads
        }
        number = -1  # the first round warms up
        while number < ROUNDS or perf_counter() - started < arguments.seconds:
            for load in arguments.loads:
                requests = requests_of(
                    load, arguments.prompt_tokens, arguments.output_tokens, target.vocab_size, max(number, 0)
                )
                names = list(runners)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    served = serve(runners[name], requests)
                    if number >= 0:
                        rounds[load][name].append(served)
            number += 1
            CONSOLE.print(f"round {number}, {perf_counter() - started:.0f} s")
            if number:
                results = {
                    str(load): {name: summary(each) for name, each in rows.items()} for load, rows in rounds.items()
                }
                finish(arguments, {"backend": arguments.backend, "results": results, "targets": targets_of(results)})
    return results


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=180, help="no round begins after these (default 180)")
    options.add_argument("--backend", default="flash_attention")
    options.add_argument("--loads", type=int, nargs="*", default=[8, 64], help="requests (default 8 64)")
    options.add_argument("--prompt-tokens", type=int, default=128)
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
