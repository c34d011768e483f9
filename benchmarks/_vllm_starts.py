"""Random starts of a tiny vLLM: what a seed stands for, and one start of it in a process of its own.

A seed gives a plan (``tests/engines/generators/vllm_random.py``), the flags that go with it, and about 20 requests. The
weights are random and large, so that attention decides the tokens: an error of one row shows in them. Two kinds of
case: ``float32`` on TRITON_ATTN, and ``bfloat16`` on FLASH_ATTN, which alone has LoRA.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from _bench import ROOT
from _model_configs import RANK, config_of, drafter_of, write_adapters, write_config

from capture_planner.codec import dumps
from capture_planner.engines import find_engine
from capture_planner.modes import GraphMode, Role
from capture_planner.records.model import Model
from capture_planner.records.plan import Plan

sys.path.insert(0, str(ROOT / "tests"))
from engines.generators.vllm_random import random_plan

VOCABULARY, LAYERS, LENGTH = 1024, 2, 384
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
    "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODEL = Model(
    name="tiny", num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=256, vocab_size=VOCABULARY,
    max_model_len=LENGTH,
)  # fmt: skip
WEIGHTS = 0.2
"""Weights are drawn evenly from minus this to this; with vLLM's own 0.001 the residual alone decides the tokens."""
CACHE_BYTES = 64 << 20
REQUESTS = 20
TIES = {"float32": 0.001, "bfloat16": 0.03}
"""Log probabilities that two tokens may always be apart in an eager step and still be a tie, which rounding decides."""


@attrs.frozen(kw_only=True)
class Request:
    """One greedy request."""

    prompt: tuple[int, ...]
    output: int
    """Tokens to generate."""
    adapter: int
    """Its LoRA adapter, from 1; 0 is none."""
    arrival: int
    """The step before which it arrives."""


@attrs.frozen(kw_only=True)
class Start:
    """What a seed stands for."""

    seed: int
    plan: Plan
    dtype: str
    compiled: bool
    """With torch.compile."""
    breakable: bool
    """With graphs that are broken at attention while they are captured."""
    profiled: bool
    """With memory profiling, which captures some graphs before the real ones."""
    requests: tuple[Request, ...]

    @property
    def kind(self) -> str:
        """Starts of one kind have the same tokens for the same requests."""
        return self.dtype + ("" if self.plan.lora is None else " with adapters")

    def traits(self) -> Iterator[str]:
        """Yield what this start has, as the table counts it."""
        plan, target = self.plan, self.plan.role(Role.TARGET)
        yield self.dtype
        yield str(target.mode.value)
        yield "torch.compile" if self.compiled else "breakable graphs" if self.breakable else "no compiler"
        if plan.speculative is not None:
            yield f"K={plan.speculative.num_tokens}"
            if plan.speculative.schedule:
                yield "dynamic K"
        if plan.lora is not None:
            yield "LoRA"
        if self.profiled:
            yield "memory profiling"
        largest = {
            mode: max((entry.num_tokens for entry in target.entries if entry.mode is mode), default=0)
            for mode in (GraphMode.FULL, GraphMode.PIECEWISE)
        }
        if 0 < largest[GraphMode.PIECEWISE] < largest[GraphMode.FULL]:
            yield "a decode above every mixed graph"
        if any(entry.num_tokens > plan.limits.max_num_tokens for role in plan.roles for entry in role.entries):
            yield "graphs above the limits"


@functools.cache
def start_of(seed: int) -> Start:
    """Return what a seed stands for."""
    draw = random.Random(seed)
    dtype = draw.choice(list(TIES))
    plan = random_plan(
        draw,
        model=MODEL,
        max_num_reqs=(4, 16, 48),
        max_num_tokens=(256,),
        backend="triton" if dtype == "float32" else "flash_attention",
        adapters=(0,) if dtype == "float32" else (0, 0, 3),
    )
    piecewise = plan.role(Role.TARGET).mode.has_piecewise
    breakable = piecewise and draw.random() < 0.5
    compiled = not breakable and (piecewise or draw.random() < 0.2)
    return Start(
        seed=seed,
        plan=plan,
        dtype=dtype,
        compiled=compiled,
        breakable=breakable,
        profiled=draw.random() < 0.5,
        requests=tuple(_request(draw, 0 if plan.lora is None else plan.lora.max_active) for _ in range(REQUESTS)),
    )


def _request(draw: random.Random, adapters: int) -> Request:
    length = draw.choice((1, 5, 20, 60, 200))
    return Request(
        prompt=tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, length))),
        output=draw.randint(2, 24),
        adapter=draw.randint(0, adapters),
        arrival=draw.choice((0, 0, 0, draw.randint(1, 20))),
    )


def write_models(folder: Path) -> None:
    """Write the model, the drafter and three adapters."""
    configs = {
        "model": config_of(SHAPE, LAYERS, tied=True),
        # The layers that EAGLE-3 reads by default are of models with more of them.
        "drafter": drafter_of(SHAPE) | {"draft_vocab_size": VOCABULARY, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    for name, config in configs.items():
        write_config(folder / name, config)
    write_adapters(folder, configs["model"], 3)


def words_of(start: Start, folder: Path, *, graphs: bool = True, drafts: bool = True) -> list[str]:
    """Return the words of ``vllm serve`` for a start, without its plan.

    :param graphs: False: eager, and at the widest limits, so that all starts of a kind can be compared with it.
    :param drafts: with the drafter, where the plan drafts.
    """
    plan, mode = start.plan, start.plan.role(Role.TARGET).mode
    options: dict[str, Any] = {
        "model": folder / "model", "load-format": "dummy", "skip-tokenizer-init": True, "seed": 0, "dtype": start.dtype,
        "max-model-len": LENGTH, "kv-cache-memory-bytes": CACHE_BYTES, "gpu-memory-utilization": 0.01,
        "max-num-batched-tokens": plan.limits.max_num_tokens, "no-enable-prefix-caching": True,
        "max-num-seqs": plan.limits.max_num_reqs if graphs else 64,
        "attention-backend": "TRITON_ATTN" if start.dtype == "float32" else "FLASH_ATTN",
    }  # fmt: skip
    if graphs:
        compilation = {"mode": 3 if start.compiled else 0, "cudagraph_mode": mode.value}
        options["compilation-config"] = json.dumps(compilation)
    else:
        options |= {"enforce-eager": True, "max-logprobs": VOCABULARY}
    if plan.lora is not None:
        options |= {"enable-lora": True, "max-loras": plan.lora.max_active, "max-lora-rank": RANK}
        if graphs and plan.lora.specialize:
            options["specialize-active-lora"] = True
    if drafts and plan.speculative is not None:
        config: dict[str, Any] = {
            "method": "eagle3",
            "model": str(folder / "drafter"),
            "num_speculative_tokens": plan.speculative.num_tokens,
        }
        if plan.speculative.ranges:
            config["num_speculative_tokens_per_batch_size"] = [list(tier) for tier in plan.speculative.ranges]
        options["speculative-config"] = json.dumps(config)
    written = [[f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in options.items()]
    return [word for words in written for word in words]


def under_plan(plan: Plan | None, words: Sequence[str], file: Path) -> tuple[list[str], dict[str, str]]:
    """Write a plan to ``file``; return vLLM's command line and the variables that make it run the plan, if any."""
    if plan is None:
        return list(words), {}
    file.write_text(dumps(plan), encoding="utf-8")
    launch = find_engine("vllm").launch
    more = () if launch is None else launch(plan, words).arguments
    return [*words, *more], {"CAPTURE_PLANNER_PLAN": str(file)}


def run_start(start: Start, folder: Path, *, planned: bool) -> dict[str, Any]:
    """Start the engine of a seed in this process, under its plan or alone, and return what came of its requests."""
    words, variables = under_plan(
        start.plan if planned else None, words_of(start, folder), folder / f"plan-{start.seed}.yaml"
    )
    os.environ.update(variables)
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1" if start.breakable else "0"
    began = time.perf_counter()
    engine, replays = _engine(words, profiled=start.profiled)
    ready = time.perf_counter()
    tokens = serve(engine, start.requests, folder)
    return {
        "start_seconds": round(ready - began, 2),
        "serve_seconds": round(time.perf_counter() - ready, 2),
        "graphs": {role: sum(map(len, manager._capture_descs.values())) for role, manager in managers_of(engine)},
        "replays": dict(replays),
        "tokens": tokens,
    }


def engine_of(words: Sequence[str]) -> Any:
    """Start the engine that ``vllm serve`` would start with these words, in this process."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(words))
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))


def managers_of(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yield each graph manager of an engine in this process, by role."""
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    yield "target", runner.cudagraph_manager
    speculator = getattr(runner, "speculator", None)
    for role, name in (("draft_prefill", "prefill_cudagraph_manager"), ("draft_decode", "decode_cudagraph_manager")):
        manager = getattr(speculator, name, None)
        if manager is not None:
            yield role, manager


def _engine(words: Sequence[str], *, profiled: bool) -> tuple[Any, Counter[str]]:
    """Start an engine with large weights, and count the replays of its full graphs by manager."""
    from capture_planner_vllm import vllm_plugin

    vllm_plugin.register()
    from vllm.config import compilation
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu_worker import Worker

    fill = functools.partial(dummy_loader.initialize_single_dummy_weight, low=-WEIGHTS, high=WEIGHTS)
    dummy_loader.initialize_single_dummy_weight = fill
    _ignore_sizes(compilation.CompilationConfig)
    if profiled:
        _profile_graphs(Worker)
    replays: Counter[str] = Counter()
    run_fullgraph = cudagraph_utils.CudaGraphManager.run_fullgraph

    def counted(manager: Any, desc: Any) -> Any:
        replays[f"{type(manager).__name__} of {manager.decode_query_len}"] += 1
        return run_fullgraph(manager, desc)

    cudagraph_utils.CudaGraphManager.run_fullgraph = counted
    return engine_of(words), replays


def _ignore_sizes(config: Any) -> None:
    """Let starts with other capture sizes share what torch.compile made: sizes are in the key, not in the code."""
    compute = config.compute_hash

    def compute_hash(self: Any) -> Any:
        kept = {name: getattr(self, name) for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")}
        try:
            for name in kept:
                object.__setattr__(self, name, None)
            return compute(self)
        finally:
            for name, value in kept.items():
                object.__setattr__(self, name, value)

    config.compute_hash = compute_hash


def _profile_graphs(worker: Any) -> None:
    """Capture for the estimate of memory too, which vLLM leaves out where the cache's size is given."""
    available = worker.determine_available_memory

    def determine_available_memory(self: Any) -> Any:
        found = available(self)
        if not self.model_config.enforce_eager:
            self.model_runner.profile_cudagraph_memory()
        return found

    worker.determine_available_memory = determine_available_memory


def serve(engine: Any, requests: Sequence[Request], folder: Path) -> list[list[int]]:
    """Serve greedy requests as they arrive, and return the tokens of each."""
    found = _served(engine, requests, folder, lambda output: list(output.token_ids))
    return [found[index] for index in range(len(requests))]


def _served(
    engine: Any,
    requests: Sequence[Request],
    folder: Path,
    taken: Callable[[Any], list[Any]],
    logprobs: int | None = None,
) -> dict[int, list[Any]]:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    waiting = sorted(range(len(requests)), key=lambda index: -requests[index].arrival)
    found: dict[int, list[Any]] = {index: [] for index in waiting}
    for step in itertools.count():
        while waiting and (requests[waiting[-1]].arrival <= step or not engine.has_unfinished_requests()):
            index = waiting.pop()
            request = requests[index]
            sampling = SamplingParams(
                max_tokens=request.output, temperature=0, ignore_eos=True, detokenize=False, logprobs=logprobs,
                output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            number = request.adapter
            adapter = LoRARequest(f"adapter{number}", number, str(folder / f"adapter{number}")) if number else None
            prompt = {"prompt_token_ids": list(request.prompt)}
            engine.add_request(str(index), prompt, sampling, lora_request=adapter)
        if not engine.has_unfinished_requests():
            return found
        for output in engine.step():
            # vLLM may put a part of its own behind the name of a request.
            found[int(str(output.request_id).partition("-")[0])] += taken(output.outputs[0])
    raise AssertionError


def compare_kind(
    starts: Sequence[Start], outputs: Mapping[int, Sequence[Sequence[int]]], folder: Path
) -> dict[str, Any]:
    """Serve all requests of starts of one kind eager, without a drafter, and return where their tokens differ.

    A request is compared up to its first other token, since each follows from those before. Rounding depends on the
    shape of a batch, so the eager engine serves the requests twice, all at once and in the batches of the starts. A
    token is a tie where eager's own step has it no further below its best than its two runs differ, or than TIES.

    :param outputs: the tokens of each seed's requests.
    """
    os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "0"
    engine, _ = _engine(words_of(starts[0], folder, graphs=False, drafts=False), profiled=False)
    rows = [(start.seed, index, request) for start in starts for index, request in enumerate(start.requests)]
    eager = serve(engine, [attrs.evolve(request, arrival=0) for *_, request in rows], folder)
    batched_otherwise = [tokens for start in starts for tokens in serve(engine, start.requests, folder)]
    given = [list(outputs[seed][index]) for seed, index, _ in rows]
    noise = _differences(engine, rows, eager, batched_otherwise, folder)
    bound = max([TIES[starts[0].dtype], *(each["log_probability_below"] for each in noise)])
    found = _differences(engine, rows, eager, given, folder)
    different = [each for each in found if each["log_probability_below"] > bound]
    return {
        "requests": len(rows),
        "tokens": sum(map(len, eager)),
        "ties": len(found) - len(different),
        "ties_of_eager": len(noise),
        "bound": bound,
        "gaps": sorted(each["log_probability_below"] for each in found),
        "gaps_of_eager": sorted(each["log_probability_below"] for each in noise),
        "different": different,
    }


def _differences(
    engine: Any,
    rows: Sequence[tuple[int, int, Request]],
    eager: Sequence[Sequence[int]],
    given: Sequence[Sequence[int]],
    folder: Path,
) -> list[dict[str, Any]]:
    """Return where tokens first differ from eager's, and how far eager's step has that token below its best."""
    places = {
        number: first_difference(given[number], eager[number])
        for number in range(len(rows))
        if given[number] != eager[number]
    }
    asked = [
        attrs.evolve(rows[number][2], prompt=(*rows[number][2].prompt, *eager[number][:place]), output=1, arrival=0)
        for number, place in places.items()
    ]
    steps = _served(engine, asked, folder, _log_probabilities, logprobs=VOCABULARY)
    found = []
    for step, (number, place) in enumerate(places.items()):
        likely = {key: value.logprob for key, value in steps[step][0].items()}
        token = given[number][place] if place < len(given[number]) else None
        # A request that ended early has no token to compare: it is no tie.
        gap = math.inf if token is None else max(likely.values()) - likely[token]
        seed, index, _ = rows[number]
        found.append({"seed": seed, "request": index, "at": place, "token": token, "log_probability_below": gap})
    return found


def _log_probabilities(output: Any) -> list[Any]:
    return [dict(each) for each in output.logprobs or ()]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the first index at which two lists differ, or the length of the shorter."""
    shorter = min(len(one), len(other))
    return next((index for index in range(shorter) if one[index] != other[index]), shorter)
