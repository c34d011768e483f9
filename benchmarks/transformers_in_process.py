"""transformers' continuous batching by itself and under a plan: Qwen3-0.6B's shape, random weights, paged SDPA.

Two loads. ``fixed``: all requests at once, 128 prompt and 128 new tokens each. ``varied``: prompts and outputs of
other lengths, which arrive at given steps, so that the sizes of steps vary. In each round both contenders start anew,
warm up, and serve the fixed load twice (the second counts: stock transformers has captured by then) and the varied
load twice (the first counts for the time of a step: its sizes are new). The order alternates. Then greedy tokens are
compared in float32: eager, stock graphs, and the plan's.
"""

from __future__ import annotations

import gc
import inspect
import random
import statistics
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import attrs
import torch
import transformers
from _bench import CONSOLE, finish, parser, table, verdict
from _qwen3 import qwen3_config, shape
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen3Config

import capture_planner_transformers
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.plugins import registry
from capture_planner.records.model import Model
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner.runtime.host import this_environment

STOCK, PLANNED, EAGER = "stock", "plan", "eager"


@attrs.frozen(kw_only=True)
class Request:
    """A request that arrives before a given step."""

    step: int
    prompt: tuple[int, ...]
    output: int


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


class Serving:
    """One manager of one contender, from its warm-up on, with a clock around each step."""

    def __init__(self, model: Any, scale: Scale, contender: str, plan: Plan) -> None:
        cuda = model.device.type == "cuda"
        greedy: Any = GenerationConfig
        options: dict[str, Any] = {
            "use_cuda_graph": cuda and contender != EAGER,
            # A load must not reuse the cached prompts of an earlier one.
            "allow_block_sharing": False,
            # It might download the attention that it switches to.
            "auto_switch_to_flash": False,
            "max_batch_tokens": scale.most,
            "num_blocks": scale.pages,
            # Room for the graphs of both.
            "max_memory_percent": 0.8,
        }
        if scale.pages is not None:
            options |= {"block_size": 16, "page_size": 16}
        known = inspect.signature(ContinuousBatchingConfig).parameters
        self._manager = model.init_continuous_batching(
            generation_config=greedy(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=scale.requests,
                **{name: value for name, value in options.items() if name in known},
            ),
        )
        if contender == PLANNED:
            capture_planner_transformers.apply(self._manager, plan, kv_sizes=scale.reads)
        self.captures = 0
        started = perf_counter()
        self._manager.warmup()
        _settle()
        self.warmup_seconds = perf_counter() - started
        runner = self._manager.batch_processor.model_runner
        self.graphs = sum(len(buffer._storage) for buffer in _buffers(self._manager.batch_processor.inputs_and_outputs))
        capture = runner._capture_graph

        def counted(*arguments: Any) -> None:
            self.captures += 1
            capture(*arguments)

        runner._capture_graph = counted
        if contender == EAGER:
            runner.compute_batch = _ordered(runner)
        self._waiting: list[Request] = []
        self._first = 0
        self._started = 0.0
        self.steps: list[float] = []
        body = self._manager._generation_loop_body

        def timed(*arguments: Any, **named: Any) -> bool:
            self._submit()
            before, begin = self._manager.current_batch, perf_counter()
            more: bool = body(*arguments, **named)
            if self._manager.current_batch > before:
                self.steps.append(perf_counter() - begin)
            return more

        self._manager._generation_loop_body = timed
        self._manager.start()

    def _submit(self) -> None:
        """Add the requests whose step has come; while nothing runs, the next one is due."""
        if self._waiting and not self._started:
            self._started = perf_counter()
        now = len(self.steps) - self._first
        idle = self._manager.input_queue.empty() and not self._manager.batch_processor.has_pending_requests()
        while self._waiting and (idle or self._waiting[0].step <= now):
            request, idle = self._waiting.pop(0), False
            self._manager.add_request(list(request.prompt), max_new_tokens=request.output)

    def serve(self, load: Sequence[Request]) -> dict[str, Any]:
        """Serve one load and return its figures; ``tokens`` are in the order of the requests."""
        captures, self._first, base = self.captures, len(self.steps), self._manager._request_counter
        self._started = 0.0
        self._waiting = sorted(load, key=lambda request: request.step)
        order = sorted(range(len(load)), key=lambda index: load[index].step)
        done: dict[str, list[int]] = {}
        while len(done) < len(load):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise SystemExit("transformers' generation thread ended; its log has the reason")
                continue
            if result.error is not None:
                raise SystemExit(f"transformers failed: {result.error}")
            if result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        seconds = perf_counter() - self._started
        steps = sorted(1000 * step for step in self.steps[self._first :])
        tokens = {index: done[f"req_{base + place}"] for place, index in enumerate(order)}
        return {
            "tokens_per_second": sum(map(len, done.values())) / seconds,
            "step_p50_ms": _quantile(steps, 0.50),
            "step_p99_ms": _quantile(steps, 0.99),
            "step_max_ms": steps[-1],
            "steps": len(steps),
            "captures": self.captures - captures,
            "tokens": [tokens[index] for index in range(len(load))],
        }

    def eager(self) -> dict[str, int]:
        """Return how many steps of a plan ran eager, by reason."""
        ledger = getattr(self._manager.batch_processor.model_runner, "ledger", None)
        found: dict[str, int] = {}
        for (key, reason), count in () if ledger is None else ledger.steps.items():
            if key is None:
                found[str(reason)] = found.get(str(reason), 0) + count
        return found

    def close(self) -> None:
        """Stop the manager and free its memory."""
        self._manager.stop(block=True)
        self._manager.destroy()
        del self._manager
        _settle()


def _buffers(inputs_and_outputs: Any) -> list[Any]:
    pairs = getattr(inputs_and_outputs, "io_pairs", None)
    return [inputs_and_outputs.graphs] if pairs is None else [pair.device_io.graphs for pair in pairs]


def _ordered(runner: Any) -> Any:
    """Return ``compute_batch`` such that a step waits for its inputs, so that the reference is one.

    transformers' synchronous mode writes inputs on another stream than it computes on, without an order between them.
    """
    compute = runner.compute_batch

    def compute_batch(*arguments: Any) -> None:
        stream = runner.inputs_and_outputs.compute_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        compute(*arguments)

    return compute_batch


def _settle() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def _model(scale: Scale, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        factory: Any = AutoModelForCausalLM
        return factory.from_config(scale.config, dtype=dtype, attn_implementation="sdpa").eval().requires_grad_(False)


def measured(model: Any, scale: Scale, contender: str, plan: Plan) -> dict[str, Any]:
    """Return the figures of one start of one contender."""
    serving = Serving(model, scale, contender, plan)
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
        serving = Serving(model, scale, contender, plan)
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
    _settle()
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
