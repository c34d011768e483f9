"""Requests that keep arriving, in real vLLM: one engine, started in this process, serves the loads one after another.

A load is JSON. It says what arrives, and how long prompts and outputs are:

- ``{"wave": [10, 250], "requests": 900}``: so many requests are in flight as a cosine over 600 steps says, from the
  first number to the second and back;
- ``{"in_flight": 200, "requests": 400}``: always so many are in flight, until no more are left;
- ``{"trace": "azure_code.csv", "speedup": 4, "requests": 900}``: requests arrive when a trace says, at ``speedup``
  times its pace, with its lengths.

All may have ``name``, ``seed``, ``max_prompt`` and ``max_output`` (tokens) and ``adapters`` (how many requests of a
hundred run with a LoRA adapter); waves and fixed numbers may have ``mean_output`` (tokens).

As a program, which vllm_auto.py starts under ``capture-planner launch --auto``, it serves every load in each of
``--rounds``, in turns, after a warm-up, and writes the results after each: what was measured before an engine dies is
there. Weights are random; a step yields 1 + K/2 tokens of each request. Needs a CUDA GPU and vLLM 0.33.
"""

from __future__ import annotations

import argparse
import itertools
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
from pathlib import Path
from typing import Any

import attrs
from _model_configs import SHAPES, write_config

from capture_planner import codec
from capture_planner.records.observation import Observation

WARM_UP: dict[str, Any] = {"wave": [10, 250], "requests": 60, "seed": 1}
LENGTHS = {"max_prompt": 512, "max_output": 384, "mean_output": 120}
"""Of the prompts and outputs that are drawn, in tokens."""
PERIOD = 600
"""Steps of a wave."""
CRASH_FOR = "CRASH_FOR_PLAN"
"""Names the plan under which the program ends before it starts an engine."""

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
    return lambda step: low + (high - low) * (0.5 - 0.5 * math.cos(2 * math.pi * step / PERIOD))


def serve(
    engine: Vllm, load: Mapping[str, Any], tag: str, seed: int, begin: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Serve a load until its last request has ended; ``tag`` begins the name of each request.

    ``busy_seconds`` of the figures is the time in which some request was in flight.

    :param begin: called before each step, with the number of steps before it.
    """
    now = time.perf_counter
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
            time.sleep(max(0.0, (waiting[0][1].arrival or 0.0) - (before - start)))
            idle += now() - before
            continue
        running.append(in_flight)
        if begin is not None:
            begin(len(steps))
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
    """Return the figures of one load, which took so many seconds.

    :param sent: the second at which each request was due.
    :param arrivals: the seconds at which each request had new tokens, and how many.
    :param steps: the seconds of each step, as the caller of the engine waits for them.
    """
    tokens = sum(count for times in arrivals.values() for _, count in times)
    gaps = [later - earlier for times in arrivals.values() for (earlier, _), (later, _) in itertools.pairwise(times)]
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
    """Return what an engine that took so many seconds to start captured; what profiling took is left out."""
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


def settings(
    shape: str, k: int, folder: Path, *, config: Mapping[str, Any] | None = None, adapters: int = 0
) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM``; writes the model's folders into ``folder``.

    :param config: the model's; None: that of the shape.
    """
    target, drafter = SHAPES[shape]
    result: dict[str, Any] = {
        "model": str(write_config(folder / shape, config or target)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.6,
        "seed": 0,
        "disable_log_stats": True,
    }
    if k:
        result["speculative_config"] = {
            "method": "eagle3",
            "model": str(write_config(folder / f"{shape}-drafter", drafter)),
            "num_speculative_tokens": k,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 1 + k / 2,
        }
    if adapters:
        result |= {"enable_lora": True, "max_loras": adapters, "max_lora_rank": 16}
    return result


class Vllm:
    """vLLM's ``LLM`` as what serves; requests that want a LoRA adapter take the folders in ``adapters`` by turns."""

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


def main() -> None:
    """Start the engine, serve, and write the results."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", choices=sorted(SHAPES), required=True)
    options.add_argument("--k", type=int, required=True, help="speculative tokens; 0: no drafter")
    options.add_argument("--loads", type=Path, required=True, help="JSON file with a list of loads")
    options.add_argument("--rounds", type=int, required=True)
    options.add_argument("--result", type=Path, required=True, help="JSON file for the results")
    arguments = options.parse_args()
    plan = os.environ.get("CAPTURE_PLANNER_PLAN")
    if plan and Path(plan).stem == os.environ.get(CRASH_FOR):
        sys.exit(1)
    start = time.perf_counter()
    engine = Vllm(settings(arguments.shape, arguments.k, Path(tempfile.gettempdir()) / "models"))
    results: dict[str, Any] = {"start_seconds": round(time.perf_counter() - start, 2), "loads": []}
    codec.write(arguments.result, json.dumps(results))
    serve(engine, WARM_UP, "warm", WARM_UP["seed"])
    loads = json.loads(arguments.loads.read_text("utf-8"))
    for turn, (index, load) in itertools.product(range(arguments.rounds), enumerate(loads)):
        figures = serve(engine, load, f"r{turn}l{index}", seed=7)
        results["loads"].append({"load": name_of(load), "round": turn, **figures})
        codec.write(arguments.result, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
