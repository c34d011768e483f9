"""One vLLM engine whose graphs change between its steps, in a process of its own: the child of vllm_live.py.

The argument is JSON: the arguments of ``LLM(...)``. Each line of stdin is a request, ``{"do": NAME, ...}``; the names
are the functions in ``SECTIONS``. Each result is a line of JSON on stdout as soon as it is there; ``{"done": true}``
ends an answer, or ``{"error": ...}``.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import _live
from _arriving import Delivery, Vllm, requests_of, serve
from _arriving_worker import OBSERVERS, RECORDERS, remember_observer
from _live import GraphTable, LiveGraphs, PieceWatch, live_graphs

from capture_planner import codec
from capture_planner.modes import Role
from capture_planner_vllm.inside.observe_seams import MANAGERS
from capture_planner_vllm.inside.seam import after_import

MIB = 1 << 20
Emit = Callable[[dict[str, Any]], None]


class ChangingEngine(Vllm):
    """vLLM that lets something happen before each step, and keeps what came out."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        core = self.engine.engine_core.engine_core
        self.core, self.runner = core, core.model_executor.driver_worker.worker.model_runner
        self.begin(None)

    def begin(self, between: Callable[[int], None] | None) -> None:
        """Begin a load; ``between`` gets the number of each step before it, and its time counts as the step's."""
        self._between, self._step = between, 0
        self.tokens: dict[str, list[int]] = {}
        self.pauses: list[float] = []

    def step(self) -> Iterable[Delivery]:
        if self._between is not None:
            before = time.perf_counter()
            self._between(self._step)
            taken = time.perf_counter() - before
            if taken > 1e-4:
                self.pauses.append(taken)
        self._step += 1
        found = []
        for output in self.engine.step():
            given = output.outputs[0]
            self.tokens.setdefault(output.request_id, []).extend(given.token_ids)
            found.append(Delivery(output.request_id, len(given.token_ids), output.finished))
        return found

    def run(
        self, load: Mapping[str, Any], tag: str, seed: int, between: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Serve a load, and return the figures with those of the pauses."""
        self.begin(between)
        result = serve(self, load, tag, seed)
        asked = {f"{tag}-{index:05}": each.output for index, each in enumerate(requests_of(load, seed))}
        whole = sum(len(self.tokens.get(name, ())) == output for name, output in asked.items())
        return result | {
            "failed": len(asked) - whole,
            "pauses": len(self.pauses),
            "pause_seconds": round(sum(self.pauses), 4),
            "pause_ms_max": round(max(self.pauses, default=0) * 1e3, 2),
        }


class Bench:
    """The engine, its graphs, and what the sections share."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from capture_planner_vllm import vllm_plugin

        vllm_plugin.register()  # vLLM finds it by itself only where it is installed
        remember_observer()
        watch = PieceWatch()
        after_import(MANAGERS, watch.install)
        self.engine = ChangingEngine(arguments)
        self.runner = self.engine.runner
        self.live: LiveGraphs = live_graphs(self.runner, watch.pieces)
        self.start = self.live.now()
        self.sizes = sorted(self.runner.compilation_config.cudagraph_capture_sizes)
        self.plans: dict[str, dict[Role, GraphTable]] = {"start": self.start}
        self.observer = OBSERVERS[0] if OBSERVERS else None
        self.watch = getattr(self.observer, "_active", None)
        self.observe(False)

    def observe(self, on: bool) -> None:
        """Let the plugin watch the steps, or not."""
        if self.observer is not None:
            self.observer._active = self.watch if on else None

    @property
    def width(self) -> int:
        """Tokens of a request in a decode."""
        return int(self.runner.cudagraph_manager.decode_query_len)

    def facts(self) -> dict[str, Any]:
        """Return what the engine is."""
        import torch
        import vllm

        groups = [(each.kv_cache_spec, len(each.layer_names)) for each in self.runner.kv_cache_config.kv_cache_groups]
        manager = self.runner.cudagraph_manager
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
            "mode": manager.cudagraph_mode.name,
            "graphs": {role.value: len(table.graphs) for role, table in self.start.items()},
            "pieces": {role.value: len(found) for role, found in self.live._pieces.items()},
            "sizes": self.sizes,
            "kv_bytes_per_token": sum(spec.page_size_bytes * layers / spec.block_size for spec, layers in groups),
            "output_rows": _rows(manager),
            "attention": sorted({g.backend.get_name() for groups in self.runner.attn_groups for g in groups}),
        }


def _rows(manager: Any) -> int | None:
    held = manager.hidden_states
    return None if held is None else int(held.shape[0])


def free() -> float:
    """Return MiB that are free on the device, with nothing cached."""
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info()[0]) / MIB


def pooled() -> float:
    """Return MiB that the graphs' pools have reserved."""
    import torch

    segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    sizes = [int(each["total_size"]) for each in segments if tuple(each["segment_pool_id"]) != (0, 0)]
    return sum(sizes) / MIB


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that some work takes, the device's included."""
    import torch

    torch.cuda.synchronize()
    before = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - before


def _median(values: Collection[float]) -> float:
    return round(statistics.median(values), 4) if values else math.nan


# Probe


def _fits(bench: Bench, desc: Any) -> bool:
    """Whether an engine has room for a graph."""
    limits = bench.runner.vllm_config.scheduler_config
    if desc.num_reqs is None:
        return bool(desc.num_tokens <= limits.max_num_batched_tokens)
    return bool(desc.num_reqs <= limits.max_num_seqs) and desc.num_tokens <= (
        _rows(bench.runner.cudagraph_manager) or 0
    )


def new_graphs(bench: Bench) -> list[tuple[Role, Any]]:
    """Return graphs of sizes that the engine has not captured, for each role and mode."""
    found = []
    for role, table in bench.start.items():
        have = set(table.graphs)
        for mode in dict.fromkeys(desc.cg_mode for desc in table.graphs):
            like = next(desc for desc in table.graphs if desc.cg_mode is mode)
            if mode.name == "PIECEWISE":
                wanted = [replace(like, num_tokens=size) for size in (2044, 1532, 708, 412, 204, 92, 44, 12)]
            else:
                each = like.uniform_token_count
                wanted = [replace(like, num_tokens=n * each, num_reqs=n) for n in (253, 201, 149, 97, 61, 27, 11, 5)]
            found += [(role, desc) for desc in wanted if desc not in have and _fits(bench, desc)]
    return found


def probe(bench: Bench, request: Mapping[str, Any], emit: Emit) -> None:
    """Price of a graph: one at a time, in cycles, all at once, and in a pool of its own; what it does to state."""
    live, graphs = bench.live, new_graphs(bench)
    by_kind: dict[str, list[tuple[float, float, float]]] = {}
    for role, desc in graphs:
        start, pool = free(), pooled()
        seconds = timed(functools.partial(live.add, [(role, desc)]))
        held = start - free()
        pool = pooled() - pool
        by_kind.setdefault(f"{role.value} {desc.cg_mode.name}", []).append((seconds, held, pool))
        emit({"graph": f"{role.value} {desc.cg_mode.name} {desc.num_tokens}", "seconds": round(seconds, 4),
              "mib": round(held, 2), "pool_mib": round(pool, 2)})  # fmt: skip
    before, pool = free(), pooled()
    seconds = timed(lambda: live.drop(graphs))
    after = free()
    emit({"dropped": len(graphs), "seconds": round(seconds, 4), "given_back_mib": round(after - before, 2),
          "pool_given_back_mib": round(pool - pooled(), 2)})  # fmt: skip
    for kind, rows in by_kind.items():
        emit({"kind": kind, "graphs": len(rows), "seconds_median": _median([each[0] for each in rows]),
              "mib_median": _median([each[1] for each in rows])})  # fmt: skip

    frees = []
    for _ in range(int(request.get("cycles", 8))):
        live.add(graphs)
        held = free()
        live.drop(graphs)
        frees.append((held, free()))
    emit({"cycles": [[round(held, 1), round(without, 1)] for held, without in frees],
          "mib_with": _median([without - held for held, without in frees]),
          "leak_mib_per_cycle": round((frees[0][1] - frees[-1][1]) / max(1, len(frees) - 1), 3)})  # fmt: skip
    seconds = timed(lambda: live.add(graphs))
    live.drop(graphs)
    emit({"at_once": len(graphs), "seconds": round(seconds, 4), "seconds_per_graph": round(seconds / len(graphs), 4)})
    live._ask(Role.TARGET, ())
    emit({"fixed": "a capture of no graph", "seconds": round(timed(lambda: live._capture(Role.TARGET)), 5)})
    live._list()
    _overhead(emit)
    _release(bench, emit)


def _overhead(emit: Emit) -> None:
    """Time what vLLM's own ``capture_model`` puts around a capture, which one between steps leaves out."""
    import torch
    from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

    def around() -> None:
        with freeze_gc_for_cudagraph_capture():
            torch.cuda.empty_cache()

    emit({"fixed": "vLLM's freeze_gc_for_cudagraph_capture", "seconds": round(timed(around), 4)})
    gc.freeze()  # as vLLM has it after its start


def _release(bench: Bench, emit: Emit) -> None:
    """Show what is given back by dropping nearly all graphs, in the pool and with it."""
    live = bench.live
    few = _fewest(bench)
    whole, pool = free(), pooled()
    count = len(live.graphs)
    live.use(few)
    live.drop(live.surplus(few))
    same, same_pool = free(), pooled()
    emit({"released": "all graphs but one a role, in the pool", "graphs": count - len(live.graphs),
          "given_back_mib": round(same - whole, 1), "pool_given_back_mib": round(pool - same_pool, 1)})  # fmt: skip
    anew(bench, few)
    fresh, fresh_pool = free(), pooled()
    emit({"released": "with the pool", "given_back_mib": round(fresh - whole, 1),
          "pool_given_back_mib": round(pool - fresh_pool, 1)})  # fmt: skip
    seconds = timed(lambda: live.change(bench.start))
    emit({"recaptured": count, "seconds": round(seconds, 3), "mib": round(fresh - free(), 1)})


def _fewest(bench: Bench) -> dict[Role, GraphTable]:
    """Return tables of one graph a role, which serves no batch: a pool without a graph cannot be used again."""
    return {
        role: GraphTable(graphs=tuple(sorted(table.graphs, key=lambda desc: desc.num_tokens)[:1]), candidates={})
        for role, table in bench.start.items()
    }


def anew(bench: Bench, tables: Mapping[Role, GraphTable]) -> float:
    """Capture tables into a pool of their own and drop the pool before; return the seconds."""
    from vllm.platforms import current_platform

    pool = current_platform.graph_pool_handle()
    seconds = timed(lambda: bench.live.anew(tables, pool))
    type(current_platform)._global_graph_pool = pool
    return seconds


def _others(bench: Bench) -> dict[Role, GraphTable]:
    """Return other tables of about as many graphs: every second size is moved."""
    step = bench.width
    sizes = {
        size + step * (1 + index % 3) if index % 2 and size + 3 * step < bench.sizes[-1] else size
        for index, size in enumerate(bench.sizes)
    }
    return bench.live.own(sizes)


def _alternating(bench: Bench, every: int, together: int | None) -> tuple[Callable[[int], None], list[int]]:
    """Return what goes to other tables and back between steps, and the number of its changes so far.

    :param every: steps from one change to the next.
    :param together: graphs of a change; None: all of them, while the scheduler is paused, by ``collective_rpc``.
    """
    sides = [_others(bench), bench.start]
    count = [0]

    def parts() -> Iterator[None]:
        while True:
            side = sides[0]
            sides.reverse()
            if together is None:
                _held(bench, functools.partial(bench.live.change, side))
                yield
            else:
                yield from bench.live.stepwise(side, together)

    going = parts()

    def between(step: int) -> None:
        if step and step % every == 0:
            next(going)
            count[0] += 1

    return between, count


def _held(bench: Bench, work: Callable[[], Any]) -> None:
    """Do some work in the worker while requests are held, by vLLM's own doors."""
    bench.engine.core.pause_scheduler("keep", False)
    try:
        bench.engine.engine.collective_rpc(lambda worker: work() and None)
    finally:
        bench.engine.core.resume_scheduler()


def latency(bench: Bench, request: Mapping[str, Any], emit: Emit) -> None:
    """What running requests notice: the same load without changes, with one graph a step, and with all at once."""
    load = request["load"]
    bench.engine.run(load, f"{request['tag']}warm", 3)
    for turn in range(int(request.get("rounds", 2))):
        for name, every, together in (("none", 1, 0), ("one graph at a time", 1, 1), ("all at once", 100, None)):
            between, count = (None, [0]) if name == "none" else _alternating(bench, every, together)
            figures = bench.engine.run(load, f"{request['tag']}{turn}{name[:3]}", 10 + turn, between)
            bench.live.change(bench.start)
            emit({"changes": name, "round": turn, "changed": count[0], **figures})


def state(bench: Bench, request: Mapping[str, Any], emit: Emit) -> None:
    """Which tensors a change writes while requests are held: with and without the guard of draft slots."""
    graphs = new_graphs(bench)

    def between(step: int) -> None:
        if step != 40:
            return
        for guard in (True, False):
            _live.GUARD = guard
            before = _prints(bench)
            bench.live.add(graphs)
            bench.live.drop(graphs)
            after = _prints(bench)
            _live.GUARD = True
            written = [name for name in before if before[name] != after.get(name)]
            emit({"guard": guard, "tensors": len(before), "written": written})

    figures = bench.engine.run(request["load"], f"{request['tag']}state", 5, between)
    emit({"state": "served on", "failed": figures["failed"]})


def _prints(bench: Bench) -> dict[str, int]:
    """Return a checksum of each tensor that outlives a step."""
    import torch

    runner = bench.runner
    owners = {
        "req_states": runner.req_states, "block_tables": runner.block_tables, "input_buffers": runner.input_buffers,
        "sampler": runner.sampler, "speculator": runner.speculator,
    }  # fmt: skip
    found: dict[str, Any] = {f"kv_caches.{index}": cache for index, cache in enumerate(runner.kv_caches)}
    for owner, held in owners.items():
        for name, value in vars(held).items() if hasattr(held, "__dict__") else ():
            for index, each in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                tensor = getattr(each, "gpu", each)
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.numel():
                    found[f"{owner}.{name}.{index}"] = tensor
    result = {}
    for name, tensor in found.items():
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        result[name] = int(tensor.view(kinds[tensor.element_size()]).sum(dtype=torch.int64))
    return result


# Shift


def observe(bench: Bench, request: Mapping[str, Any], emit: Emit) -> None:
    """Serve loads, again until there are as many ``steps``, and write what was observed of them alone."""
    (recorder,) = RECORDERS
    recorder.gather()
    with recorder._lock:
        recorder._take()
        recorder._forget()
    bench.observe(True)
    rows: list[dict[str, Any]] = []
    while sum(row["steps"] for row in rows) < request["steps"]:
        turn = len(rows)
        rows += [
            bench.engine.run(load, f"{request['tag']}{turn + index}", 7 + turn)
            for index, load in enumerate(request["loads"])
        ]
    bench.observe(False)
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    codec.write(folder / recorder.path.name, codec.dumps_plain(recorder._fitting()))
    emit({"observed": request["name"], "tokens_per_second": [row["tokens_per_second"] for row in rows]})


def plans(bench: Bench, request: Mapping[str, Any], emit: Emit) -> None:
    """Load plans by name, from files or as sizes of vLLM's own lists, and price each in a pool of its own."""
    config = bench.runner.compilation_config
    # PIECEWISE graphs run attention outside, so the bound of the attention backends is no bound for them.
    object.__setattr__(
        config, "max_cudagraph_capture_size", bench.runner.vllm_config.scheduler_config.max_num_batched_tokens
    )
    anew(bench, _fewest(bench))
    empty = free()
    for name, source in request["plans"].items():
        try:
            made = bench.live.own(source) if isinstance(source, list) else bench.live.tables(codec.load_plan(source))
            made = {role: made.get(role, GraphTable(graphs=(), candidates={})) for role in bench.start}
            seconds = anew(bench, made)
            bench.plans[name] = made
            graphs = {role.value: len(table.graphs) for role, table in made.items()}
            emit({"plan": name, "graphs": graphs, "seconds": round(seconds, 3), "mib": round(empty - free(), 1)})
        except Exception as error:
            emit({"plan": name, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})


def phase(bench: Bench, request: Mapping[str, Any], emit: Emit) -> None:
    """Serve a phase under a plan that is there, or that is gone over to between steps while requests run."""
    live, target = bench.live, bench.plans[request["plan"]]
    before = bench.plans[request.get("from", request["plan"])]
    # The graphs of all plans stay, so that no time goes into other arms' changes; only dispatch differs.
    live.add(live.missing(before))
    live.use(before)
    going: Iterator[None] = iter(())
    added = 0
    if "from" in request:
        kept = {role: {*table.graphs} for role, table in before.items()}
        live.drop([(role, desc) for role, desc in live.graphs
                   if desc in target[role].graphs and desc not in kept[role]])  # fmt: skip
        added = len(live.missing(target))
        going = live.stepwise(target, int(request["together"]), drops=False)

    def between(step: int) -> None:
        if step >= 16:
            next(going, None)

    figures = bench.engine.run(request["load"], request["tag"], request["seed"], between)
    for _ in going:
        figures["unfinished_change"] = True
    emit({"added": added, **figures})


# Sleep


def wake(bench: Bench, request: Mapping[str, Any], emit: Emit) -> None:
    """Sleep, wake and serve: with the graphs kept, all captured first, and captured as the traffic needs them.

    Full speed is the first step of the target on a FULL graph.
    """
    load, few = request["load"], _fewest(bench)
    used: Counter[Any] = Counter()
    first: dict[str, float] = {}
    for role, manager in bench.live.managers.items():
        _count(role, manager, used, first)
    bench.engine.run(load, f"{request['tag']}warm", 3)
    needed = sorted(((role, desc) for role, table in bench.start.items() for desc in table.graphs),
                    key=lambda graph: -used[graph])  # fmt: skip

    def as_needed() -> Iterator[None]:
        for graph in needed:
            bench.live.add([graph])
            bench.live.use(bench.start)
            yield

    for turn in range(int(request.get("rounds", 3))):
        for how in ("graphs kept", "captured first", "captured as needed"):
            if how != "graphs kept":
                anew(bench, few)
            awake = free()
            slept = timed(lambda: bench.engine.engine.sleep(1))
            asleep = free()
            began = time.perf_counter()
            bench.engine.engine.wake_up()
            woke = time.perf_counter()
            if how == "captured first":
                bench.live.change(bench.start)
            captured = time.perf_counter()
            parts = as_needed() if how == "captured as needed" else iter(())
            first.clear()
            figures = bench.engine.run(load, f"{request['tag']}{turn}{how[-3:]}", 20 + turn, _next(parts))
            ended = time.perf_counter()
            for _ in parts:
                figures["unfinished"] = True
            row = {"wake": how, "round": turn, "sleep_seconds": slept, "given_back_mib": asleep - awake,
                   "free_asleep_mib": asleep, "wake_seconds": woke - began, "capture_seconds": captured - woke,
                   "first_step_seconds": min(first.values()) - began, "full_speed_seconds": first["FULL"] - began,
                   "all_served_seconds": ended - began}  # fmt: skip
            emit({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} | figures)


def _next(parts: Iterator[None]) -> Callable[[int], None]:
    """Return what takes one of the parts before each step, while there are any."""
    return lambda _: next(parts, None)


def _count(role: Role, manager: Any, used: Counter[Any], first: dict[str, float]) -> None:
    """Let a manager count the graphs that it dispatches to, and note when the target first used each mode."""
    dispatch = manager.dispatch

    def counted(*args: Any, **options: Any) -> Any:
        desc = dispatch(*args, **options)
        used[role, desc] += 1
        if role is Role.TARGET:
            first.setdefault(desc.cg_mode.name, time.perf_counter())
        return desc

    manager.dispatch = counted


SECTIONS = {each.__name__: each for each in (probe, latency, state, observe, plans, phase, wake)}


def main() -> None:
    """Start the engine and answer requests until stdin ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints to stdout, too
    # The graphs are reached in this process, so the engine must be in it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sys.stdin.readline()
    start = time.perf_counter()
    bench = Bench(json.loads(sys.argv[1]))
    print(json.dumps({"start_seconds": round(time.perf_counter() - start, 2), **bench.facts()}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            SECTIONS[request["do"]](bench, request, lambda row: print(json.dumps(row), file=out))
            answer: dict[str, Any] = {"done": True}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        print(json.dumps(answer), file=out)
    bench.engine.engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
