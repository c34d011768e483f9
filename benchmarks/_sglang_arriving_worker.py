"""One SGLang engine in a process of its own, driven by lines of JSON: the child of sglang_arriving.py.

The argument is JSON: ``words``, the flags of SGLang's server. ``CAPTURE_PLANNER_PLAN`` adds those that the plan needs,
as ``launch`` does. The engine starts at the first line of stdin; the answers are those of _arriving_worker.py. SGLang's
scheduler is a process of its own: its plugin is found by its entry point, and its observation is read from the file
that it writes every second. Nothing can be left out of the observation, so the warm-up is in it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from _arriving import Request, facts_of, figures, requests_of, steps_of, steps_since

from capture_planner import codec, load_plan
from capture_planner.records.observation import Observation

SECONDS = 1.0
"""Between two writes of the observation."""

WAVE_SECONDS = 6.0
"""Of a wave that does not say how long it is."""


async def serve(engine: Any, load: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Serve a load until its last request has ended, and return the figures.

    As many requests are in flight as the load says; the ``period`` of a wave is not in steps, which are not seen here:
    it has ``seconds``.
    """
    requests = requests_of(load, seed)
    sent: dict[str, float] = {}
    arrivals: dict[str, list[tuple[float, int]]] = {}
    running: set[asyncio.Task[None]] = set()
    start = time.perf_counter()
    for index, request in enumerate(requests):
        while len(running) >= room(load, time.perf_counter() - start):
            # A wave that rises has room before a request ends.
            done, running = await asyncio.wait(running, timeout=0.005, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*done)
        name = f"{index:05}"
        sent[name] = time.perf_counter()
        arrivals[name] = []
        running.add(asyncio.create_task(follow(engine, request, arrivals[name])))
    if running:
        await asyncio.gather(*running)
    seconds = time.perf_counter() - start
    # The steps are the scheduler's: what is counted here are the requests' own times.
    found = figures(sent, arrivals, [seconds], seconds)
    return {name: value for name, value in found.items() if not name.startswith("step")} | {
        "busy_seconds": round(seconds, 3)
    }


def room(load: Mapping[str, Any], seconds: float) -> float:
    """Return how many requests are to be in flight after so many seconds."""
    if "wave" not in load:
        return float(load["in_flight"])
    low, high = load["wave"]
    return float(low + (high - low) * (0.5 - 0.5 * math.cos(2 * math.pi * seconds / load.get("seconds", WAVE_SECONDS))))


async def follow(engine: Any, request: Request, times: list[tuple[float, int]]) -> None:
    """Hand a request to the engine, and note when it has new tokens, and how many."""
    parameters = {"max_new_tokens": request.output, "temperature": 0, "ignore_eos": True}
    stream: AsyncIterator[dict[str, Any]] = await engine.async_generate(
        input_ids=list(request.prompt), sampling_params=parameters, stream=True
    )
    known = 0
    async for chunk in stream:
        tokens = chunk["meta_info"]["completion_tokens"]
        if tokens > known:
            times.append((time.perf_counter(), tokens - known))
            known = tokens


def observation(folder: Path) -> tuple[Path, Observation]:
    """Return the file of the scheduler, and what it has, once it is newer than what ran until now."""
    time.sleep(2 * SECONDS)
    (path,) = folder.glob("sglang.rank0.*.yaml")
    return path, codec.load_observation(path)


def engine_of(words: list[str]) -> Any:
    """Start SGLang with the flags of its server, and with those that its plan needs."""
    import sglang  # type: ignore[import-not-found, unused-ignore]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found, unused-ignore]

    plan = os.environ.get("CAPTURE_PLANNER_PLAN")
    if plan:
        from capture_planner_sglang.emulation.launch import launch

        words = [*words, *launch(load_plan(plan), words).arguments]
    return sglang.Engine(server_args=prepare_server_args(words))


def main() -> None:
    """Start the engine and answer lines until stdin ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # SGLang prints to stdout, too
    sys.stdin.readline()
    os.environ["CAPTURE_PLANNER_OBSERVE_SECONDS"] = str(SECONDS)
    folder = Path(os.environ["CAPTURE_PLANNER_OBSERVE"])
    start = time.perf_counter()
    engine = engine_of(json.loads(sys.argv[1])["words"])
    seconds = time.perf_counter() - start
    _, observed = observation(folder)
    print(json.dumps({"facts": facts_of(observed, seconds)}), file=out)
    steps = steps_of(observed)
    for line in sys.stdin:
        request = json.loads(line)
        if "observation" in request:
            print(json.dumps({"file": str(observation(folder)[0])}), file=out)
            continue
        answer = engine.loop.run_until_complete(serve(engine, request["load"], request["seed"]))
        before, steps = steps, steps_of(observation(folder)[1])
        answer["graphs_of_steps"] = steps_since(before, steps)
        print(json.dumps(answer), file=out)
    engine.shutdown()


if __name__ == "__main__":
    main()
