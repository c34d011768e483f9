"""transformers' continuous batching by itself and under a plan: Qwen3-0.6B's shape, random weights, paged SDPA.

Two loads. ``fixed``: all requests at once, 128 prompt and 128 new tokens each. ``varied``: prompts and outputs of
other lengths, which arrive at given steps, so that the sizes of steps vary. In each round both contenders start anew,
warm up, and serve the fixed load twice (the second counts: stock transformers has captured by then) and the varied
load twice (the first counts for the time of a step: its sizes are new). The order alternates. Then greedy tokens are
compared in float32: eager, stock graphs, and the plan's.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import transformers
from _bench import CONSOLE, finish, parser, table, verdict
from _qwen3 import qwen3_config, shape
from _transformers import EAGER, PLANNED, STOCK, Request, Serving, settle
from transformers import AutoModelForCausalLM, Qwen3Config

from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records.model import Model
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.runtime.host import this_environment


@attrs.frozen(kw_only=True)
class Scale:
    """What is measured: the sizes of model and load."""

    model: Model
    config: Qwen3Config
    requests: int
    length: int
    """Tokens of a prompt, and of an output."""
    most: int
    """Tokens in a step."""
    sizes: tuple[int, ...]
    reads: tuple[int, ...]
    dtype: torch.dtype
    pages: int | None = None
    """Pages of 16 tokens of the KV cache; None: what memory allows."""


def full() -> Scale:
    """Return the measured scale."""
    model = shape(max_model_len=1024)
    return Scale(
        model=model,
        config=qwen3_config(model),
        requests=64,
        length=128,
        most=8192,
        # Multiples of 16, as the fast kernels of SDPA want aligned masks.
        sizes=(16, 32, 64, 128, 256, 512, 1024),
        reads=(0, *range(2048, 16385, 2048), 20480),
        dtype=torch.bfloat16,
    )


def tiny() -> Scale:
    """Return a scale for a CPU and a test."""
    model = Model(name="tiny", num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=128, max_model_len=64)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return Scale(
        model=model,
        config=config,
        requests=6,
        length=8,
        most=64,
        sizes=(1, 2, 4, 8, 16),
        reads=(0, 64, 128),
        dtype=torch.float32,
        pages=32,
    )


def planned(scale: Scale) -> Plan:
    """Return the plan: FULL graphs for any batch of up to the largest size; larger prompts run eager."""
    spec = Spec(
        model=scale.model,
        limits=Limits(max_num_reqs=scale.requests, max_num_tokens=scale.most),
        mode=GraphMode.FULL,
        backend="reference",
        sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=scale.sizes),
    )
    return make_plan(spec, this_environment("here"), registry.load_backends())


def fixed(scale: Scale, seed: int) -> list[Request]:
    """Return equal requests that arrive at once."""
    words = random.Random(seed)
    return [
        Request(step=0, prompt=_prompt(words, scale, scale.length), output=scale.length) for _ in range(scale.requests)
    ]


def varied(scale: Scale, seed: int) -> list[Request]:
    """Return half of the requests at once and the same number again one by one, of an eighth to twice the length."""
    words = random.Random(1000 + seed)
    least, most = max(1, scale.length // 8), 2 * scale.length - scale.length // 8
    arrivals = [0] * (scale.requests // 2) + [
        1 + index * scale.length // scale.requests for index in range(scale.requests)
    ]
    return [
        Request(step=step, prompt=_prompt(words, scale, words.randint(least, most)), output=words.randint(least, most))
        for step in arrivals
    ]


def _prompt(words: random.Random, scale: Scale, length: int) -> tuple[int, ...]:
    return tuple(words.randrange(scale.config.vocab_size) for _ in range(length))


def _model(scale: Scale, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        factory: Any = AutoModelForCausalLM
        return factory.from_config(scale.config, dtype=dtype, attn_implementation="sdpa").eval().requires_grad_(False)


def measured(model: Any, scale: Scale, contender: str, plan: Plan) -> dict[str, Any]:
    """Return the figures of one start of one contender."""
    serving = Serving(model, contender, plan, scale.reads, scale.pages)
    phases = {
        "fixed, first": serving.serve(fixed(scale, 0)),
        "fixed": serving.serve(fixed(scale, 1)),
        "varied": serving.serve(varied(scale, 0)),
        "varied, again": serving.serve(varied(scale, 1)),
    }
    for phase in phases.values():
        del phase["tokens"]
    result = {
        "warmup_seconds": serving.warmup_seconds,
        "graphs_at_warmup": serving.graphs,
        "captures_while_serving": serving.captures,
        "eager_steps": serving.eager(),
        "phases": phases,
    }
    serving.close()
    return result


def equality(scale: Scale, device: str, plan: Plan) -> dict[str, Any]:
    """Return for how many requests stock graphs and the plan's give the greedy tokens of an eager run, in float32."""
    model = _model(scale, device, torch.float32)
    tokens = {}
    for contender in (EAGER, STOCK, PLANNED):
        serving = Serving(model, contender, plan, scale.reads, scale.pages)
        tokens[contender] = serving.serve(varied(scale, 7)[::3])["tokens"]
        serving.close()
    same = {
        contender: sum(one == other for one, other in zip(tokens[EAGER], tokens[contender], strict=True))
        for contender in (STOCK, PLANNED)
    }
    return {"requests": len(tokens[EAGER]), "equal_to_eager": same}


def summary(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return medians over the rounds, with the least and the most."""

    def spread(values: Sequence[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "least": min(values), "most": max(values)}

    found: dict[str, dict[str, Any]] = {}
    for contender in (STOCK, PLANNED):
        runs = [one[contender] for one in rounds]
        found[contender] = {
            "warmup_seconds": spread([run["warmup_seconds"] for run in runs]),
            "graphs_at_warmup": runs[0]["graphs_at_warmup"],
            "captures_while_serving": max(run["captures_while_serving"] for run in runs),
            **{
                f"{phase}: {figure}": spread([run["phases"][phase][figure] for run in runs])
                for phase in runs[0]["phases"]
                for figure in ("tokens_per_second", "step_p50_ms", "step_p99_ms", "step_max_ms", "captures")
            },
        }
    return found


def main() -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--tiny", action="store_true", help="the same with a tiny model; without graphs on a CPU")
    options.add_argument("--no-equality", action="store_true", help="skip the comparison of tokens")
    arguments = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.tiny:
        raise SystemExit("no CUDA device: --tiny runs on a CPU")
    log: Any = transformers.logging
    log.set_verbosity_error()
    torch.set_num_threads(1)
    scale = tiny() if arguments.tiny else full()
    plan = planned(scale)
    model = _model(scale, device, scale.dtype)
    rounds = []
    results: dict[str, Any] = {"transformers": transformers.__version__, "device": device, "kv_sizes": scale.reads}
    for number in range(arguments.rounds):
        order = (STOCK, PLANNED) if number % 2 == 0 else (PLANNED, STOCK)
        rounds.append({contender: measured(model, scale, contender, plan) for contender in order})
        CONSOLE.print(f"round {number + 1}: {rounds[-1]}", markup=False, soft_wrap=True)
        # Written anew after each round: a run that is cut off keeps what it has.
        finish(arguments, {"results": results | {"rounds": rounds}})
    del model
    settle()
    figures = summary(rounds)
    stock, ours = figures[STOCK], figures[PLANNED]
    results |= {"summary": figures, "rounds": rounds}
    targets = {
        "tokens/s of the fixed load: at least stock's": ours["fixed: tokens_per_second"]["median"]
        >= stock["fixed: tokens_per_second"]["median"],
        "p99 of a step while sizes vary: at most half of stock's": 2 * ours["varied: step_p99_ms"]["median"]
        <= stock["varied: step_p99_ms"]["median"],
        "no capture while serving": ours["captures_while_serving"] == 0,
    }
    if not arguments.no_equality:
        results["equality"] = same = equality(scale, device, plan)
        targets["greedy tokens in float32 equal those of an eager run"] = (
            same["equal_to_eager"][PLANNED] == same["requests"]
        )
    shown = table("transformers' continuous batching", "figure", STOCK, PLANNED)
    for figure, value in stock.items():
        cells = [
            f"{cell['median']:,.1f} ({cell['least']:,.1f}-{cell['most']:,.1f})" if isinstance(cell, dict) else str(cell)
            for cell in (value, ours[figure])
        ]
        shown.add_row(figure, *cells)
    CONSOLE.print(shown)
    for target, holds in targets.items():
        CONSOLE.print(f"{target}: {verdict(holds)}")
    finish(arguments, {"results": results, "targets": targets})
    return 0 if all(targets.values()) or arguments.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
