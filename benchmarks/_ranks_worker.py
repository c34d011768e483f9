"""One rank of ``ranks_gpu.py``: a process for each part and rank, started by the script with torchrun's variables."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
from _ranks_faults import fault
from _ranks_rig import Rank, compilation_facts, connected_ranks, large, load, plan_of, requests_of, runner_of, small

from capture_planner.errors import RankError
from capture_planner.modes import GraphMode, Role
from capture_planner.records.model import DataType
from capture_planner.runtime import host
from capture_planner.runtime.compilation.forwards import Compilation
from capture_planner.runtime.ranks.peers import ALONE
from capture_planner.runtime.ranks.symmetric import SymmetricCollectives, collectives_of
from capture_planner.runtime.runner import Runner

WINDOW, WINDOWS, WARM = 20, 3, 4
"""Steps of a decode window, windows of a size, and steps before the first."""


# The parts ------------------------------------------------------------------------------------------


def tokens(rank: Rank) -> None:
    """Serve the same requests with every backend, with and without drafts; return the tokens of all replicas."""
    found: dict[str, Any] = {}
    for backend, dtype, is_compiled in rank.arguments["backends"]:
        for k in (0, 2):
            name, started = f"{backend} {dtype} k={k}{', compiled' * is_compiled}", time.perf_counter()
            try:
                found[name] = _tokens_of(rank, backend, DataType(dtype), k, is_compiled)
            except RankError:
                raise
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
            found[name]["seconds"] = round(time.perf_counter() - started, 2)
            rank.write(found)
            # Where all ranks had the same error, they go on.
            rank.peers.exchange(f"end of {name}", None)


def _tokens_of(rank: Rank, backend: str, dtype: DataType, k: int, is_compiled: bool) -> dict[str, Any]:
    model = small(rank, dtype)
    plan = plan_of(rank, model, backend, 8, (1, 4, 8), k, GraphMode.FULL_AND_PIECEWISE)
    among = collectives_of(rank.peers, rank.device, rank.arguments.get("all_reduce", "auto"))
    target = load(rank, model, among)
    place = rank.peers.place
    mine = requests_of(16, model.vocab_size or 0, 24)[place.data :: place.data_size]
    with runner_of(rank, plan, target, compile=is_compiled) as runner:
        runner.capture()
        served = {done.name: list(done.tokens) for done in runner.serve(mine)}
        session = runner.session
        caches = (cache for role in runner.parts.roles.values() for _, cache in role.attention.caches())
        heads = sorted({cache.keys.shape[2] for cache in caches})
        graphs, forwards = len(session.captured), len(session.forwards)
        from_graphs = sum(forward.entry is not None for forward in session.forwards)
        compilation = runner.compilation
    del runner
    among.release()
    shares = rank.peers.exchange("tokens", served)
    whole: dict[str, Any] = {}
    for share in shares[:: place.tensor_size]:
        whole |= dict(share)  # type: ignore[arg-type]
    alike = all(
        shares[first] == shares[first + other]
        for first in range(0, place.size, place.tensor_size)
        for other in range(place.tensor_size)
    )
    return {
        "tokens": whole,
        "ranks of a model agree": alike,
        "graphs": graphs,
        "forwards": forwards,
        "from graphs": from_graphs,
        "KV heads of a rank": heads,
        "all-reduce": dict(among.facts),
        **({"compilation": compilation_facts(compilation)} if is_compiled else {}),
    }


class TimedCollectives(SymmetricCollectives):
    """Collectives that can be left out. Numbers are wrong then, and times are those of computing alone."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial if self.largest < 0 else super().all_reduce(partial)


def decode(rank: Rank) -> None:
    """Measure decode steps, and bare replays of their graphs, of a large shape; by kind of all-reduce."""
    layers, sizes = rank.arguments["layers"], rank.arguments["sizes"]
    model = large(rank, layers)
    plan = plan_of(rank, model, rank.arguments["backend"], max(sizes), sizes, 0, GraphMode.FULL_DECODE_ONLY)
    started = time.perf_counter()
    group = rank.peers.tensor_group()
    among: Any = collectives_of(rank.peers, rank.device, "nccl")
    kinds = {"nccl" if rank.is_gpu else "gloo": 0}
    if group is not None and rank.is_gpu:
        try:
            largest = 4 << 20
            kinds["none"] = -1
            among = TimedCollectives(group, rank.device, largest=largest)
            kinds["symmetric"] = largest
        except Exception as error:
            rank.write({"no symmetric memory": str(error)[:500]})
    target = load(rank, model, among)
    found: dict[str, Any] = {"load seconds": round(time.perf_counter() - started, 1), "rows": []}
    compilation = Compilation(rank.peers, among)
    for kind, largest in kinds.items():
        if group is not None and rank.is_gpu:
            among.largest = largest
        rank.peers.exchange(f"all-reduces of {kind}", None)
        began = time.perf_counter()
        with runner_of(rank, plan, target, compilation=compilation, compile=True) as runner:
            found["compilation"] = compilation_facts(compilation)
            runner.capture()
            found[f"capture seconds, {kind}"] = round(time.perf_counter() - began, 1)
            for size in sizes:
                found["rows"].append({"all-reduce": kind, "requests": size} | _decode_of(rank, runner, size))
                rank.write(found)
        del runner
    among.release()


def _decode_of(rank: Rank, runner: Runner, size: int) -> dict[str, Any]:
    """Return seconds of a step in which ``size`` requests decode, and of a replay of its graph alone."""
    vocabulary = runner.model.vocab_size
    output = WARM + WINDOWS * WINDOW + 8
    requests = [
        attrs.evolve(each, name=f"{size}.{index}", arrival=0.0, prompt=each.prompt[:8], max_new_tokens=output)
        for index, each in enumerate(requests_of(size, vocabulary, output, longest=16))
    ]
    serving = runner.start(requests)
    serving.scheduler.arrive(0.0, time.perf_counter())
    steps = []
    while serving.scheduler.waiting or _has_prompts(serving):
        serving.step()
    for _ in range(WARM):
        serving.step()
    for _ in range(WINDOWS):
        rank.settle()
        began = time.perf_counter()
        for _ in range(WINDOW):
            serving.step()
        rank.settle()
        steps.append((time.perf_counter() - began) / WINDOW)
    forward = runner.session.forwards[-1]
    graph = runner.parts.roles[Role.TARGET].graphs.get(forward.entry) if forward.entry else None
    bare = []
    if graph is not None:
        for _ in range(WINDOWS):
            rank.settle()
            rank.peers.exchange("bare replays", None)
            began = time.perf_counter()
            for _ in range(WINDOW):
                graph.replay()
            rank.settle()
            bare.append((time.perf_counter() - began) / WINDOW)
    kernels = _kernels(rank, graph) if graph is not None and size in rank.arguments.get("profiled", ()) else None
    serving.cut_off()
    step, alone = statistics.median(steps), statistics.median(bare) if bare else None
    return {
        "entry": str(forward.entry),
        "step us": round(step * 1e6, 1),
        "bare us": None if alone is None else round(alone * 1e6, 1),
        "step / bare": None if alone is None else round(step / alone, 4),
        "steps us": [round(each * 1e6, 1) for each in steps],
        **({} if kernels is None else {"kernels of a replay on each rank": kernels}),
    }


def _kernels(rank: Rank, graph: Any) -> list[Any]:
    """Return, of each rank, what the kernels of one replay take, in microseconds and by name."""
    times, count, total = 3, Counter[str](), dict[str, float]()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rank.peers.exchange("profiled replays", None)
        for _ in range(times):
            graph.replay()
        rank.settle()
    for event in profile.events():
        if event.device_time:
            name = event.name[:90]
            total[name] = total.get(name, 0.0) + event.device_time
            count[name] += 1
    longest = sorted(total.items(), key=lambda item: -item[1])[:14]
    mine: Any = {
        "us": round(sum(total.values()) / times, 1),
        "kernels": round(sum(count.values()) / times, 1),
        "longest": [[name, round(us / times, 1), round(count[name] / times, 1)] for name, us in longest],
    }
    return list(rank.peers.exchange("kernels", mine))


def _has_prompts(serving: Any) -> bool:
    states = serving.scheduler.states
    return any(
        states.computed[live.state_index] < states.prompt[live.state_index] for live in serving.scheduler.unfinished
    )


def sums(rank: Rank) -> None:
    """Time all-reduces of a layer's output by number of rows, in graphs of 32 of them; by kind."""
    group, found = rank.peers.tensor_group(), []
    assert group is not None
    largest = 8 << 20
    among = SymmetricCollectives(group, rank.device, largest=largest)
    for rows in rank.arguments["rows"]:
        row: dict[str, Any] = {"rows": rows, "bytes": rows * 4096 * 2}
        for kind, most in (("nccl", 0), ("symmetric", largest)):
            among.largest = most
            inputs = torch.ones(rows, 4096, dtype=torch.bfloat16, device=rank.device)
            row[kind] = round(_sum_of(rank, among, inputs), 2)
        found.append(row)
        rank.write({"rows": found})
    among.release()


def _sum_of(rank: Rank, among: Any, inputs: torch.Tensor) -> float:
    """Return microseconds of one all-reduce in a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            among.all_reduce(inputs.clone())
        torch.cuda.synchronize()
        rank.peers.exchange("capture of sums", None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(32):
                among.all_reduce(inputs.clone())
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            rank.peers.exchange("sums", None)
            began = time.perf_counter()
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) / 320 * 1e6)
    del graph
    return statistics.median(times)


def agreement(rank: Rank) -> None:
    """Measure what agreeing costs two replicas: on the host, and in a step next to one without it."""
    model = large(rank, rank.arguments["layers"])
    target = load(rank, model, collectives_of(rank.peers, rank.device))
    compilation = Compilation(rank.peers, target.among)
    found: dict[str, Any] = {"rows": [], "over": getattr(rank.peers, "agrees_over", "nothing")}
    sizes = rank.arguments["sizes"]
    plan = plan_of(rank, model, rank.arguments["backend"], max(sizes), sizes, 0, GraphMode.FULL_DECODE_ONLY)
    for size in sizes:
        row: dict[str, Any] = {"requests of each replica": size}
        for label, peers in (("alone", ALONE), ("together", rank.peers), ("alone again", ALONE)):
            with runner_of(rank, plan, target, peers=peers, compilation=compilation) as runner:
                runner.capture()
                rank.peers.exchange(f"{label} {size}", None)
                row[label] = _decode_of(rank, runner, size)["step us"]
                seconds = sorted(step.seconds * 1e6 for step in runner.session.rank_steps)
            if seconds:
                row["agreement us"] = {
                    "median": round(statistics.median(seconds), 1),
                    "fastest": round(seconds[0], 1),
                    "p90": round(seconds[int(0.9 * len(seconds))], 1),
                }
        found["rows"].append(row)
        rank.write(found)
    # Each rank by itself: both come at once, so that no one waits.
    times = []
    for _ in range(300):
        rank.peers.agree([0] * 7)
        began = time.perf_counter()
        rank.peers.agree([0] * 7)
        times.append((time.perf_counter() - began) * 1e6)
    found["all-gather alone, us"] = {
        "median": round(statistics.median(times), 1),
        "p90": round(sorted(times)[int(0.9 * len(times))], 1),
    }
    rank.write(found)


PARTS = {part.__name__: part for part in (tokens, decode, sums, agreement, fault)}


def main() -> int:
    """Run one part as one rank: its name, a file for the results, and its arguments as JSON."""
    part, file, arguments = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    is_first = os.environ.get("RANK", "0") == "0"

    def write(found: dict[str, Any]) -> None:
        if is_first:
            partial = file.with_suffix(".part")
            partial.write_text(json.dumps(found), "utf-8")
            partial.replace(file)

    try:
        with connected_ranks(arguments) as (peers, device), torch.no_grad():
            environment = host.this_environment("here", gpu=device.type == "cuda")
            PARTS[part](Rank(peers=peers, device=device, environment=environment, arguments=arguments, write=write))
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
