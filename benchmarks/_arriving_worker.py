"""One vLLM engine in a process of its own, driven by lines of JSON: the child of vllm_arriving.py.

The argument is JSON: ``options``, the arguments of ``LLM(...)``, and ``adapters``, folders of LoRA adapters. The
variables of the plugin say what the engine observes and which plan it runs. The process imports vLLM and starts the
engine at the first line of stdin. It writes one JSON object a line to stdout: first what the engine is (``facts``),
then one answer for each further line of stdin:

- ``{"load": {...}, "tag": "r0", "seed": 7}``: serve a load of _arriving.py, and answer with its figures, and with the
  steps by role and kind of graph; with ``"unobserved": true`` nothing of it is observed;
- ``{"plans": {"by itself": "own.yaml", ...}, "steps": 16}``: from now on dispatch by these plans in turns of so many
  steps of a load, and answer with the graphs of each by role, all of which have to be captured; answers to loads then
  have the steps of each plan (``turns``);
- ``{"observation": true}``: write the observation so far, and answer with the path of its file.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from _arriving import Vllm, facts_of, serve, steps_of, steps_since
from _arriving_turns import by_turn

from capture_planner import codec
from capture_planner.records.observation import Observation

OBSERVERS: list[Any] = []
RECORDERS: list[Any] = []
"""What observes this process, if it does. vLLM freezes the garbage collector's heap, so it is not found afterwards."""
STEPS: list[tuple[float, Any, float]] = []
"""Of each step since a load began: when it did, its outcome, and the seconds that it cost."""


def remember_observer() -> None:
    """Remember the observer and its recorder when they are made."""
    from capture_planner.measuring.recorder import Recorder
    from capture_planner_vllm.inside.observe import Observer

    # vLLM registers its plugins again, and then an observer is made that observes nothing.
    _remember(Observer, OBSERVERS, latest=False)
    _remember(Recorder, RECORDERS, latest=True)


def note_steps() -> None:
    """Note each step whose cost the observer finds, with its beginning."""
    from capture_planner_vllm.inside import watch
    from capture_planner_vllm.inside.pace import StepPace

    class Pace(StepPace):
        def __init__(self, ahead: int) -> None:
            super().__init__(ahead)
            self._starts: deque[float | None] = deque()

        def launched(self, now: float) -> None:
            began, before = self._began, len(self._launches)
            super().launched(now)
            if len(self._launches) > before:
                self._starts.append(began)

        def started(self, now: float, *, joined: bool) -> Any:
            found, began = super().started(now, joined=joined), None
            # The oldest are those of launches that are gone: the last of them is the step that was found.
            while len(self._starts) > len(self._launches):
                began = self._starts.popleft()
            if found is not None and began is not None:
                STEPS.append((began, *found))
            return found

    watch.StepPace = Pace  # type: ignore[attr-defined]


def _remember(owner: Any, instances: list[Any], *, latest: bool) -> None:
    create = owner.__init__

    @functools.wraps(create)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if latest or not instances:
            instances[:] = [self]
        create(self, *args, **kwargs)

    owner.__init__ = init


def engine_of(options: Mapping[str, Any]) -> Vllm:
    """Start the engine with the plugin that the variables ask for."""
    from capture_planner_vllm import vllm_plugin

    # First: where vLLM's managers are imported by now, the observer is made as the plugin is registered.
    remember_observer()
    note_steps()
    vllm_plugin.register()  # vLLM finds it by itself only where it is installed
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


@attrs.frozen
class Table:
    """What an engine dispatches by under one plan."""

    managers: Sequence[tuple[Any, Mapping[Any, Any], Mapping[int, int]]]
    """Each graph manager with its candidates, and with the case that serves so many adapters."""
    bounds: tuple[int | None, int]
    """Up to how many tokens attention's splits are bounded: of full graphs, and of any."""
    graphs: Mapping[str, int]
    """By role."""

    @classmethod
    def of(cls, file: str) -> Table:
        """Return the table of a plan.

        :raises RuntimeError: where the plan cannot be applied, or has a graph that was not captured.
        """
        from capture_planner_vllm.emulation.export import plan_sizes
        from capture_planner_vllm.inside import hooks
        from capture_planner_vllm.inside.splits import FULL_GRAPHS, OWN_BOUND

        (observer,) = OBSERVERS
        plan, graphs = codec.load_plan(file), {}
        FULL_GRAPHS.tokens = None
        for track in observer._tracks:
            manager = track.manager
            manager._candidates, manager._capture_descs = {}, {}
            if not hooks.fill(manager, plan):
                raise RuntimeError(f"{file} is not applied: the log says why")
            wanted = {each for listed in manager._capture_descs.values() for each in listed}
            if missing := wanted - set(track.keys):
                raise RuntimeError(f"{file}: {track.role.value}: not captured: {missing}")
            FULL_GRAPHS.add(manager)
            graphs[track.role.value] = len(wanted)
        if not graphs:
            raise RuntimeError(f"{file}: no graph manager is known")
        managers = [track.manager for track in observer._tracks]
        largest = plan_sizes(plan, managers[0].vllm_config.scheduler_config.max_num_batched_tokens)[-1:]
        return cls(
            [(each, each._candidates, each._lora_dispatch_map) for each in managers],
            (FULL_GRAPHS.tokens, min([OWN_BOUND, *largest])),
            graphs,
        )

    def take(self) -> None:
        """Let the engine dispatch by this table."""
        from capture_planner_vllm.inside import splits

        for manager, candidates, adapters in self.managers:
            manager._candidates, manager._lora_dispatch_map = candidates, adapters
        # As in an engine that has these graphs alone, whose max_cudagraph_capture_size is its own.
        splits.FULL_GRAPHS.tokens, splits.OWN_BOUND = self.bounds


class Turns:
    """Plans by turns: in each round of turns each has one, in random order."""

    def __init__(self, plans: Mapping[str, str], steps: int) -> None:
        """:param steps: of each turn."""
        self.tables = {column: Table.of(file) for column, file in plans.items()}
        self._steps, self._draw = steps, random.Random(0)
        self._next: list[str] = []
        self.taken: list[tuple[float, str]] = []
        """When each turn began, and whose it is, since a load began."""

    def begin(self, step: int) -> None:
        """Begin a step of a load."""
        if step % self._steps:
            return
        if not self._next:
            self._next = self._draw.sample([*self.tables], len(self.tables))
        column = self._next.pop()
        self.tables[column].take()
        self.taken.append((time.perf_counter(), column))


def answer(engine: Vllm, request: Mapping[str, Any], turns: Turns | None = None) -> dict[str, Any]:
    """Return the answer to a line of stdin that asks for a load or the observation.

    :param turns: the plans that take turns; None: the engine has one.
    """
    if "observation" in request:
        (recorder,) = RECORDERS
        recorder._write()
        return {"file": str(recorder.path)}
    (observer,) = OBSERVERS
    watch = observer._active
    if request.get("unobserved"):
        observer._active = None
    before = steps_of(observation())
    STEPS.clear()
    if turns is not None:
        turns.taken.clear()
    figures = serve(engine, request["load"], request["tag"], request["seed"], None if turns is None else turns.begin)
    observer._active = watch
    figures["graphs_of_steps"] = steps_since(before, steps_of(observation()))
    if turns is not None:
        figures["turns"] = by_turn(STEPS, turns.taken)
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
    turns = None
    for line in sys.stdin:
        request = json.loads(line)
        if "plans" in request:
            turns = Turns(request["plans"], request["steps"])
            found = {"graphs": {column: table.graphs for column, table in turns.tables.items()}}
        else:
            found = answer(engine, request, turns)
        print(json.dumps(found), file=out)
    engine.engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
