"""One vLLM engine in a process of its own, driven by lines of JSON: the child of vllm_arriving.py.

The argument is JSON: ``options``, the arguments of ``LLM(...)``, and ``adapters``, folders of LoRA adapters. The
variables of the plugin say what the engine observes and which plan it runs. The process imports vLLM and starts the
engine at the first line of stdin. It writes one JSON object a line to stdout: first what the engine is (``facts``),
then one answer for each further line of stdin:

- ``{"load": {...}, "tag": "r0", "seed": 7}``: serve a load of _arriving.py, and answer with its figures, and with the
  steps by role and kind of graph; with ``"unobserved": true`` nothing of it is observed;
- ``{"observation": true}``: write the observation so far, and answer with the path of its file.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _arriving import Vllm, facts_of, serve, steps_of, steps_since

from capture_planner.records.observation import Observation

OBSERVERS: list[Any] = []
RECORDERS: list[Any] = []
"""What observes this process, if it does. vLLM freezes the garbage collector's heap, so it is not found afterwards."""


def remember_observer() -> None:
    """Remember the observer and its recorder when they are made."""
    from capture_planner.measuring.recorder import Recorder
    from capture_planner_vllm.inside.observe import Observer

    _remember(Observer, OBSERVERS)
    _remember(Recorder, RECORDERS)


def _remember(owner: Any, instances: list[Any]) -> None:
    create = owner.__init__

    @functools.wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        instances[:] = [self]
        create(self, *args, **kwargs)

    owner.__init__ = init


def engine_of(options: Mapping[str, Any]) -> Vllm:
    """Start the engine with the plugin that the variables ask for."""
    from capture_planner_vllm import vllm_plugin

    vllm_plugin.register()  # vLLM finds it by itself only where it is installed
    remember_observer()
    return Vllm(options["options"], [Path(folder) for folder in options["adapters"]])


def take_turns() -> None:
    """Let only one of the engines that start together use the device at a time, as ``ARRIVING_LOCK`` names a file.

    What a graph takes and how long it replays would else be that of several engines.
    """
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("load_model", "determine_available_memory", "initialize_from_config", "compile_or_warm_up_model"):
        setattr(Worker, name, _alone(getattr(Worker, name)))


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Path(os.environ["ARRIVING_LOCK"]).open("w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return method(self, *args, **kwargs)

    return locked


def observation() -> Observation:
    """Return what was observed so far."""
    (recorder,) = RECORDERS
    observed: Observation = recorder.observation()
    return observed


def answer(engine: Vllm, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a line of stdin."""
    if "observation" in request:
        (recorder,) = RECORDERS
        recorder._write()
        return {"file": str(recorder.path)}
    (observer,) = OBSERVERS
    watch = observer._active
    if request.get("unobserved"):
        observer._active = None
    before = steps_of(observation())
    figures = serve(engine, request["load"], request["tag"], request["seed"])
    observer._active = watch
    figures["graphs_of_steps"] = steps_since(before, steps_of(observation()))
    return figures


def main() -> None:
    """Start the engine and answer lines until stdin ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout, too
    # The observer is asked in this process, so the engine must be in it.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm  # noqa: F401  # all engines import at once

    sys.stdin.readline()
    if os.environ.get("ARRIVING_LOCK"):
        take_turns()
    start = time.perf_counter()
    engine = engine_of(json.loads(sys.argv[1]))
    facts = facts_of(observation(), time.perf_counter() - start)
    mode = engine.engine.vllm_config.compilation_config.cudagraph_mode.name
    print(json.dumps({"facts": {**facts, "mode": mode}}), file=out)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=out)
    engine.engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
