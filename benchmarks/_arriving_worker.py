"""One vLLM engine in a process of its own, driven by lines of JSON: the child of vllm_arriving.py.

The argument is JSON: ``options``, the arguments of ``LLM(...)``, and ``adapters``, folders of LoRA adapters. The
variables of the plugin say what the engine observes and which plan it runs. The process imports vLLM and starts the
engine at the first line of stdin. It writes one JSON object a line to stdout: first what the engine is (``facts``),
then one answer for each further line of stdin:

- ``{"load": {...}, "tag": "r0", "seed": 7}``: serve a load of _arriving.py, and answer with its figures, with the
  steps by role and kind of graph, and with the intervals of the target's batches; with ``"unobserved": true`` nothing
  of it is observed;
- ``{"plan": "plan.yaml"}``: dispatch as under that plan from now on, whose graphs have to be captured, and answer with
  its graphs by role;
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

from _arriving import Vllm, facts_of, intervals_of, serve, steps_of, steps_since

from capture_planner import codec
from capture_planner.records.observation import Observation

OBSERVERS: list[Any] = []
RECORDERS: list[Any] = []
"""What observes this process, if it does. vLLM freezes the garbage collector's heap, so it is not found afterwards."""
INTERVALS: list[tuple[Any, float]] = []
"""Outcome and milliseconds of each step since a load began."""


def remember_observer() -> None:
    """Remember the observer and its recorder when they are made."""
    from capture_planner.measuring.recorder import Recorder
    from capture_planner_vllm.inside.observe import Observer

    _remember(Observer, OBSERVERS)
    _remember(Recorder, RECORDERS)
    count = Recorder.interval

    def interval(self: Any, outcome: Any, milliseconds: float) -> None:
        INTERVALS.append((outcome, milliseconds))
        count(self, outcome, milliseconds)

    Recorder.interval = interval  # type: ignore[method-assign]


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


def dispatch_by(file: str) -> dict[str, int]:
    """Dispatch as under another plan; return its graphs by role.

    :raises RuntimeError: where the plan cannot be applied, or names a graph that was not captured.
    """
    from capture_planner_vllm.inside import hooks
    from capture_planner_vllm.inside.splits import FULL_GRAPHS

    plan, found = codec.load_plan(file), {}
    (observer,) = OBSERVERS
    # Attention's splits are bounded up to the largest full graph, as in an engine with these graphs alone.
    FULL_GRAPHS.tokens = None
    for track in observer._tracks:
        manager = track.manager
        manager._candidates.clear()
        manager._capture_descs.clear()
        if not hooks.fill(manager, plan):
            raise RuntimeError(f"{file} is not applied: the log says why")
        wanted = {each for listed in manager._capture_descs.values() for each in listed}
        if missing := wanted - set(track.keys):
            raise RuntimeError(f"{file}: {track.role.value}: not captured: {missing}")
        FULL_GRAPHS.add(manager)
        found[track.role.value] = len(wanted)
    return found


def answer(engine: Vllm, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a line of stdin."""
    if "observation" in request:
        (recorder,) = RECORDERS
        recorder._write()
        return {"file": str(recorder.path)}
    if "plan" in request:
        return {"graphs": dispatch_by(request["plan"])}
    (observer,) = OBSERVERS
    watch = observer._active
    if request.get("unobserved"):
        observer._active = None
    before = steps_of(observation())
    INTERVALS.clear()
    figures = serve(engine, request["load"], request["tag"], request["seed"])
    observer._active = watch
    figures["graphs_of_steps"] = steps_since(before, steps_of(observation()))
    figures["intervals"] = intervals_of(INTERVALS)
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
