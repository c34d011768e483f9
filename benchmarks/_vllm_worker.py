"""One vLLM engine in a process of its own, driven by JSON lines: the child of vllm_in_process.py.

The words after ``--`` are ``vllm serve``'s. The process imports vLLM and starts the engine at the first line of
stdin, so that several can import at once and start in turn. It writes one JSON object a line to stdout: first what the
engine is (``facts``), then one answer for each further line of stdin:

- ``{"requests": 8, "prompt": 128, "output": 192, "seed": 1}``: serve so many requests that arrive together, and
  answer with tokens per second, times per output token, inter-token latencies, and the observed batches;
- ``{"trace": [[0.5, 128, 192], ...]}``: the same for requests that arrive at so many seconds, each with the tokens of
  its prompt and of its output;
- ``{"observation": 4}``: answer with the observation so far, and time one step in so many from here on;
- ``{"tokens": true, ...}``: the same, with the tokens of each request in order;
- ``{"core": 3, ...}``: before any of these, keep to this core, which all engines of a group share by turns;
- ``{"begin": true, ...}``: take the requests, and serve until all of them decode; then ``{"steps": 8}``: answer with
  the seconds and tokens of so many steps, and whether a request ended; then ``{"drain": true}``: serve the rest;
- ``{"observing": 20, ...}``: serve the load so many times, observe blocks of its steps by turns, and answer with the
  seconds of each pair of blocks, observed and not, and with the share of a core that the recorder's thread takes;
- ``{"device": true}``: milliseconds on the device of one pass by role and requests, as observed (CUDA events);
- ``{"dispatch": [[1, 4], ...]}``: nanoseconds that the target's manager takes to dispatch decodes of so many requests
  and tokens each, median of 9 rounds.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any


def engine_of(words: Sequence[str]) -> Any:
    """Start the engine that ``vllm serve`` would start with these words, in this process."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(words))
    arguments = EngineArgs.from_cli_args(parsed)  # loads vLLM's plugins
    time_capture()
    return LLMEngine.from_engine_args(arguments)


CAPTURES: list[tuple[float, int]] = []
"""Seconds and bytes of each capture of all graphs; profiling's are not among them."""


def time_capture() -> None:
    """Record what capturing takes: vLLM's log rounds it to seconds."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    capture = GPUModelRunner.capture_model

    @functools.wraps(capture)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        size = capture(self, *args, **kwargs)
        if not (args or kwargs.get("profile_only")):
            CAPTURES.append((time.perf_counter() - start, int(size)))
        return size

    GPUModelRunner.capture_model = timed


def runner_of(engine: Any) -> Any:
    """Return the model runner of an engine in this process."""
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def managers_of(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yield each graph manager by role."""
    runner = runner_of(engine)
    yield "target", runner.cudagraph_manager
    speculator = getattr(runner, "speculator", None)
    for role, name in (("draft_prefill", "prefill_cudagraph_manager"), ("draft_decode", "decode_cudagraph_manager")):
        manager = getattr(speculator, name, None)
        if manager is not None:
            yield role, manager


def facts_of(engine: Any, seconds: float) -> dict[str, Any]:
    """Return what was captured, and what is left for the KV cache."""
    import torch
    import vllm

    config = engine.vllm_config
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
        "start_seconds": round(seconds, 2),
        "capture_seconds": round(sum(seconds for seconds, _ in CAPTURES), 3),
        "graph_mib": round(sum(size for _, size in CAPTURES) / 2**20, 1),
        "graphs": {role: sum(map(len, manager._capture_descs.values())) for role, manager in managers_of(engine)},
        "mode": config.compilation_config.cudagraph_mode.name,
        "max_cudagraph_capture_size": config.compilation_config.max_cudagraph_capture_size,
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "runner": type(runner_of(engine)).__module__,
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def arrivals_of(load: dict[str, Any]) -> list[tuple[float, int, int]]:
    """Return when each request of a load arrives, in seconds, with the tokens of its prompt and of its output."""
    if "trace" in load:
        return [(float(at), int(prompt), int(output)) for at, prompt, output in load["trace"]]
    return [(0.0, load["prompt"], load["output"])] * load["requests"]


def add_requests(engine: Any, load: dict[str, Any], name: str) -> None:
    """Hand the requests of a load to the engine."""
    draw = random.Random(load.get("seed", 1))
    for index, (_, prompt, output) in enumerate(arrivals_of(load)):
        add_request(engine, f"{name}-{index:04}", [draw.randrange(1000) for _ in range(prompt)], output)


def add_request(engine: Any, name: str, prompt: list[int], output: int) -> None:
    """Hand one request to the engine."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = SamplingParams(
        max_tokens=output, temperature=0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)


def serve(engine: Any, load: dict[str, Any], name: str) -> dict[str, Any]:
    """Serve requests that arrive together, or as a trace says, and return the figures; times are in milliseconds."""
    arrivals: dict[str, list[tuple[float, int]]] = {}
    tokens: dict[str, list[int]] = {}
    before = observed_batches()
    draw = random.Random(load.get("seed", 1))
    waiting = deque(
        (at, f"{name}-{index:04}", [draw.randrange(1000) for _ in range(prompt)], output)
        for index, (at, prompt, output) in enumerate(arrivals_of(load))
    )
    start = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][0] <= time.perf_counter() - start:
            add_request(engine, *waiting.popleft()[1:])
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][0] - (time.perf_counter() - start)))
            continue
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            ids = output.outputs[0].token_ids
            if len(ids):
                arrivals.setdefault(output.request_id, []).append((now, len(ids)))
                tokens.setdefault(output.request_id, []).extend(ids)
    seconds = time.perf_counter() - start
    per_token, gaps = [], []
    for times in arrivals.values():
        count = sum(number for _, number in times[1:])
        if count:
            per_token.append((times[-1][0] - times[0][0]) / count * 1e3)
        gaps += [(later - earlier) * 1e3 for (earlier, _), (later, _) in pairwise(times)]
    result: dict[str, Any] = {
        "requests": len(arrivals_of(load)),
        "tokens": sum(map(len, tokens.values())),
        "seconds": round(seconds, 4),
        "tokens_per_second": round(sum(map(len, tokens.values())) / seconds, 1),
        "tpot_ms_p50": round(statistics.median(per_token), 4),
        "tpot_ms_p99": round(percentile(per_token, 0.99), 4),
        "itl_ms_p50": round(statistics.median(gaps), 4),
        "itl_ms_p99": round(percentile(gaps, 0.99), 4),
        "ttft_ms_p50": round(statistics.median(times[0][0] - start for times in arrivals.values()) * 1e3, 3),
    }
    after = observed_batches()
    if after:
        result["steps"] = {
            role: {state: count - before.get(role, {}).get(state, 0) for state, count in states.items()}
            for role, states in after.items()
        }
    if load.get("tokens"):
        result["output"] = [tokens[request] for request in sorted(tokens)]
    return result


OBSERVERS: list[Any] = []
RECORDERS: list[Any] = []
"""What observes this process, if it does. vLLM freezes the garbage collector's heap, so it is not found afterwards."""


def remember_observer() -> None:
    """Remember the observer and its recorder when they are made."""
    from capture_planner.measuring.recorder import Recorder
    from capture_planner_vllm.observe import Observer

    _remember(Observer, OBSERVERS)
    _remember(Recorder, RECORDERS)


def _remember(owner: Any, instances: list[Any]) -> None:
    create = owner.__init__

    @functools.wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        instances[:] = [self]
        create(self, *args, **kwargs)

    owner.__init__ = init


def observed_batches() -> dict[str, dict[str, int]]:
    """Return the steps so far by role and mode (``NONE`` is eager), if this process observes itself."""
    steps: dict[str, dict[str, int]] = {}
    for recorder in RECORDERS:
        for role in recorder.observation().roles:
            counts = steps.setdefault(role.role.value, {"other": role.other_batches})
            for batch in role.batches:
                mode = "NONE" if batch.graph is None else role.graphs[batch.graph].entry.mode.value
                counts[mode] = counts.get(mode, 0) + batch.steps
    return steps


BLOCK = 4
"""Steps that are observed, or not, in a row: short, as other work on the host comes in bursts."""
PROMPT_STEPS = 16
"""Steps until every request of a load decodes."""


def begin(engine: Any, load: dict[str, Any], name: str) -> dict[str, Any]:
    """Serve a load until all requests decode."""
    add_requests(engine, load, name)
    for _ in range(PROMPT_STEPS):
        engine.step()
    return {}


def steps(engine: Any, count: int) -> dict[str, Any]:
    """Return the seconds and the tokens of so many steps, and whether a request ended in one."""
    start = time.perf_counter()
    outputs = [output for _ in range(count) for output in engine.step()]
    seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"seconds": seconds, "tokens": tokens, "ended": any(output.finished for output in outputs)}


def drain(engine: Any) -> dict[str, Any]:
    """Serve what is left."""
    while engine.has_unfinished_requests():
        engine.step()
    return {}


def observing_costs(engine: Any, load: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of neighbouring blocks of decode steps, [observed, not observed], each first in half of them.

    The recorder's thread counts and writes during both, so its time is returned apart, in seconds of CPU per second.
    """
    (observer,) = OBSERVERS
    watch = observer._active
    assert watch is not None, "observing has ended; the log says why"
    pairs: list[tuple[float, float]] = []
    recorders = [each.ident for each in threading.enumerate() if "recorder" in each.name]
    clocks = [time.pthread_getcpuclockid(ident) for ident in recorders if ident is not None]
    started, busy = time.perf_counter(), sum(map(time.clock_gettime, clocks))

    for run in range(load["observing"]):
        begin(engine, load, f"o{run}")
        ended = False
        while not ended:
            seconds = {}
            for observed in (True, False) if len(pairs) % 2 else (False, True):
                observer._active = watch if observed else None
                block = steps(engine, BLOCK)
                seconds[observed] = block["seconds"]
                ended |= block["ended"]
            if not ended:
                pairs.append((seconds[True], seconds[False]))
        drain(engine)
    observer._active = watch
    busy = sum(map(time.clock_gettime, clocks)) - busy
    return {"pairs": pairs, "recorder": busy / (time.perf_counter() - started), "clocks": len(clocks)}


def observation(every: int) -> str:
    """Return what was observed so far as a file has it, and time one step in ``every`` from here on."""
    (observer,), (recorder,) = OBSERVERS, RECORDERS
    observer._active.turns = itertools.cycle((*itertools.repeat(False, every - 1), True))
    from capture_planner.codec import dumps

    return dumps(recorder.observation())


def device_times() -> dict[str, dict[int, float]]:
    """Return the median milliseconds of a pass of decodes, by role and requests."""
    times: dict[str, dict[int, float]] = {}
    for recorder in RECORDERS:
        for role in recorder.observation().roles:
            for batch in role.batches:
                if batch.past_prompt and batch.milliseconds is not None and batch.samples > 1:
                    times.setdefault(role.role.value, {})[batch.num_reqs] = batch.milliseconds
    return times


def dispatch_times(engine: Any, batches: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the median nanoseconds of a dispatch over these decodes, (requests, query length) each, by role."""
    times = {}
    target = runner_of(engine).cudagraph_manager
    for role, manager in managers_of(engine):
        cases = [(reqs, reqs * query_len, query_len, 0) for reqs, query_len in batches]
        if role == "draft_prefill":  # it is asked for the tokens of the target's graph
            cases = [(case[0], target.dispatch(*case).num_tokens, *case[2:]) for case in cases]
        elif role == "draft_decode":
            cases = [(reqs, reqs, 1, 0) for reqs, _ in batches]
        rounds = []
        for _ in range(9):
            start = time.perf_counter_ns()
            for _ in range(20):
                for case in cases:
                    manager.dispatch(*case)
            rounds.append((time.perf_counter_ns() - start) / (20 * len(cases)))
        times[role] = round(statistics.median(rounds), 1)
    return times


def answer(engine: Any, request: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the answer to a line of stdin."""
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "dispatch": lambda: {"dispatch_ns": dispatch_times(engine, request["dispatch"])},
        "observing": lambda: {"observing": observing_costs(engine, request)},
        "device": lambda: {"device_ms": device_times()},
        "begin": lambda: begin(engine, request, name),
        "steps": lambda: steps(engine, request["steps"]),
        "drain": lambda: drain(engine),
        "observation": lambda: {"observation": observation(request["observation"])},
        "trace": lambda: serve(engine, request, name),
        "requests": lambda: serve(engine, request, name),
    }
    return next(answers[key] for key in answers if key in request)()


def main() -> None:
    """Start the engine and answer lines until stdin ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout, too
    if os.environ.get("CAPTURE_PLANNER_OBSERVE"):
        remember_observer()
    importlib.import_module("vllm.v1.engine.llm_engine")
    sys.stdin.readline()
    start = time.perf_counter()
    engine = engine_of(sys.argv[sys.argv.index("--") + 1 :])
    print(json.dumps({"facts": facts_of(engine, time.perf_counter() - start)}), file=out)
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        if "core" in request:
            os.sched_setaffinity(0, {request["core"]})  # of this thread
        print(json.dumps(answer(engine, request, f"r{number}")), file=out)
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
