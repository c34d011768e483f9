"""Requests that keep arriving, in real vLLM: one engine, started in this process, serves the loads one after another.

A load is JSON. It says what arrives, and how long prompts and outputs are:

- ``{"wave": [10, 250], "period": 600, "requests": 900}``: so many requests are in flight as a cosine over ``period``
  steps says, from the first number to the second and back;
- ``{"in_flight": 200, "requests": 400}``: always so many are in flight, until no more are left;
- ``{"trace": "azure_code.csv", "speedup": 4, "requests": 900}``: requests arrive when a trace says, at ``speedup``
  times its pace, with its lengths.

All may have ``name``, ``seed``, ``max_prompt`` and ``max_output`` (tokens) and ``adapters`` (how many requests of a
hundred run with a LoRA adapter); waves and fixed numbers may have ``mean_output`` (tokens), or ``prompt`` and
``output`` where all requests have the same lengths.

Every load runs in each of ``--rounds``, in turns, after a warm-up. Results are written after every load, so what was
measured before an engine dies is there. Weights are random; drafted tokens are accepted as ``--accepted`` says.

This runs by itself or under ``capture-planner launch PLAN -- python _arriving.py ...`` and ``launch --auto``. Needs a
CUDA GPU and vLLM 0.33.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import attrs
from _model_configs import SHAPES, write_adapters, write_config

from capture_planner.records.observation import Observation

LOADS: tuple[dict[str, Any], ...] = (
    {"wave": [10, 250], "requests": 900},
    {"in_flight": 200, "requests": 400},
    {"in_flight": 32, "requests": 100},
)
"""What is served where the command line does not say."""

WARM_UP: dict[str, Any] = {"wave": [10, 250], "requests": 60, "seed": 1}
LENGTHS = {"max_prompt": 512, "max_output": 384, "mean_output": 120}
"""Of the prompts and outputs that are drawn, in tokens."""


Steps = Mapping[str, Mapping[str, int]]
"""Steps by role and kind of graph; ``NONE`` is eager."""


@attrs.frozen
class Request:
    """A request of a load: when it arrives, in seconds (None: as soon as the load has room), and its lengths."""

    arrival: float | None
    prompt: tuple[int, ...] = attrs.field(repr=False)
    output: int
    adapter: bool = False


@attrs.frozen
class Delivery:
    """What a step gave to one request: its name, how many tokens, and whether it has ended."""

    request: str
    tokens: int
    finished: bool


class ServingEngine(Protocol):
    """What serves: an engine, or a stand-in for one."""

    def add(self, name: str, request: Request) -> None:
        """Hand it a request."""

    def step(self) -> Iterable[Delivery]:
        """Run until some requests have new tokens."""


def requests_of(load: Mapping[str, Any], seed: int) -> list[Request]:
    """Return the requests of a load. Prompts are drawn by ``seed``, lengths too where no trace has them."""
    draw = random.Random(load.get("seed", seed))
    lengths = _traced(load) if "trace" in load else _drawn(load, draw)
    share = load.get("adapters", 0) / 100
    return [
        Request(at, tuple(draw.randrange(1000) for _ in range(prompt)), output, draw.random() < share)
        for at, prompt, output in lengths
    ]


def _drawn(load: Mapping[str, Any], draw: random.Random) -> list[tuple[float | None, int, int]]:
    """Return many short prompts and few long ones, and outputs of exponential length; none has a time."""
    if "prompt" in load:
        return [(None, load["prompt"], load["output"])] * load["requests"]
    longest, most, mean = (load.get(name, default) for name, default in LENGTHS.items())
    return [
        (None, int(min(longest, 8 + draw.paretovariate(0.9) * 20)), int(min(most, 16 + draw.expovariate(1 / mean))))
        for _ in range(load["requests"])
    ]


def _traced(load: Mapping[str, Any]) -> list[tuple[float | None, int, int]]:
    """Return the first requests of a trace, from zero on, at ``speedup`` times its pace."""
    from capture_planner.analysis.trace import read_trace

    rows = sorted(read_trace(load["trace"]), key=lambda row: row.arrival)[: load.get("requests")]
    longest, most = load.get("max_prompt", 3000), load.get("max_output", 1000)
    return [
        (
            (row.arrival - rows[0].arrival) / load.get("speedup", 1.0),
            max(1, min(longest, row.prompt)),
            max(1, min(most, row.output)),
        )
        for row in rows
    ]


def room(load: Mapping[str, Any]) -> Callable[[int], float]:
    """Return how many requests are to be in flight at each step."""
    if "wave" not in load:
        number = float(load.get("in_flight", math.inf))
        return lambda step: number
    low, high = load["wave"]
    period = load.get("period", 600)
    return lambda step: low + (high - low) * (0.5 - 0.5 * math.cos(2 * math.pi * step / period))


def serve(
    engine: ServingEngine,
    load: Mapping[str, Any],
    tag: str,
    seed: int = 7,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Serve a load until its last request has ended, and return the figures; times are in milliseconds.

    ``busy_seconds`` among them is the time in which some request was in flight.

    :param tag: begins the name of each request.
    :param now: the clock, in seconds.
    """
    waiting = deque(enumerate(requests_of(load, seed)))
    wanted = room(load)
    sent: dict[str, float] = {}
    arrivals: dict[str, list[tuple[float, int]]] = {}
    in_flight = 0
    idle = 0.0
    steps: list[float] = []
    running: list[int] = []
    start = now()
    while waiting or in_flight:
        while waiting and _due(waiting[0][1], now() - start) and in_flight < wanted(len(steps)):
            index, request = waiting.popleft()
            name = f"{tag}-{index:05}"
            sent[name] = now() if request.arrival is None else start + request.arrival
            engine.add(name, request)
            in_flight += 1
        if not in_flight:
            before = now()
            sleep(max(0.0, (waiting[0][1].arrival or 0.0) - (before - start)))
            idle += now() - before
            continue
        running.append(in_flight)
        before = now()
        deliveries = list(engine.step())
        after = now()
        steps.append(after - before)
        for delivery in deliveries:
            if delivery.tokens:
                arrivals.setdefault(delivery.request, []).append((after, delivery.tokens))
            in_flight -= delivery.finished
    seconds = now() - start
    return figures(sent, arrivals, steps, seconds) | {
        "busy_seconds": round(seconds - idle, 3),
        "in_flight_mean": round(statistics.fmean(running), 1),
    }


def _due(request: Request, seconds: float) -> bool:
    return request.arrival is None or request.arrival <= seconds


def figures(
    sent: Mapping[str, float],
    arrivals: Mapping[str, Sequence[tuple[float, int]]],
    steps: Sequence[float],
    seconds: float,
) -> dict[str, Any]:
    """Return the figures of one load.

    :param sent: the second at which each request was due.
    :param arrivals: the seconds at which each request had new tokens, and how many.
    :param steps: the seconds of each step, as the caller of the engine waits for them.
    :param seconds: how long the whole load took.
    """
    tokens = sum(count for times in arrivals.values() for _, count in times)
    gaps = [later - earlier for times in arrivals.values() for (earlier, _), (later, _) in pairwise(times)]
    first = [times[0][0] - sent[name] for name, times in arrivals.items()]
    per_token = [
        (times[-1][0] - times[0][0]) / count
        for times in arrivals.values()
        if (count := sum(number for _, number in times[1:]))
    ]
    return {
        "requests": len(sent),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "steps": len(steps),
        "step_ms_mean": round(statistics.fmean(steps) * 1e3, 3),
        **_percentiles("step_ms", steps, 0.5, 0.9, 0.99),
        **_percentiles("itl_ms", gaps, 0.5, 0.9, 0.99),
        **_percentiles("tpot_ms", per_token, 0.5, 0.99),
        **_percentiles("ttft_ms", first, 0.5, 0.9, 0.99),
    }


def facts_of(observed: Observation, seconds: float) -> dict[str, Any]:
    """Return what an engine captured, as observed: time and memory without what profiling took.

    :param seconds: those of the start.
    """
    return {
        observed.engine: observed.engine_version,
        "torch": observed.torch,
        "device": observed.device,
        "start_seconds": round(seconds, 2),
        "capture_seconds": observed.capture_seconds,
        "graph_mib": observed.graph_mib,
        "graphs": {role.role.value: len(role.graphs) for role in observed.roles},
        "kv_blocks": observed.kv_blocks,
        "plan": None if observed.plan is None else str(observed.plan),
        "notes": list(observed.notes),
    }


def steps_of(observed: Observation) -> dict[str, dict[str, int]]:
    """Return the steps by role and kind of graph; ``NONE`` is eager."""
    found: dict[str, dict[str, int]] = {}
    for role in observed.roles:
        kinds = found.setdefault(role.role.value, {"NONE": role.eager_steps})
        for graph in role.graphs:
            kinds[graph.entry.mode.value] = kinds.get(graph.entry.mode.value, 0) + graph.replays
    return found


def steps_since(before: Steps, now: Steps) -> Steps:
    """Return the steps that a load took, by role and kind of graph."""
    return {
        role: {kind: count - before.get(role, {}).get(kind, 0) for kind, count in kinds.items()}
        for role, kinds in now.items()
    }


def _percentiles(name: str, seconds: Sequence[float], *shares: float) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {
        f"{name}_p{share * 100:g}": round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 3)
        for share in shares
    }


def name_of(load: Mapping[str, Any]) -> str:
    """Return what a load is called in the results."""
    if "name" in load:
        return str(load["name"])
    if "wave" in load:
        return "wave {}-{}".format(*load["wave"])
    return Path(load["trace"]).stem if "trace" in load else f"{load['in_flight']} in flight"


def settings(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM``; writes the model's folders into ``folder``."""
    target, drafter = SHAPES[arguments.shape]
    model = write_config(folder / arguments.shape, target)
    result: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.6,
        "seed": 0,
        "disable_log_stats": True,
    }
    if arguments.k:
        result["speculative_config"] = {
            "method": "eagle3",
            "model": str(write_config(folder / f"{arguments.shape}-drafter", drafter)),
            "num_speculative_tokens": arguments.k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": arguments.accepted or 1 + arguments.k / 2,
        }
    if arguments.adapters:
        result |= {"enable_lora": True, "max_loras": arguments.adapters, "max_lora_rank": 16}
    options: dict[str, Any] = json.loads(arguments.options)
    return result | options


class Vllm:
    """vLLM's ``LLM`` as what serves.

    :param arguments: those of ``LLM``.
    :param adapters: folders of LoRA adapters; the requests that want one take them by turns.
    """

    def __init__(self, arguments: Mapping[str, Any], adapters: Sequence[Path] = ()) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        self.engine: Any = LLM(**arguments).llm_engine
        self._adapters = [LoRARequest(path.name, index, str(path)) for index, path in enumerate(adapters, 1)]
        self._next = 0

    def add(self, name: str, request: Request) -> None:
        """Hand vLLM a request."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = SamplingParams(
            max_tokens=request.output,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        adapter = None
        if request.adapter and self._adapters:
            adapter = self._adapters[self._next % len(self._adapters)]
            self._next += 1
        self.engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, sampling, lora_request=adapter)

    def step(self) -> Iterable[Delivery]:
        """Wait for vLLM's next outputs."""
        return [
            Delivery(output.request_id, len(output.outputs[0].token_ids), output.finished)
            for output in self.engine.step()
        ]


def measure(
    engine: ServingEngine,
    loads: Sequence[Mapping[str, Any]],
    warm_up: Sequence[Mapping[str, Any]],
    rounds: int,
    seed: int,
    done: Callable[[dict[str, Any]], None],
) -> None:
    """Serve the warm-up, then every load in each round; ``done`` gets each result as soon as it is there."""
    for index, load in enumerate(warm_up):
        serve(engine, load, f"warm{index}", seed)
    for turn in range(rounds):
        for index, load in enumerate(loads):
            result = serve(engine, load, f"r{turn}l{index}", seed)
            done({"load": name_of(load), "round": turn, **result})


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    result.add_argument("--k", type=int, default=3, help="speculative tokens; 0: no drafter")
    result.add_argument("--accepted", type=float, help="tokens that a step yields per request; default: 1 + K/2")
    result.add_argument("--options", default="{}", help="arguments of LLM(...) as JSON; they win")
    result.add_argument("--adapters", type=int, default=0, help="LoRA adapters that are loaded")
    result.add_argument("--loads", default=json.dumps(LOADS), help="a list of loads as JSON, or @FILE")
    result.add_argument("--warm-up", default=json.dumps([WARM_UP]), help="loads that are not measured, as JSON")
    result.add_argument("--rounds", type=int, default=1)
    result.add_argument("--seed", type=int, default=7)
    result.add_argument("--models", type=Path, help="folder for the models' configurations; default: a temporary one")
    result.add_argument("--result", type=Path, required=True, help="JSON file for the results")
    return result


def loads_of(text: str) -> list[dict[str, Any]]:
    """Return loads that a command line names."""
    loads: list[dict[str, Any]] = json.loads(Path(text[1:]).read_text("utf-8") if text.startswith("@") else text)
    return loads


def main() -> None:
    """Start the engine, serve, and write the results."""
    arguments = parser().parse_args()
    loads, warm_up = loads_of(arguments.loads), loads_of(arguments.warm_up)
    folder = arguments.models or Path(os.environ.get("MODELS") or Path(tempfile.gettempdir()) / "models")
    options = settings(arguments, folder)
    adapters = write_adapters(folder / arguments.shape, SHAPES[arguments.shape][0], arguments.adapters)
    results: dict[str, Any] = {"shape": arguments.shape, "k": arguments.k, "options": options, "loads": []}

    def write() -> None:
        partial = arguments.result.with_name(f"{arguments.result.name}.partial")
        partial.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        partial.replace(arguments.result)

    def done(result: dict[str, Any]) -> None:
        results["loads"].append(result)
        write()
        sys.stderr.write(f"RESULT {json.dumps(result)}\n")

    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    engine = Vllm(options, adapters)
    results["start_seconds"] = round(time.perf_counter() - start, 2)
    write()
    measure(engine, loads, warm_up, arguments.rounds, arguments.seed, done)


if __name__ == "__main__":
    main()
